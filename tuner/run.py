"""A run over several tasks: the processes that do its jobs, its record in the database, and its end."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Protocol, TypeVar

from ..db.records import EnvironmentOf, Setting, TrialRecord
from ..db.store import Store
from ..kernel_templates.errors import StoreError
from ..kernel_templates.gpu import Gpu
from ..kernel_templates.outcome import BestConfig, Regime, Timing
from ..kernel_templates.sources import environment
from ..kernel_templates.spec import AttentionSpec
from ..kernel_templates.task import Task
from ..kernel_templates.variant import Variant
from .measure.gpu_state import read_gpu_state
from .processes.child import Job
from .processes.compile import Builds, Compiler
from .recording import Recording
from .settings import Budget, Listener, Settings

R = TypeVar("R")

# Variants on their way for each compile process: no process waits while compiled variants wait for the GPU.
AHEAD_PER_PROCESS = 2
# Most variants on their way when the sampler chooses, as a share of the trials: it chooses better with more results.
AHEAD_SHARE = 0.25
FEWEST_AHEAD = 2


class Runner(Protocol):
    """Runs jobs one at a time, as `Worker` does."""

    @property
    def busy_s(self) -> float:
        """Seconds that jobs have had the process so far, without waiting for the GPU."""
        ...

    def submit(self, job: Job[R], timeout_s: float, deadline: float = math.inf) -> Future[R]:
        """Future result of `job`, due by `deadline` of the executor's clock; a `JobError` if it has none."""
        ...

    def start(self) -> None:
        """Start the process without waiting until it can work."""
        ...

    def ready(self, limit_s: float) -> bool:
        """Wait up to `limit_s` seconds until the process can work. Returns True if it can."""
        ...

    def free(self) -> None:
        """Have the process give back what it keeps for the next job."""
        ...

    def close(self) -> None:
        """End the process."""
        ...


@dataclass(frozen=True, slots=True)
class Executor:
    """Processes that do the jobs of a run, or what stands in for them."""

    worker: Runner  # checks and times the variants of a search
    pool: Compiler | None = None  # compiles ahead; None where nothing is compiled ahead
    environment_of: EnvironmentOf = environment  # present environment of a template
    clock: Callable[[], float] = time.monotonic  # seconds
    uuid: str | None = None  # of the GPU whose state is stored with a run; None for the interpreter
    racer: Runner | None = None  # runs the final races; None where the worker does
    aside_s: float = 0.0  # part of a run's seconds that passes before or after it
    recording: Recording | None = None  # answers all jobs where given, and holds the variants to try

    def start(self, compiles: int) -> None:
        """Start the processes that measure, and those that so many compiles need, without waiting for them."""
        self.worker.start()
        if self.racer is not None:
            self.racer.start()
        if self.pool is not None:
            self.pool.start(compiles)

    def close(self) -> None:
        """End all processes."""
        for each in (self.worker, self.racer, self.pool):
            if each is not None:
                each.close()


def executor_on(gpu: Gpu, room: int = 1, races: bool = True) -> Executor:
    """Processes that tune on `gpu`, which is present, or through the interpreter; none is started yet.

    The worker keeps what it prepared for `room` tasks. Without `races` there is no process for final races.
    """
    from .processes.compile import COMPILER, CompilePool, prune, triton_cache
    from .processes.worker import Worker

    worker = Worker.on(gpu, room)
    if gpu.is_interpreter:
        # Its times are no GPU's, and a second process would only take time from the search.
        return Executor(worker)
    prune(triton_cache())
    racer = Worker.on(gpu) if races else None
    return Executor(worker, CompilePool(preload=(COMPILER,)), uuid=worker.uuid, racer=racer)


class History:
    """Trials and best configs of a database, each read once in a run and kept up to date with what the run stores."""

    def __init__(self, store: Store, gpu: Gpu, regime: Regime, environment_of: EnvironmentOf) -> None:
        self._store, self._gpu, self._regime, self._environment_of = store, gpu, regime, environment_of
        self._trials: dict[Task, dict[Variant, TrialRecord]] = {}
        self._outdated: dict[Task, Counter[str]] = {}
        self._configs: dict[tuple[AttentionSpec, int], list[BestConfig]] = {}

    def setting(self, task: Task) -> Setting:
        """Setting that the trials of `task` are stored under."""
        return Setting(task.spec, task.batch, task.page_size, self._gpu, self._regime)

    def trials(self, task: Task) -> list[TrialRecord]:
        """Trials of `task` that need not be measured again, the latest of each variant, oldest first."""
        return list(self._read(task).values())

    def outdated(self, task: Task) -> Counter[str]:
        """Number of stored trials of `task` that cannot be reused, by reason."""
        self._read(task)
        return self._outdated[task]

    def add_trial(self, task: Task, record: TrialRecord) -> None:
        """Store a trial of `task`."""
        self._store.add_trial(record)
        trials = self._read(task)
        trials.pop(record.outcome.variant, None)
        trials[record.outcome.variant] = record

    def best_configs(self, task: Task) -> list[BestConfig]:
        """Best configs of the layer and page size of `task` on GPUs of this name."""
        key = (task.spec, task.page_size)
        if key not in self._configs:
            self._configs[key] = self._store.best_configs(
                spec=task.spec, page_size=task.page_size, gpu_name=self._gpu.name)
        return self._configs[key]

    def put_best(self, task: Task, config: BestConfig) -> None:
        """Store a best config of `task`, in the place of one for the same batch, GPU and regime."""
        self._store.put_best(config)
        others = [each for each in self.best_configs(task) if _place(each) != _place(config)]
        self._configs[task.spec, task.page_size] = [*others, config]

    def _read(self, task: Task) -> dict[Variant, TrialRecord]:
        if task not in self._trials:
            known = self._store.known_trials(self.setting(task), self._environment_of)
            self._trials[task] = {record.outcome.variant: record for record in known.reusable}
            self._outdated[task] = known.outdated
        return self._trials[task]


def _place(config: BestConfig) -> tuple[object, ...]:
    return config.batch, config.gpu.num_sms, config.timing.regime


@dataclass(frozen=True, slots=True)
class Run:
    """State that the tasks of one run share."""

    gpu: Gpu
    store: Store
    settings: Settings
    executor: Executor
    listener: Listener
    run_id: int  # of the run's row in the database
    history: History  # what the database holds for the run's tasks
    budget: Budget  # division of the run's time
    builds: Builds | None = None  # compiled code, shared by all tasks
    # Times of finished searches.
    timed: dict[Task, Mapping[Variant, Timing]] = field(default_factory=dict[Task, Mapping[Variant, Timing]])

    @property
    def seconds_left(self) -> float:
        """Wall time left to the run."""
        return self.budget.end - self.executor.clock()

    @property
    def most_ahead(self) -> int:
        """Most variants on their way to the GPU. Those fixed before the search may fill it: results change none."""
        pool = self.executor.pool
        if pool is None:
            # Nothing is compiled ahead, so that choosing ahead would only keep the sampler from learning.
            return 1
        return self.settings.ahead or AHEAD_PER_PROCESS * pool.processes

    @property
    def ahead(self) -> int:
        """Most variants on their way when the sampler chooses another."""
        return min(self.most_ahead, self.settings.ahead or max(FEWEST_AHEAD, int(AHEAD_SHARE * self.settings.trials)))

    @property
    def regime(self) -> Regime:
        """Regime to time in: the one asked for, or the interpreter's own."""
        return regime_on(self.gpu, self.settings)


def regime_on(gpu: Gpu, settings: Settings) -> Regime:
    """Regime to time in on `gpu`: the interpreter has only its own."""
    return Regime("interpreter") if gpu.is_interpreter else settings.regime


@contextlib.contextmanager
def open_run(
    gpu: Gpu, store: Store, settings: Settings, executor: Executor, listener: Listener | None = None
) -> Generator[Run]:
    """Begin a run and store its settings, and the GPU's state at its beginning and end.

    An interrupt or a failure closes `executor`; else it can go on being used. Raises `StoreError` if the run cannot be
    stored.
    """
    seconds = math.inf if settings.seconds is None else settings.seconds
    budget = Budget(executor.clock() + seconds - executor.aside_s)
    try:
        gpu_state = {"uuid": executor.uuid, "start": _gpu_state(executor)}
        processes = executor.pool and executor.pool.processes
        run_id = store.start_run({**settings.as_json(), "processes": processes, "card": gpu_state})
        builds = None if executor.pool is None else Builds(executor.pool, gpu)
        history = History(store, gpu, regime_on(gpu, settings), executor.environment_of)
        yield Run(gpu, store, settings, executor, listener or Listener(), run_id, history, budget, builds)
        try:
            store.finish_run(run_id, {"card": {**gpu_state, "end": _gpu_state(executor)}})
        except StoreError as error:
            # All results are stored and can still be shown.
            warnings.warn(f"the GPU's state at the end of the run is not stored: {error}", stacklevel=2)
    except BaseException:
        executor.close()
        raise


def _gpu_state(executor: Executor) -> dict[str, object] | None:
    state = None if executor.uuid is None else read_gpu_state(executor.uuid)
    return None if state is None else asdict(state)
