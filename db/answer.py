"""What a lookup answers, and how far down its chain of fall-backs an answer may come from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, cast, get_args

from ..kernel_templates.errors import InputError
from ..kernel_templates.outcome import BestConfig
from ..kernel_templates.variant import Variant

Source = Literal["exact", "bucket", "neighbour", "heuristic"]
"""Where an answer comes from: a config tuned on this very batch, on another one of its bucket, on the nearest bucket
that has one which may answer there (`Chain`), or none. Not all that is tuned may answer for others of its bucket
(`heuristic.depends_on_rounds`)."""

SOURCES: tuple[Source, ...] = get_args(Source)
"""The sources in the order in which they are asked, the best first."""

Origin = Literal["database", "file", "shipped"]
"""Who measured it: the user, in whose database it is or who named the file, or who made the package, with which it
ships. In this order they answer where they are alike."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The variant to run, valid for what was asked.

    `source` is "exact" only where a `Batch` was asked for: an engine that asks for a bucket, as `HybridAttention` does
    in every step, is answered alike for all batches of it. `config` is what was tuned, None for the heuristic;
    `variant` may differ from its variant where the batch lacks a part that the tuned one had. `stale` says that it was
    measured with another kernel source, Triton or driver, or that the Triton here is unknown. `distance` is that of the
    asked bucket from the tuned one (`BatchBucket.distance`), for the heuristic from the nearest that is tuned for this
    GPU, None where none is. `origin` says whose the config is, None for the heuristic. `loss` is what the variant is
    expected to be slower by than the best one for the batch, 0.02 being two percent: the median of answers from about
    as far, None where none were measured from so far. `lender` names the other GPU that the config was tuned on, where
    the chain lets it answer.
    """

    variant: Variant
    source: Source
    config: BestConfig | None = None
    stale: bool = False
    distance: float | None = None
    origin: Origin | None = None
    loss: float | None = None
    lender: str | None = None


REACH = 1.0
"""How far a neighbour answers where nothing else is said: as with one size of the batch off by a factor of 2.

On an H200, leaving each tuned shape out in turn, neighbours from 2 or 3 away were as good as the heuristic, the values
of which are of those shapes, and ones from 4 away much worse (benchmarks/results/leave_one_out_h200.json); between the
tuned shapes one from 2 away lost a tenth (benchmarks/results/h200_peers/edges.json, 24 sequences).
"""


@dataclass(frozen=True, slots=True)
class Chain:
    """The fall-backs of a lookup: exact, bucket, neighbour, then the same on each GPU of `like`, then heuristic.

    A neighbour answers up to distance `reach` (`BatchBucket.distance`), unless its variant leaves keys whole
    (`template.leaves_keys_whole`) or its short sequences have another skew; one of the bucket itself, unless that makes
    it depend on the count of tiles (`heuristic.depends_on_rounds`). `worst` is the last source that may answer: where
    only a worse one could, the lookup raises `NotTunedError`. `like` names other GPUs, such as "NVIDIA H200" for an
    H100: of those with the asking GPU's compute capability, what was tuned may answer, as a neighbour at best. No GPU
    lends unless it is named here. Raises `InputError` for a `worst` that is no source, a `like` that is no list of
    names and a `reach` that is no distance.
    """

    worst: Source = "heuristic"
    like: tuple[str, ...] = ()
    reach: float = REACH

    def __post_init__(self) -> None:
        if self.worst not in SOURCES:
            raise InputError(f"there is no source {self.worst!r}; expected one of {', '.join(SOURCES)}")
        object.__setattr__(self, "like", _names(self.like))
        object.__setattr__(self, "reach", _distance(self.reach))

    def accepts(self, source: Source) -> bool:
        """Whether an answer may come from `source`."""
        return SOURCES.index(source) <= SOURCES.index(self.worst)

    def __str__(self) -> str:
        accepted = [source for source in SOURCES if self.accepts(source)]
        lenders = [f"what was tuned on {name}" for name in self.like if "neighbour" in accepted]
        at = accepted.index("heuristic") if "heuristic" in accepted else len(accepted)
        return ", ".join([*accepted[:at], *lenders, *accepted[at:]])


def _names(like: object) -> tuple[str, ...]:
    names: list[object] = [*cast("Iterable[object]", like)] if isinstance(like, tuple | list) else [None]
    if not all(isinstance(name, str) and name.strip() for name in names):
        raise InputError(f"a chain's `like` cannot be {like!r}; expected the names of GPUs, such as (\"NVIDIA H200\",)")
    return cast("tuple[str, ...]", tuple(names))


def _distance(reach: object) -> float:
    if isinstance(reach, bool) or not isinstance(reach, int | float) or not reach >= 0:
        raise InputError(f"a chain's `reach` cannot be {reach!r}; expected a number from 0 on, such as {REACH}")
    return float(reach)
