"""The settings of a run, the division of its time, and the records of what it does."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, field

from ..kernel_templates.errors import InputError
from ..kernel_templates.outcome import GRAPH, BestConfig, Failed, Outcome, Regime, Skipped, Timed, Wrong
from ..kernel_templates.task import Task
from ..kernel_templates.variant import Variant
from .sampling.samplers import DEFAULT_SAMPLER

Reason = tuple[str, str, str]
"""Why a trial has no time: its outcome, the stage at which it failed or nothing, and the reason."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How to search. Raises `InputError` for numbers that make no sense.

    `trials` variants are tried for each task, stored ones among them; `seconds`, if not None, is the wall time of the
    whole run. `ahead` is how many variants may be asked for before the first of them is measured, None meaning
    `AHEAD` for each process that compiles, `samples` how many times each is timed before the final race, and
    `finalists` how many go there beside the default. With `cross`, what won one task is then tried on the others.
    """

    trials: int = 30
    seconds: float | None = None
    seed: int = 0
    sampler: str = DEFAULT_SAMPLER
    ahead: int | None = None
    finalists: int = 8
    samples: int = 5
    regime: Regime = GRAPH
    cross: bool = False

    def __post_init__(self) -> None:
        for name in ("trials", "ahead", "finalists", "samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1, not {value}")
        if self.seconds is not None and not (math.isfinite(self.seconds) and self.seconds > 0):
            raise InputError(f"seconds must be a positive number, not {self.seconds}")

    def as_json(self) -> dict[str, object]:
        """The settings as values that JSON can hold."""
        return {**asdict(self), "regime": str(self.regime)}


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the search for `task` stands after `outcome`: `done` of `planned` trials, in milliseconds and seconds."""

    task: Task
    outcome: Outcome
    done: int
    planned: int
    best_ms: float | None
    default_ms: float | None
    outcomes: Counter[str]
    seconds_left: float


@dataclass(slots=True)
class TaskResult:
    """What came of one task; `best` is None where no variant was right and timed.

    `tried` trials are new, and `reused` were stored; `outcomes` and `reasons` count both, `outdated` counts stored
    trials that could not be reused, by reason. `baseline` is the default, or what stood in for it where that cannot
    run; `repeated` new trials have the code and launch of another, and its result. Of the wall time `seconds`, the GPU
    was measuring or checking for `measuring_seconds`, and every process of the compile pool was busy for
    `compiling_seconds`. `discarded_blocks` of its races were run again, or given up, because the card drifted. Of its
    variants' kernels, `compiles` were compiled for this task and `shared` had been for another one of the run.
    `crossed` trials, which `tried` does not count, are of what won other tasks, and took `cross_seconds`.
    """

    task: Task
    best: BestConfig | None = None
    baseline: Variant | None = None
    outcomes: Counter[str] = field(default_factory=Counter[str])
    reasons: Counter[Reason] = field(default_factory=Counter[Reason])
    outdated: Counter[str] = field(default_factory=Counter[str])
    tried: int = 0
    reused: int = 0
    repeated: int = 0
    seconds: float = 0.0
    measuring_seconds: float = 0.0
    compiling_seconds: float = 0.0
    discarded_blocks: int = 0
    compiles: int = 0
    shared: int = 0
    crossed: int = 0
    cross_seconds: float = 0.0

    @property
    def measured_per_second(self) -> float:
        """New trials in a second of wall time; 0 when there was no time."""
        return self.tried / self.seconds if self.seconds else 0.0

    @property
    def skipped(self) -> int:
        """Variants that were not tried, for a reason known before."""
        return self.outcomes["skipped"]

    def count(self, outcome: Outcome) -> None:
        """Count `outcome` by its kind, and by its reason where it has no time."""
        kind = type(outcome).__name__.lower()
        self.outcomes[kind] += 1
        match outcome:
            case Failed(_, stage, reason):
                self.reasons[kind, stage, reason] += 1
            case Skipped(_, reason):
                self.reasons[kind, "", reason] += 1
            case Wrong():
                self.reasons[kind, "", outcome.reason] += 1
            case Timed():
                pass


class Listener:
    """Is told what happens; a listener overrides what it wants to hear."""

    def started(self, task: Task, valid: int, reused: int) -> None:
        """The search for `task` begins over `valid` variants, with the outcomes of `reused` stored trials."""

    def tried(self, progress: Progress) -> None:
        """A trial is finished and stored."""

    def racing(self, task: Task, variants: tuple[Variant, ...]) -> None:
        """The final race begins."""

    def finished(self, result: TaskResult) -> None:
        """All is done and stored for a task."""
