"""Compiling ahead: jobs, the processes that run them, and the cache of kernels that they fill."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from queue import LifoQueue
from typing import Protocol

from ...kernel_templates.batch import Batch
from ...kernel_templates.gpu import Gpu
from ...kernel_templates.outcome import Failed, JobError, StaticFacts
from ...kernel_templates.registry import template_of
from ...kernel_templates.spec import AttentionSpec
from ...kernel_templates.task import Task
from ...kernel_templates.variant import Variant
from .child import Context, Job, Setup
from .process import ChildProcess

Code = tuple[AttentionSpec, str]
Compiled = StaticFacts | Failed

LIMIT_S = 60.0
# Behind the measuring process and the search, which the GPU waits for.
NICENESS = 10
# What compiling imports: a second or more of CPU time.
COMPILER = __name__.removesuffix("tuner.processes.compile") + "kernel_templates.launch.compiler"
# A compiled kernel takes about 2.3 MB.
CACHE_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class CompileJob(Job[StaticFacts | Failed]):
    """Compile a variant for `gpu`, which need not be present, into the cache that measuring reads.

    With `lse`, as it writes the log-sum-exp too.
    """

    variant: Variant
    spec: AttentionSpec
    gpu: Gpu
    batch: Batch
    lse: bool = False

    def run(self, context: Context) -> StaticFacts:
        """What the compiler said of the variant."""
        from ...kernel_templates.launch.compiler import compile_variant

        context.at("compile", self.variant)
        return compile_variant(self.variant, self.spec, self.gpu, self.batch, self.lse)

    def settle(self, error: JobError, again: Callable[[Job[StaticFacts | Failed]], StaticFacts | Failed]) -> Failed:
        """The variant is to blame."""
        return Failed(self.variant, "compile", error.reason)


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


class Compiler(Protocol):
    """Compiles ahead, as `CompilePool` does."""

    processes: int

    @property
    def full_seconds(self) -> float:
        """For how long every process has been compiling, in seconds of wall time."""
        ...

    def start(self) -> None:
        """Start the processes, and do not wait until they can work."""
        ...

    def submit(self, job: CompileJob) -> None:
        """Queue `job`."""
        ...

    def results(self, wait_s: float) -> list[tuple[CompileJob, StaticFacts | Failed]]:
        """What was compiled since the last call; waits up to `wait_s` for one."""
        ...

    def seconds_of(self, job: CompileJob) -> float:
        """The wall time that `job` took, 0 while it is not done."""
        ...

    def forget(self) -> list[CompileJob]:
        """Drop what is queued and return it; what is being compiled goes on."""
        ...

    def close(self) -> None:
        """Kill what compiles."""
        ...


class Builds:
    """The code of variants, compiled for `gpu` in `pool`.

    Variants of one layer and page size that differ only in what is passed to their kernels share it, whatever batch
    they are tried on.
    """

    def __init__(self, pool: Compiler, gpu: Gpu) -> None:
        self.pool = pool
        self._gpu = gpu
        self._done: dict[Code, StaticFacts | Failed] = {}
        self._jobs: dict[Code, CompileJob] = {}
        self._under_way: set[Code] = set()

    def order(self, task: Task, variant: Variant) -> bool:
        """Have the code of `variant` compiled, unless it is or is going to be; whether it is compiled for this."""
        code = _code(task.spec, variant)
        is_new = code not in self._done and code not in self._under_way
        if is_new:
            self._under_way.add(code)
            self.pool.submit(CompileJob(variant, task.spec, self._gpu, task.batch))
        return is_new

    def collect(self, wait_s: float) -> None:
        """Take note of what was compiled; where nothing was, wait up to `wait_s` seconds for it."""
        for job, compiled in self.pool.results(wait_s):
            code = _code(job.spec, job.variant)
            self._under_way.discard(code)
            self._done[code] = compiled
            self._jobs[code] = job

    def result(self, task: Task, variant: Variant) -> StaticFacts | Failed | None:
        """What came of compiling `variant`, None while that is not known."""
        compiled = self._done.get(_code(task.spec, variant))
        return replace(compiled, variant=variant) if isinstance(compiled, Failed) else compiled

    def seconds_of(self, task: Task, variant: Variant) -> float:
        """The seconds that compiling `variant` took, 0 while it is not compiled."""
        job = self._jobs.get(_code(task.spec, variant))
        return 0.0 if job is None else self.pool.seconds_of(job)

    def forget(self) -> None:
        """Drop what is not being compiled yet; it can be ordered again."""
        self._under_way -= {_code(job.spec, job.variant) for job in self.pool.forget()}


def _code(spec: AttentionSpec, variant: Variant) -> Code:
    return spec, template_of(variant).code_key(variant)


def triton_cache() -> Path:
    """The folder that compile workers fill and the measurement worker reads, in the user's cache folder."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("attention-tuner")) / "triton"


def prune(folder: Path, limit_bytes: int = CACHE_BYTES) -> int:
    """Delete the oldest entries of `folder` when it holds more than `limit_bytes`, down to half; the bytes freed.

    For the start of a run: an entry that a running process is about to read may be among them.
    """
    entries = sorted(_entries(folder))
    total = sum(size for _, size, _ in entries)
    if total <= limit_bytes:
        return 0
    freed = 0
    for _, size, path in entries:
        # Down to half, or every run from then on would have to prune.
        if total - freed <= limit_bytes // 2:
            break
        shutil.rmtree(path, ignore_errors=True)
        freed += size
    return freed


def _entries(folder: Path) -> list[tuple[float, int, Path]]:
    """The time of change, bytes and path of each entry, one folder per kernel; those that vanish are left out."""
    found: list[tuple[float, int, Path]] = []
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                size = sum(file.stat().st_size for file in path.iterdir())
                found.append((path.stat().st_mtime, size, path))
    return found
