"""What a tuning run is given, what runs its jobs, whom it tells, and what it gives back."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Protocol, TypeVar

from ..db.records import EnvironmentOf
from ..db.store import Store
from ..kernel_templates.errors import InputError
from ..kernel_templates.gpu import Gpu
from ..kernel_templates.outcome import BestConfig, Failed, Outcome, Regime, Skipped, Timed, Timing, Wrong
from ..kernel_templates.sources import environment
from ..kernel_templates.task import Task
from ..kernel_templates.variant import Variant
from .measure.jobs import GRAPH
from .processes.builds import Builds, Compiler
from .processes.child import Job
from .recording import Recording
from .sampling.samplers import DEFAULT_SAMPLER

R = TypeVar("R")

# Enough that no process waits for the search while the variants that are compiled wait for the GPU.
AHEAD = 2

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


class Runner(Protocol):
    """Runs jobs one at a time, as `Worker` does."""

    @property
    def busy_s(self) -> float:
        """For how many seconds its jobs have had the process so far; waiting for the card does not count."""
        ...

    def submit(self, job: Job[R], timeout_s: float, deadline: float = math.inf) -> Future[R]:
        """The result to come of `job`, by `deadline` of the executor's clock; or a `JobError` for one that has none."""
        ...

    def start(self) -> None:
        """Start the process, and do not wait until it can work."""
        ...

    def ready(self, limit_s: float) -> bool:
        """Wait up to `limit_s` seconds until the process can work, and say whether it can."""
        ...

    def free(self) -> None:
        """Have the process give back what it keeps for the next job."""
        ...

    def close(self) -> None:
        """End what runs."""
        ...


@dataclass(frozen=True, slots=True)
class Executor:
    """What runs the jobs: searches in `worker`, and final races in `racer`, or else in `worker` too.

    Without a `pool` nothing is compiled ahead. `clock` tells seconds; `aside_s` of those that a run may take pass
    before or after it. `uuid` is that of the card whose state is stored with a run, None for the interpreter. Where all
    is answered from a `recording`, the variants that it holds are those that can be tried.
    """

    worker: Runner
    pool: Compiler | None = None
    environment_of: EnvironmentOf = environment
    clock: Callable[[], float] = time.monotonic
    uuid: str | None = None
    racer: Runner | None = None
    aside_s: float = 0.0
    recording: Recording | None = None

    def start(self) -> None:
        """Start all processes, and do not wait until they can work."""
        for each in (self.worker, self.racer, self.pool):
            if each is not None:
                each.start()

    def close(self) -> None:
        """End all processes."""
        for each in (self.worker, self.racer, self.pool):
            if each is not None:
                each.close()


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


@dataclass(frozen=True, slots=True)
class Run:
    """One run over several tasks: everything that they share. It ends by `deadline` of the executor's clock.

    `timed` holds what the finished searches have timed.
    """

    gpu: Gpu
    store: Store
    settings: Settings
    executor: Executor
    listener: Listener
    run_id: int
    deadline: float = math.inf
    builds: Builds | None = None
    timed: dict[Task, Mapping[Variant, Timing]] = field(default_factory=dict[Task, Mapping[Variant, Timing]])

    @property
    def seconds_left(self) -> float:
        """Wall time left to the run."""
        return self.deadline - self.executor.clock()

    @property
    def ahead(self) -> int:
        """How many variants may be asked for before the first of them is measured."""
        pool = self.executor.pool
        # Where nothing is compiled ahead, asking ahead would only keep the sampler from learning.
        return 1 if pool is None else self.settings.ahead or AHEAD * pool.processes

    @property
    def regime(self) -> Regime:
        """The regime asked for: the interpreter has only its own."""
        return Regime("interpreter") if self.gpu.is_interpreter else self.settings.regime
