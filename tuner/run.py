"""A run over several tasks: what runs its jobs, its record in the database, its deadline, and how it ends."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Protocol, TypeVar

from ..db.records import EnvironmentOf
from ..db.store import Store
from ..kernel_templates.errors import StoreError
from ..kernel_templates.gpu import Gpu
from ..kernel_templates.outcome import Regime, Timing
from ..kernel_templates.sources import environment
from ..kernel_templates.task import Task
from ..kernel_templates.variant import Variant
from .measure.gpu_state import read_gpu_state
from .processes.child import Job
from .processes.compile import Builds, Compiler
from .recording import Recording
from .settings import Listener, Settings

R = TypeVar("R")

# Enough that no process waits for the search while the variants that are compiled wait for the GPU.
AHEAD = 2


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


def executor_on(gpu: Gpu, room: int = 1, races: bool = True) -> Executor:
    """The processes that a run needs, none of them started yet; the measuring one has room for so many tasks."""
    from .processes.compile import COMPILER, CompilePool, prune, triton_cache
    from .processes.worker import Worker

    worker = Worker.on(gpu, room)
    if gpu.is_interpreter:
        # Its times are no GPU's, and a second process would only take time from the search.
        return Executor(worker)
    prune(triton_cache())
    racer = Worker.on(gpu) if races else None
    return Executor(worker, CompilePool(preload=(COMPILER,)), uuid=worker.uuid, racer=racer)


@contextlib.contextmanager
def open_run(
    gpu: Gpu, store: Store, settings: Settings, executor: Executor, listener: Listener | None = None
) -> Generator[Run]:
    """A run of `settings`, of which `store` keeps the card's state at its beginning and end.

    When it is interrupted, or fails, `executor` is closed; else it can go on being used. Raises `StoreError` when the
    run cannot be stored.
    """
    seconds = math.inf if settings.seconds is None else settings.seconds
    deadline = executor.clock() + seconds - executor.aside_s
    try:
        card = {"uuid": executor.uuid, "start": _card_state(executor)}
        processes = executor.pool and executor.pool.processes
        run_id = store.start_run({**settings.as_json(), "processes": processes, "card": card})
        builds = None if executor.pool is None else Builds(executor.pool, gpu)
        yield Run(gpu, store, settings, executor, listener or Listener(), run_id, deadline, builds)
        try:
            store.finish_run(run_id, {"card": {**card, "end": _card_state(executor)}})
        except StoreError as error:
            # All results are stored and can still be shown.
            warnings.warn(f"the card's state at the end of the run is not stored: {error}", stacklevel=2)
    except BaseException:
        executor.close()
        raise


def _card_state(executor: Executor) -> dict[str, object] | None:
    state = None if executor.uuid is None else read_gpu_state(executor.uuid)
    return None if state is None else asdict(state)
