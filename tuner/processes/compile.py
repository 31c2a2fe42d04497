"""Compiling ahead: a pool of processes that fill Triton's cache while the GPU measures."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from queue import LifoQueue

from ...kernel_templates.outcome import Failed, JobError, StaticFacts
from ..measure.jobs import CompileJob
from .cache import triton_cache
from .child import Job, Setup
from .process import ChildProcess

Compiled = StaticFacts | Failed

LIMIT_S = 60.0
# Behind the measuring process and the search, which the GPU waits for.
NICENESS = 10
# What compiling imports: a second or more of CPU time.
COMPILER = __name__.removesuffix("tuner.processes.compile") + "kernel_templates.launch.compiler"


def default_processes() -> int:
    """All CPU cores that this process may use but two, which measuring and the search need."""
    return max(1, len(os.sched_getaffinity(0)) - 2)


class CompilePool:
    """Compiles variants in `processes` processes of low priority, each for at most `limit_s` seconds of CPU time.

    One that exceeds it, or aborts the compiler, is `Failed` at stage "compile", and its process is replaced. A process
    imports the modules `preload` as it starts.
    """

    def __init__(
        self, processes: int | None = None, limit_s: float = LIMIT_S, preload: tuple[str, ...] = ()
    ) -> None:
        count = processes or default_processes()
        environment = {"TRITON_INTERPRET": None, "TRITON_CACHE_DIR": str(triton_cache())}
        setup = Setup(niceness=NICENESS, preload=preload)
        self.processes = count
        self._limit_s = limit_s
        self._children = [ChildProcess(setup, environment) for _ in range(count)]
        # The last used first: processes that no job needed are never started.
        self._idle: LifoQueue[ChildProcess] = LifoQueue()
        for child in self._children:
            self._idle.put(child)
        # A thread per process does nothing but wait for it, so that a process never waits for the search.
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="compile")
        self._futures: dict[Future[Compiled], CompileJob] = {}
        self._seconds: dict[Job[Compiled], float] = {}
        self._full = FullTime(count)

    @property
    def full_seconds(self) -> float:
        """For how long every process has been compiling, in seconds of wall time since the pool was made."""
        return self._full.seconds

    def start(self) -> None:
        """Start the processes, and do not wait until they can work."""
        for child in self._children:
            child.start()

    def submit(self, job: CompileJob) -> None:
        """Queue `job` behind those submitted before."""
        self._futures[self._threads.submit(self._compile, job)] = job

    def results(self, wait_s: float) -> list[tuple[CompileJob, Compiled]]:
        """What is compiled and was not returned before, in the order of submission; waits up to `wait_s` for one.

        Raises `TunerError` when no process can be started.
        """
        done, _ = wait(self._futures, timeout=wait_s, return_when=FIRST_COMPLETED)
        ready = [future for future in self._futures if future in done]
        return [(self._futures.pop(future), future.result()) for future in ready]

    def seconds_of(self, job: CompileJob) -> float:
        """The wall time that `job` took, 0 while it is not done."""
        return self._seconds.get(job, 0.0)

    @property
    def pending(self) -> int:
        """Jobs submitted whose results were not returned yet."""
        return len(self._futures)

    def forget(self) -> list[CompileJob]:
        """Drop what is queued and return it; what is being compiled goes on, and its results are still to come."""
        return [self._futures.pop(future) for future in list(self._futures) if future.cancel()]

    def close(self) -> None:
        """Kill what compiles and drop what is queued."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for child in self._children:
            child.close()
        self._threads.shutdown()

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _compile(self, job: Job[Compiled]) -> Compiled:
        child = self._idle.get()
        start = time.monotonic()
        try:
            with self._full.one_busy():
                return child.run(job, self._limit_s, cpu_time=True)
        except JobError as error:
            return job.settle(error, self._compile)
        finally:
            self._seconds[job] = time.monotonic() - start
            self._idle.put(child)


class FullTime:
    """Adds up the time during which `capacity` things are busy at once. May be used from several threads."""

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity = capacity
        self._clock = clock
        self._lock = threading.Lock()
        self._busy = 0
        self._since = 0.0
        self._past = 0.0

    @property
    def seconds(self) -> float:
        """The time so far."""
        with self._lock:
            return self._past + (self._clock() - self._since if self._busy == self._capacity else 0.0)

    @contextlib.contextmanager
    def one_busy(self) -> Generator[None]:
        """One of them is busy while the block runs."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        with self._lock:
            now = self._clock()
            if self._busy == self._capacity:
                self._past += now - self._since
            self._busy += change
            self._since = now
