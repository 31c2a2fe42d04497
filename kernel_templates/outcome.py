"""What came of trying a variant, and what is kept of it."""

from __future__ import annotations

import enum
import functools
import math
import statistics
from dataclasses import dataclass

from .batch import Batch, BatchBucket, Shape
from .errors import TunerError
from .gpu import Gpu
from .spec import AttentionSpec
from .variant import Variant


@dataclass(frozen=True, slots=True)
class Regime:
    """How a time was taken: `capture` "graph", "eager" or "interpreter"; `l2` "cold" or "warm"; `load` "burst" or
    "sustained". Times of different regimes are not comparable."""

    capture: str
    l2: str = "cold"
    load: str = "burst"

    def __post_init__(self) -> None:
        valid = (("graph", "eager", "interpreter"), ("cold", "warm"), ("burst", "sustained"))
        for value, choices in zip((self.capture, self.l2, self.load), valid, strict=True):
            if value not in choices:
                raise TunerError(f"a regime has no {value!r}; expected one of {', '.join(choices)}")

    def __str__(self) -> str:
        return f"{self.capture}-{self.l2}-{self.load}"

    @classmethod
    def parse(cls, text: str) -> Regime:
        """Read what `str` wrote. Raises `TunerError` for anything else."""
        if text.count("-") != 2:
            raise TunerError(f"{text!r} does not name a regime")
        return cls(*text.split("-"))


GRAPH = Regime("graph")


@dataclass(frozen=True, slots=True)
class Timing:
    """Raw samples in milliseconds, all of one regime; `plan_ms` is what planning the launch took on the host."""

    samples_ms: tuple[float, ...]
    regime: Regime
    plan_ms: float = 0.0

    def __post_init__(self) -> None:
        if not self.samples_ms or not all(math.isfinite(s) and s > 0 for s in self.samples_ms):
            raise TunerError("a timing needs at least one sample, each a positive number of milliseconds")
        if not (math.isfinite(self.plan_ms) and self.plan_ms >= 0):
            raise TunerError(f"planning takes a finite number of milliseconds, at least 0, not {self.plan_ms}")

    @property
    def median_ms(self) -> float:
        """The median of the samples, in milliseconds."""
        return statistics.median(self.samples_ms)

    @property
    def quartiles_ms(self) -> tuple[float, float]:
        """The lower and upper quartile of the samples, in milliseconds."""
        if len(self.samples_ms) == 1:
            return self.samples_ms * 2  # pyright: ignore[reportReturnType]
        lower, _, upper = statistics.quantiles(self.samples_ms, n=4, method="inclusive")
        return lower, upper


@dataclass(frozen=True, slots=True)
class Check:
    """How far a variant's output was from the reference.

    `worst_ratio` is the largest error over what its row tolerates, NaN when the output held one; `level` is "quick" or
    "full". `detail` says where the worst row is.
    """

    worst_ratio: float
    level: str = "quick"
    detail: str = ""

    @property
    def passed(self) -> bool:
        """Whether every row is within its tolerance; NaN is not."""
        return self.worst_ratio <= 1.0


@dataclass(frozen=True, slots=True)
class StaticFacts:
    """What the compiler said of a variant's largest kernel: per program, and `stack_bytes` per thread.

    `registers` and `stack_bytes` are None where no tool could read them; nothing is decided by them.
    """

    shared_bytes: int
    registers: int | None
    stack_bytes: int | None
    tensor_core: str = ""
    code_hash: str = ""


@dataclass(frozen=True, slots=True)
class Timed:
    """The variant was right and was timed; or `same_as` was, which has the same code and launch: this is its result."""

    variant: Variant
    check: Check
    timing: Timing
    same_as: Variant | None = None


@dataclass(frozen=True, slots=True)
class Wrong:
    """The variant ran and its output was wrong."""

    variant: Variant
    check: Check

    @property
    def reason(self) -> str:
        """The reason as it is counted."""
        return "wrong result"


@dataclass(frozen=True, slots=True)
class Failed:
    """The variant could not be compiled or run; `stage` is "compile", "check" or "time"."""

    variant: Variant
    stage: str
    reason: str


@dataclass(frozen=True, slots=True)
class Skipped:
    """The variant was not tried, for a reason known before."""

    variant: Variant
    reason: str


Outcome = Timed | Wrong | Failed | Skipped


class JobError(TunerError):
    """A job without a result: it raised, or its process died or exceeded its limit.

    `stage` and `variant` are those that the job reported last, "" and None where it reported none.
    """

    def __init__(self, reason: str, stage: str = "", variant: Variant | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.stage = stage
        self.variant = variant


class Verdict(enum.Enum):
    """How the best variant stands against the next: clearly faster, tied (the simpler is kept) or undecided."""

    FAST = "fast"
    TIE = "tie"
    AMBIGUOUS = "ambiguous"


@dataclass(frozen=True, slots=True)
class Environment:
    """What must be equal for a time to be reused."""

    kernel_hash: str
    triton: str
    torch: str
    driver: str


CASE_STATES = ("passed", "failed", "not run")


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What came of one case of the full check: `state` is "passed", "failed" or "not run".

    `worst_ratio` is the case's as in `Check`, None where no finite one was found; `reason` says why a case failed or
    was not run.
    """

    name: str
    state: str
    worst_ratio: float | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        if self.state not in CASE_STATES:
            raise TunerError(f"a case is not {self.state!r}; expected one of {', '.join(CASE_STATES)}")


@dataclass(frozen=True, slots=True)
class FullCheck:
    """The full check of a variant for a layer: it belongs to no shape, but to what compiled and ran the variant.

    `cases` are in the order in which they were run; `checked_at` is ISO 8601 in UTC. Raises `TunerError` where no case
    was run.
    """

    spec: AttentionSpec
    variant: Variant
    gpu_name: str
    environment: Environment
    cases: tuple[CaseResult, ...]
    checked_at: str

    def __post_init__(self) -> None:
        if all(case.state == "not run" for case in self.cases):
            raise TunerError(f"no case of the full check of {self.variant.key()!r} was run")

    @property
    def failure(self) -> CaseResult | None:
        """The first case that failed."""
        return next((case for case in self.cases if case.state == "failed"), None)

    @property
    def passed(self) -> bool:
        """Whether every case that was run passed."""
        return self.failure is None

    @property
    def unrun(self) -> int:
        """How many cases were not run: moot for the variant, or for want of memory, a GPU or a tool."""
        return sum(case.state == "not run" for case in self.cases)

    @property
    def worst(self) -> CaseResult | None:
        """The case with the largest ratio, None where none has one."""
        with_ratio = [case for case in self.cases if case.worst_ratio is not None]
        return max(with_ratio, key=lambda case: case.worst_ratio or 0.0, default=None)


@dataclass(frozen=True, slots=True)
class BestConfig:
    """The best variant found for a shape, a page size and a GPU, with the default's time in the same race.

    `batch` is the one it was tuned on, as text; `full_check` is false while only the quick check has passed;
    `measured_at` is ISO 8601 in UTC. Raises `TunerError` when the batch cannot be read or is of another bucket.
    """

    shape: Shape
    gpu: Gpu
    variant: Variant
    timing: Timing
    default_timing: Timing
    verdict: Verdict
    full_check: bool
    environment: Environment
    batch: str
    measured_at: str

    def __post_init__(self) -> None:
        bucket = _bucket_of(self.batch)
        if bucket != self.shape.bucket:
            raise TunerError(f"batch {self.batch!r} is of bucket {bucket.key()}, not {self.shape.bucket.key()}")

    @property
    def speedup(self) -> float:
        """The default's median time over this variant's."""
        return self.default_timing.median_ms / self.timing.median_ms


@functools.lru_cache(1024)
def _bucket_of(batch: str) -> BatchBucket:
    """The bucket of a batch as text. A database holds many configs of few batches, which take long to parse."""
    return BatchBucket.of(Batch.parse(batch))
