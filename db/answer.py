"""The answer of a lookup, and the chain of sources that it may come from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, cast, get_args

from ..kernel_templates.errors import InputError
from ..kernel_templates.outcome import BestConfig
from ..kernel_templates.variant import Variant

Source = Literal["exact", "bucket", "neighbour", "heuristic"]
"""The source of an answer: a config tuned on this very batch, one tuned on another batch of its bucket, one of the
nearest bucket that may answer (`Chain`), or no tuned config at all. Not every config may answer for other batches of
its bucket (`heuristic.may_depend_on_waves`)."""

SOURCES: tuple[Source, ...] = get_args(Source)
"""The sources in the order in which they are tried, the best first."""

Origin = Literal["database", "file", "shipped"]
"""The owner of a config: the user's database, a file that the user named, or the package that it ships with. Of configs
that are equally good, the one of the earlier origin answers."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The variant to run, valid for what was asked."""

    # Differs from the config's variant if the batch lacks a part that the tuned one had.
    variant: Variant
    # "exact" only for a `Batch`. An engine that asks for a bucket, as `HybridAttention` does in every step, gets one
    # answer for all batches of it.
    source: Source
    # The tuned config, None for the heuristic.
    config: BestConfig | None = None
    # True if the config was measured with another kernel source, Triton or driver, or if the Triton here is unknown.
    stale: bool = False
    # Distance of the asked bucket from the tuned one (`BatchBucket.distance`); for the heuristic from the nearest
    # bucket tuned on this GPU, None if there is none.
    distance: float | None = None
    # The owner of the config, None for the heuristic.
    origin: Origin | None = None
    # Expected slowdown against the best variant for the batch, 0.02 for two percent: the median that was measured for
    # answers from about this distance, None if none was measured.
    loss: float | None = None
    # The GPU that the config was tuned on, if the chain let another GPU lend it.
    lender: str | None = None


REACH = 1.0
"""The default reach of a neighbour: one size of the batch off by a factor of 2.

On an H200, leaving each tuned shape out in turn, neighbours from 2 or 3 away were as good as the heuristic, the values
of which are of those shapes, and ones from 4 away much worse (benchmarks/results/leave_one_out_h200.json); between the
tuned shapes one from 2 away lost a tenth (benchmarks/results/h200_peers/edges.json, 24 sequences).
"""


@dataclass(frozen=True, slots=True)
class Chain:
    """The fall-backs of a lookup: exact, bucket, neighbour, then the same on each GPU of `like`, then heuristic.

    A neighbour answers up to distance `reach` (`BatchBucket.distance`), unless its variant never splits KV
    (`Template.never_splits_kv`) or its short sequences have another skew; one of the bucket itself, unless that makes
    it depend on the count of tiles (`heuristic.may_depend_on_waves`). Raises `InputError` for a `worst` that is no
    source, a `like` that is no list of names and a `reach` that is no distance.
    """

    # The last source that may answer. If only a worse one could, the lookup raises `NotTunedError`.
    worst: Source = "heuristic"
    # Other GPUs whose configs may answer, as neighbours at best, such as "NVIDIA H200" for an H100. They must have the
    # asking GPU's compute capability. No GPU lends unless it is named.
    like: tuple[str, ...] = ()
    reach: float = REACH

    def __post_init__(self) -> None:
        if self.worst not in SOURCES:
            raise InputError(f"there is no source {self.worst!r}; expected one of {', '.join(SOURCES)}")
        object.__setattr__(self, "like", _checked_names(self.like))
        object.__setattr__(self, "reach", _checked_reach(self.reach))

    def accepts(self, source: Source) -> bool:
        """True if an answer may come from `source`."""
        return SOURCES.index(source) <= SOURCES.index(self.worst)

    def __str__(self) -> str:
        accepted = [source for source in SOURCES if self.accepts(source)]
        lenders = [f"what was tuned on {name}" for name in self.like if "neighbour" in accepted]
        at = accepted.index("heuristic") if "heuristic" in accepted else len(accepted)
        return ", ".join([*accepted[:at], *lenders, *accepted[at:]])


def _checked_names(like: object) -> tuple[str, ...]:
    names: list[object] = [*cast("Iterable[object]", like)] if isinstance(like, tuple | list) else [None]
    if not all(isinstance(name, str) and name.strip() for name in names):
        raise InputError(f"a chain's `like` cannot be {like!r}; expected the names of GPUs, such as (\"NVIDIA H200\",)")
    return cast("tuple[str, ...]", tuple(names))


def _checked_reach(reach: object) -> float:
    if isinstance(reach, bool) or not isinstance(reach, int | float) or not reach >= 0:
        raise InputError(f"a chain's `reach` cannot be {reach!r}; expected a number from 0 on, such as {REACH}")
    return float(reach)
