"""Records of trials (timing, check, outcome), best configs and full checks."""

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
    """The conditions of a timing. Compare times of one regime only."""

    # "graph" (a captured CUDA graph), "eager" or "interpreter".
    capture: str
    # "cold" or "warm", before each launch.
    l2: str = "cold"
    # "burst" or "sustained".
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
        """The regime that `str` wrote as `text`. Raises `TunerError` for any other text."""
        if text.count("-") != 2:
            raise TunerError(f"{text!r} does not name a regime")
        return cls(*text.split("-"))


GRAPH = Regime("graph")


@dataclass(frozen=True, slots=True)
class Timing:
    """The raw samples of one regime."""

    # One time for each sample, in milliseconds.
    samples_ms: tuple[float, ...]
    regime: Regime
    # Time on the host to plan the launch.
    plan_ms: float = 0.0

    def __post_init__(self) -> None:
        if not self.samples_ms or not all(map(math.isfinite, self.samples_ms)) or min(self.samples_ms) <= 0:
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
    """The distance of a variant's output from the reference."""

    # The largest error of a row divided by the row's tolerance; NaN when the output has one.
    worst_ratio: float
    # "quick" or "full".
    level: str = "quick"
    # Position of the worst row.
    detail: str = ""

    @property
    def passed(self) -> bool:
        """True if every row is within its tolerance; a NaN is not."""
        return self.worst_ratio <= 1.0


@dataclass(frozen=True, slots=True)
class StaticFacts:
    """The compiler's figures for a variant's largest kernel."""

    # Shared memory of a program.
    shared_bytes: int
    # Registers of a thread; None if no tool could read them. For display only.
    registers: int | None
    # Stack of a thread; None as for `registers`.
    stack_bytes: int | None
    # Instruction of the tensor cores, such as "wgmma.mma_async"; "" for none.
    tensor_core: str = ""
    # Hash of the machine code of all kernels.
    code_hash: str = ""


@dataclass(frozen=True, slots=True)
class Timed:
    """The variant's output was right, and it was timed."""

    variant: Variant
    check: Check
    timing: Timing
    # The variant with the same code and launch whose measurement is reused; None if this one was measured.
    same_as: Variant | None = None


@dataclass(frozen=True, slots=True)
class Wrong:
    """The variant's output was wrong."""

    variant: Variant
    check: Check

    @property
    def reason(self) -> str:
        """The reason that reports count it under."""
        return "wrong result"


@dataclass(frozen=True, slots=True)
class Failed:
    """The variant could not be compiled or run."""

    variant: Variant
    # "compile", "check" or "time".
    stage: str
    reason: str


@dataclass(frozen=True, slots=True)
class Skipped:
    """The variant was not tried, for a reason known beforehand."""

    variant: Variant
    reason: str


Outcome = Timed | Wrong | Failed | Skipped


class JobError(TunerError):
    """A job without a result: it raised, or its process died or exceeded its limit.

    `stage` and `variant` are the last that the job reported; "" and None if it reported none.
    """

    def __init__(self, reason: str, stage: str = "", variant: Variant | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.stage = stage
        self.variant = variant


class Verdict(enum.Enum):
    """The best variant compared with the next: clearly faster, tied (the simpler is kept) or undecided."""

    FAST = "fast"
    TIE = "tie"
    AMBIGUOUS = "ambiguous"


@dataclass(frozen=True, slots=True)
class Environment:
    """Code and versions that must be equal for a time to be reused."""

    kernel_hash: str
    # Versions; "" for an unknown one.
    triton: str
    torch: str
    driver: str


CASE_STATES = ("passed", "failed", "not run")


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The result of one case of a full check."""

    name: str
    # One of `CASE_STATES`.
    state: str
    # As in `Check`; None if no finite ratio was found.
    worst_ratio: float | None = None
    # Why the case failed or was not run.
    reason: str = ""

    def __post_init__(self) -> None:
        if self.state not in CASE_STATES:
            raise TunerError(f"a case is not {self.state!r}; expected one of {', '.join(CASE_STATES)}")


@dataclass(frozen=True, slots=True)
class FullCheck:
    """The full check of a variant for a layer, for all batches. Raises `TunerError` if no case was run."""

    spec: AttentionSpec
    variant: Variant
    gpu_name: str
    environment: Environment
    # In the order of the run.
    cases: tuple[CaseResult, ...]
    # ISO 8601, in UTC.
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
        """True if every case that was run passed."""
        return self.failure is None

    @property
    def unrun(self) -> int:
        """The number of cases not run: not applicable to the variant, or lacking memory, GPU or tool."""
        return sum(case.state == "not run" for case in self.cases)

    @property
    def worst(self) -> CaseResult | None:
        """The case with the largest ratio; None if no case has one."""
        with_ratio = [case for case in self.cases if case.worst_ratio is not None]
        return max(with_ratio, key=lambda case: case.worst_ratio or 0.0, default=None)


@dataclass(frozen=True, slots=True)
class BestConfig:
    """The best variant found for a shape, a page size and a GPU.

    Raises `TunerError` when the batch cannot be read or is of another bucket than the shape.
    """

    shape: Shape
    gpu: Gpu
    variant: Variant
    timing: Timing
    # The default variant's timing in the same race.
    default_timing: Timing
    verdict: Verdict
    # False while only the quick check has passed.
    full_check: bool
    environment: Environment
    # The tuned batch, as text.
    batch: str
    # ISO 8601, in UTC.
    measured_at: str

    def __post_init__(self) -> None:
        bucket = _bucket_of(self.batch)
        if bucket != self.shape.bucket:
            raise TunerError(f"batch {self.batch!r} is of bucket {bucket.key()}, not {self.shape.bucket.key()}")

    @property
    def speedup(self) -> float:
        """The default's median time divided by this variant's."""
        return self.default_timing.median_ms / self.timing.median_ms


@functools.lru_cache(1024)
def _bucket_of(batch: str) -> BatchBucket:
    """The bucket of a batch given as text. Cached: a database has many configs of few batches, and parsing is slow."""
    return BatchBucket.of(Batch.parse(batch))
