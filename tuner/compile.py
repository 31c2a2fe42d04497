"""Compiling ahead: a pool of processes that fill Triton's cache while the GPU measures."""

from __future__ import annotations

import os
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from queue import LifoQueue

from ..kernel_templates.errors import JobError
from ..kernel_templates.outcome import Failed, StaticFacts
from ..kernel_templates.variant import Variant
from .cache import triton_cache
from .child import Job, Setup
from .jobs import CompileJob
from .process import ChildProcess

Compiled = StaticFacts | Failed

LIMIT_S = 60.0
# Behind the measuring process and the search, which the GPU waits for.
NICENESS = 10


def default_processes() -> int:
    """All CPU cores but two, which measuring and the search need."""
    return max(1, (os.cpu_count() or 1) - 2)


class CompilePool:
    """Compiles variants in `processes` processes of low priority, each for at most `limit_s` seconds of CPU time.

    One that exceeds it, or aborts the compiler, is `Failed` at stage "compile", and its process is replaced.
    """

    def __init__(self, processes: int | None = None, limit_s: float = LIMIT_S) -> None:
        count = processes or default_processes()
        environment = {"TRITON_INTERPRET": None, "TRITON_CACHE_DIR": str(triton_cache())}
        setup = Setup(niceness=NICENESS)
        self.processes = count
        self._limit_s = limit_s
        self._children = [ChildProcess(setup, environment) for _ in range(count)]
        # The last used first: processes that no job needed are never started.
        self._idle: LifoQueue[ChildProcess] = LifoQueue()
        for child in self._children:
            self._idle.put(child)
        # A thread per process does nothing but wait for it, so that a process never waits for the search.
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="compile")
        self._futures: dict[Future[Compiled], Variant] = {}

    def submit(self, job: CompileJob) -> None:
        """Queue `job` behind those submitted before."""
        self._futures[self._threads.submit(self._compile, job)] = job.variant

    def results(self, wait_s: float) -> list[tuple[Variant, Compiled]]:
        """What is compiled and was not returned before, in the order of submission; waits up to `wait_s` for one.

        Raises `TunerError` when no process can be started.
        """
        done, _ = wait(self._futures, timeout=wait_s, return_when=FIRST_COMPLETED)
        ready = [future for future in self._futures if future in done]
        return [(self._futures.pop(future), future.result()) for future in ready]

    @property
    def pending(self) -> int:
        """Jobs submitted whose results were not returned yet."""
        return len(self._futures)

    def forget(self) -> None:
        """Drop what is queued, and return no results of what was submitted so far; what is being compiled goes on."""
        for future in self._futures:
            future.cancel()
        self._futures.clear()

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
        try:
            return child.run(job, self._limit_s, cpu_time=True)
        except JobError as error:
            return job.settle(error, self._compile)
        finally:
            self._idle.put(child)
