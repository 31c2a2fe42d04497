"""Compiling ahead: jobs, the processes that run them, their results, and the cache of kernels that they fill."""

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
from .process import ChildProcess, JobTimeoutError

Code = tuple[AttentionSpec, str]
"""A layer and the code key of its variants: the variants of one code share their compiled kernels."""

# A compile takes seconds; with all cores busy, minutes.
LIMIT_S = 240.0
# The GPU waits for the measuring process and the search, so compiling comes last.
NICENESS = 10
# Importing the compiler takes a second or more of CPU time.
COMPILER = __name__.removesuffix("tuner.processes.compile") + "kernel_templates.launch.compiler"
# A compiled kernel takes about 2.3 MB.
CACHE_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class CompileJob(Job[StaticFacts]):
    """Compile a variant into the cache that measuring reads."""

    variant: Variant
    spec: AttentionSpec
    # Need not be present.
    gpu: Gpu
    batch: Batch
    # Compile the kernel that writes the log-sum-exp too.
    lse: bool = False

    def run(self, context: Context) -> StaticFacts:
        """The compiler's facts about the variant."""
        from ...kernel_templates.launch.compiler import compile_variant

        context.report_stage("compile", self.variant)
        return compile_variant(self.variant, self.spec, self.gpu, self.batch, self.lse)


@dataclass(frozen=True, slots=True)
class Build:
    """A finished compile."""

    job: CompileJob
    result: StaticFacts | Failed
    # Wall time, the second try of a compile that exceeded its limit included.
    seconds: float


class Compiler(Protocol):
    """Compiles ahead, as `CompilePool` does."""

    processes: int

    @property
    def full_seconds(self) -> float:
        """Seconds of wall time during which every process was compiling."""
        ...

    def start(self, jobs: int) -> None:
        """Start the processes that `jobs` compiles need, without waiting until they can work."""
        ...

    def submit(self, job: CompileJob) -> None:
        """Queue `job`."""
        ...

    def results(self, wait_s: float) -> list[Build]:
        """The builds finished since the last call, after waiting up to `wait_s` seconds for one."""
        ...

    def cancel_queued(self) -> list[CompileJob]:
        """Remove the jobs that have not begun from the queue, and return them."""
        ...

    def close(self) -> None:
        """Kill the processes."""
        ...


class CompilePool:
    """Compiles in up to `processes` low-priority processes, each job within `limit_s` seconds of wall time.

    A process starts when a job needs it, and imports the modules `preload` first. A job that exceeds its limit is tried
    once more, because the cores may have been busy. One that exceeds it again, raises, or kills its process is
    `Failed` at stage "compile".
    """

    def __init__(
        self, processes: int | None = None, limit_s: float = LIMIT_S, preload: tuple[str, ...] = ()
    ) -> None:
        self.processes = processes or default_processes()
        self._limit_s = limit_s
        environment = {"TRITON_INTERPRET": None, "TRITON_CACHE_DIR": str(triton_cache())}
        setup = Setup(niceness=NICENESS, preload=preload)
        self._children = [ChildProcess(setup, environment) for _ in range(self.processes)]
        # The process used last is taken first, so that those that no job needs are never started.
        self._idle: LifoQueue[ChildProcess] = LifoQueue()
        for child in reversed(self._children):
            self._idle.put(child)
        # Each process has a thread that waits for it, so that no process waits for the search.
        self._threads = ThreadPoolExecutor(self.processes, thread_name_prefix="compile")
        self._futures: dict[Future[Build], CompileJob] = {}
        self._full = FullTime(self.processes)

    @property
    def full_seconds(self) -> float:
        """Seconds of wall time during which every process was compiling, since the pool was made."""
        return self._full.seconds

    def start(self, jobs: int) -> None:
        """Start the processes that `jobs` compiles need, without waiting until they can work."""
        for child in self._children[:jobs]:
            child.start()

    def submit(self, job: CompileJob) -> None:
        """Queue `job` behind those submitted before."""
        self._futures[self._threads.submit(self._build, job)] = job

    def results(self, wait_s: float) -> list[Build]:
        """The builds finished since the last call, in order of submission, after waiting up to `wait_s` s for one.

        Raises `TunerError` when no process can be started.
        """
        done, _ = wait(self._futures, timeout=wait_s, return_when=FIRST_COMPLETED)
        ready = [future for future in self._futures if future in done]
        for future in ready:
            del self._futures[future]
        return [future.result() for future in ready]

    @property
    def pending(self) -> int:
        """Number of submitted jobs whose builds were not returned yet."""
        return len(self._futures)

    def cancel_queued(self) -> list[CompileJob]:
        """Remove the jobs that have not begun from the queue, and return them."""
        return [self._futures.pop(future) for future in list(self._futures) if future.cancel()]

    def close(self) -> None:
        """Kill the processes and drop all jobs."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for child in self._children:
            child.close()
        self._threads.shutdown()

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self, job: CompileJob) -> Build:
        child = self._idle.get()
        start = time.monotonic()
        try:
            with self._full.one_busy():
                result = self._compiled(child, job)
        finally:
            self._idle.put(child)
        return Build(job, result, time.monotonic() - start)

    def _compiled(self, child: ChildProcess, job: CompileJob) -> StaticFacts | Failed:
        try:
            with contextlib.suppress(JobTimeoutError):
                return child.run(job, self._limit_s)
            return child.run(job, self._limit_s)
        except JobError as error:
            return Failed(job.variant, "compile", error.reason)


class FullTime:
    """Adds up the time during which `capacity` workers are busy at once. Threads may share it."""

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
        """Count one more busy worker while the block runs."""
        self._add(1)
        try:
            yield
        finally:
            self._add(-1)

    def _add(self, change: int) -> None:
        with self._lock:
            now = self._clock()
            if self._busy == self._capacity:
                self._past += now - self._since
            self._busy += change
            self._since = now


class Builds:
    """The builds of one run for `gpu`: every search asks here, so that no code is compiled twice.

    Variants of one layer and page size share their code, on any batch, if they differ only in launch arguments.
    """

    def __init__(self, pool: Compiler, gpu: Gpu) -> None:
        self.pool = pool
        self._gpu = gpu
        # None while the code is being compiled or waits for it.
        self._builds: dict[Code, Build | None] = {}

    def request(self, task: Task, variant: Variant) -> bool:
        """Compile the code of `variant` unless it was requested before. True if it was not."""
        code = _code(task.spec, variant)
        if code in self._builds:
            return False
        self._builds[code] = None
        self.pool.submit(CompileJob(variant, task.spec, self._gpu, task.batch))
        return True

    def collect(self, wait_s: float) -> None:
        """Take over the finished builds, after waiting up to `wait_s` seconds for one."""
        for build in self.pool.results(wait_s):
            self._builds[_code(build.job.spec, build.job.variant)] = build

    def result(self, task: Task, variant: Variant) -> StaticFacts | Failed | None:
        """The result of compiling `variant`, None while there is none."""
        build = self._builds.get(_code(task.spec, variant))
        if build is not None and isinstance(build.result, Failed):
            return replace(build.result, variant=variant)
        return build and build.result

    def seconds_of(self, task: Task, variant: Variant) -> float:
        """Seconds that compiling `variant` took, 0 while it is not compiled."""
        build = self._builds.get(_code(task.spec, variant))
        return 0.0 if build is None else build.seconds

    def cancel_queued(self) -> None:
        """Cancel the compiles that have not begun; they can be requested again."""
        for job in self.pool.cancel_queued():
            del self._builds[_code(job.spec, job.variant)]


def default_processes() -> int:
    """All CPU cores that this process may use but two, which measuring and the search need."""
    return max(1, len(os.sched_getaffinity(0)) - 2)


def triton_cache() -> Path:
    """The folder of compiled kernels that all runs share, in the user's cache folder."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("attention-tuner")) / "triton"


def prune(folder: Path, limit_bytes: int = CACHE_BYTES) -> int:
    """Delete the oldest entries of a `folder` larger than `limit_bytes` until half is left. Returns the bytes freed.

    A run calls it at its start: later, a process may be about to read one of the entries.
    """
    entries = sorted(_entries(folder))
    total = sum(size for _, size, _ in entries)
    if total <= limit_bytes:
        return 0
    freed = 0
    for _, size, path in entries:
        # A folder filled to its limit would be pruned by every run from then on.
        if total - freed <= limit_bytes // 2:
            break
        shutil.rmtree(path, ignore_errors=True)
        freed += size
    return freed


def _entries(folder: Path) -> list[tuple[float, int, Path]]:
    """Time of change, bytes and path of each entry, one folder per kernel. Entries that vanish meanwhile are left out.
    """
    found: list[tuple[float, int, Path]] = []
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                size = sum(file.stat().st_size for file in path.iterdir())
                found.append((path.stat().st_mtime, size, path))
    return found


def _code(spec: AttentionSpec, variant: Variant) -> Code:
    return spec, template_of(variant).code_key(variant)
