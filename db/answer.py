"""The answer of a lookup, and the chain of sources that may give it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, cast, get_args

from ..kernel_templates.errors import InputError
from ..kernel_templates.outcome import BestConfig
from ..kernel_templates.variant import Variant

Source = Literal["exact", "bucket", "neighbour", "heuristic"]
"""The source of an answer:

- exact: a config tuned on this batch.
- bucket: a config tuned on another batch of the bucket. Not every config may answer for other batches
  (`heuristic.may_depend_on_waves`).
- neighbour: a config of the nearest bucket that may answer (`Chain`).
- heuristic: no tuned config.
"""

SOURCES: tuple[Source, ...] = get_args(Source)
"""The sources in the order of the lookup, the best first."""

Origin = Literal["database", "file", "shipped"]
"""The origin of a config: the user's database, a file that the user named, or the package. Of equally good configs, the
one of the earlier origin answers."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The variant to run, valid for the question."""

    # Differs from the config's variant if the batch lacks a part that the tuned batch had.
    variant: Variant
    # "exact" only if a `Batch` was asked. An engine that asks for a bucket, as `HybridAttention` does, gets one answer
    # for all its batches.
    source: Source
    # The tuned config; None for the heuristic.
    config: BestConfig | None = None
    # True if the config was measured with another kernel source, Triton or driver, or the installed Triton is unknown.
    stale: bool = False
    # Distance of the asked bucket from the tuned one (`BatchBucket.distance`). For the heuristic: from the nearest
    # tuned bucket on this GPU, None if there is none.
    distance: float | None = None
    # The origin of the config; None for the heuristic.
    origin: Origin | None = None
    # Expected slowdown against the best variant, 0.02 for two percent: the median measured for answers from about this
    # distance; None if none was measured.
    loss: float | None = None
    # The GPU that the config was tuned on, if it is another one that the chain allows.
    lender: str | None = None


REACH = 1.0
"""The default reach of a neighbour: one size of the batch differs by a factor of 2.

Leave-one-out on an H200 (benchmarks/results/leave_one_out_h200.json): neighbours at distance 2 or 3 were as good as the
heuristic, whose values come from these shapes; neighbours at distance 4 were much worse. Between tuned shapes, a
neighbour at distance 2 lost a tenth (benchmarks/results/h200_peers/edges.json, 24 sequences).
"""


@dataclass(frozen=True, slots=True)
class Chain:
    """The sources of a lookup in order: exact, bucket, neighbour, then the same on each GPU of `like`, then heuristic.

    A config of the bucket answers unless its win may depend on the tile count (`heuristic.may_depend_on_waves`). A
    neighbour answers up to distance `reach` (`BatchBucket.distance`), unless its variant never splits KV
    (`Template.never_splits_kv`) or its short sequences have another skew. Raises `InputError` for a `worst` that is no
    source, a `like` that is no list of names and a `reach` that is no distance.
    """

    # The worst source that may answer. If only a worse one could, the lookup raises `NotTunedError`.
    worst: Source = "heuristic"
    # Other GPUs of the same compute capability whose configs may answer, such as "NVIDIA H200" for an H100. Their
    # answers have the source "neighbour".
    like: tuple[str, ...] = ()
    # The largest distance of a neighbour.
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
        lenders = [f"configs of {name}" for name in self.like if "neighbour" in accepted]
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
