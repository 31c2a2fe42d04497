"""What a tuning run is given, what runs its jobs, whom it tells, and what it gives back."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Protocol, TypeVar

from ..db.records import EnvironmentOf
from ..db.store import Store
from ..kernel_templates.errors import InputError
from ..kernel_templates.gpu import Gpu
from ..kernel_templates.outcome import BestConfig, Failed, Outcome, Regime, Skipped, StaticFacts, Timed, Wrong
from ..kernel_templates.sources import environment
from ..kernel_templates.variant import Variant
from .child import Job
from .jobs import GRAPH, CompileJob
from .task import Task

R = TypeVar("R")

Reason = tuple[str, str, str]
"""Why a trial has no time: its outcome, the stage at which it failed or nothing, and the reason."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How to search. Raises `InputError` for numbers that make no sense.

    `trials` variants are tried for each task, stored ones among them; `seconds`, if not None, is the wall time of the
    whole run. `ahead` is how many variants may be asked for before the first of them is measured, `samples` how many
    times each is timed before the final race, and `finalists` how many go there beside the default.
    """

    trials: int = 30
    seconds: float | None = None
    seed: int = 0
    sampler: str = "tpe"
    ahead: int = 16
    finalists: int = 8
    samples: int = 5
    regime: Regime = GRAPH

    def __post_init__(self) -> None:
        for name in ("trials", "ahead", "finalists", "samples"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.seconds is not None and not (math.isfinite(self.seconds) and self.seconds > 0):
            raise InputError(f"seconds must be a positive number, not {self.seconds}")

    def as_json(self) -> dict[str, object]:
        """The settings as values that JSON can hold."""
        return {**asdict(self), "regime": str(self.regime)}


class Runner(Protocol):
    """Runs jobs one at a time, as `Worker` does."""

    def run(self, job: Job[R], timeout_s: float) -> R:
        """The result of `job`. Raises `JobError` for one that has none."""
        ...

    def close(self) -> None:
        """End what runs."""
        ...


class Compiler(Protocol):
    """Compiles ahead, as `CompilePool` does."""

    processes: int

    @property
    def pending(self) -> int:
        """Jobs whose results were not returned yet."""
        ...

    def submit(self, job: CompileJob) -> None:
        """Queue `job`."""
        ...

    def results(self, wait_s: float) -> list[tuple[Variant, StaticFacts | Failed]]:
        """What was compiled since the last call; waits up to `wait_s` for one."""
        ...

    def forget(self) -> None:
        """Drop what is queued, and return no results of what was submitted so far."""
        ...

    def close(self) -> None:
        """Kill what compiles."""
        ...


@dataclass(frozen=True, slots=True)
class Executor:
    """What runs the jobs; without a `pool` nothing is compiled ahead. `clock` tells seconds."""

    worker: Runner
    pool: Compiler | None = None
    environment_of: EnvironmentOf = environment
    clock: Callable[[], float] = time.monotonic

    def close(self) -> None:
        """End all processes."""
        self.worker.close()
        if self.pool is not None:
            self.pool.close()


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


@dataclass(slots=True)
class TaskResult:
    """What came of one task; `best` is None where no variant was right and timed.

    `tried` trials are new, and `reused` were stored; `outcomes` and `reasons` count both, `outdated` counts stored
    trials that could not be reused, by reason. `baseline` is the default, or what stood in for it where that cannot
    run. Of the wall time `seconds`, the worker was busy for `measuring_seconds`, and every process of the compile pool
    for `compiling_seconds`.
    """

    task: Task
    best: BestConfig | None = None
    baseline: Variant | None = None
    outcomes: Counter[str] = field(default_factory=Counter[str])
    reasons: Counter[Reason] = field(default_factory=Counter[Reason])
    outdated: Counter[str] = field(default_factory=Counter[str])
    tried: int = 0
    reused: int = 0
    seconds: float = 0.0
    measuring_seconds: float = 0.0
    compiling_seconds: float = 0.0

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


@dataclass(frozen=True, slots=True)
class Run:
    """One run over several tasks: everything that they share. It ends by `deadline` of the executor's clock."""

    gpu: Gpu
    store: Store
    settings: Settings
    executor: Executor
    listener: Listener
    run_id: int
    deadline: float = math.inf

    @property
    def seconds_left(self) -> float:
        """Wall time left to the run."""
        return self.deadline - self.executor.clock()

    @property
    def regime(self) -> Regime:
        """The regime asked for: the interpreter has only its own."""
        return Regime("interpreter") if self.gpu.is_interpreter else self.settings.regime
