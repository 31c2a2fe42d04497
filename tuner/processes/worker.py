"""The measuring process, replaced when it dies, hangs or loses the CUDA context, and the lock on its GPU."""

from __future__ import annotations

import contextlib
import fcntl
import math
import threading
import time
import warnings
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

from ...kernel_templates.gpu import Gpu
from ...kernel_templates.launch.device import present_uuid
from ...kernel_templates.outcome import JobError
from .child import Context, Job, Setup
from .compile import triton_cache
from .process import ChildProcess

R = TypeVar("R")

# Freeing memory takes no time, unless the process hangs.
FREE_LIMIT_S = 10.0
_POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class FreeJob(Job[None]):
    """Free the memory that is cached for later jobs."""

    def run(self, context: Context) -> None:
        """Clear the cache."""
        context.clear_cache()


class Worker:
    """Runs jobs one at a time in a process that caches the objects shared by the jobs of a task.

    With `interpret`, kernels run through Triton's interpreter on the CPU. A process either interprets or compiles for
    its whole life, whatever its parent does. With `lock`, it has the GPU to itself while a job runs. The cache holds
    the objects of the last `cache_size` tasks.
    """

    def __init__(self, interpret: bool, lock: GpuLock | None = None, cache_size: int = 1) -> None:
        self.interpret = interpret
        self._lock = lock
        self._closed = threading.Event()
        self._busy_s = 0.0
        # The process dies with the thread that started it, so one thread lives as long as the worker.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="worker")
        self._process = ChildProcess(
            Setup(interpret=interpret, preload=("torch",), cache_size=cache_size),
            {"TRITON_INTERPRET": "1" if interpret else None, "TRITON_CACHE_DIR": str(triton_cache())},
        )

    @classmethod
    def on(cls, gpu: Gpu, cache_size: int = 1) -> Worker:
        """A worker for the interpreter, or for the present GPU, which it shares with other runs through a lock."""
        uuid = None if gpu.is_interpreter else present_uuid()
        return cls(gpu.is_interpreter, None if uuid is None else GpuLock(uuid), cache_size)

    @property
    def uuid(self) -> str | None:
        """UUID of the GPU that is locked for each job, None if none is."""
        return None if self._lock is None else self._lock.uuid

    @property
    def pid(self) -> int | None:
        """The running process, None before the first job and after its death."""
        return self._process.pid

    @property
    def busy_s(self) -> float:
        """Seconds that jobs have taken so far, without the waiting for the GPU's lock."""
        return self._busy_s

    def run(self, job: Job[R], timeout_s: float, deadline: float = math.inf) -> R:
        """The result of `job`; a job that raised, died or exceeded `timeout_s` gives its `result_after` the error.

        Waiting for the GPU's lock does not count as time of the job, but ends at `deadline` of `time.monotonic`, as
        starting a process and the job do. A variant that is to blame is `Failed`. Raises `JobError` where none is, as
        when the deadline or `close` ended the job, and `TunerError` when no process can be started.
        """
        with contextlib.nullcontext() if self._lock is None else self._lock.held(deadline, self._closed):
            start = time.monotonic()
            try:
                return self._process.run(job, timeout_s, deadline=deadline)
            except JobError as error:
                failure = error
            finally:
                self._busy_s += time.monotonic() - start
        if self._closed.is_set() or time.monotonic() >= deadline:
            raise JobError(failure.reason)
        return job.result_after(failure, lambda rest: self.run(rest, timeout_s, deadline))

    def submit(self, job: Job[R], timeout_s: float, deadline: float = math.inf) -> Future[R]:
        """Queue `job` behind those submitted before; the future gets the result of `run`."""
        return self._thread.submit(self.run, job, timeout_s, deadline)

    def start(self) -> None:
        """Start the process, unless one runs, without waiting until it can work."""
        self._process.start()

    def ready(self, limit_s: float) -> bool:
        """Start the process, unless one runs, and wait up to `limit_s` seconds for it. True if it can work now.

        Raises `TunerError` when it cannot be started.
        """
        return self._process.ready(limit_s)

    def free(self) -> None:
        """Free the memory that the process caches, the GPU's too. A process that does not run caches nothing."""
        if self.pid is not None:
            with contextlib.suppress(JobError):
                self._process.run(FreeJob(), FREE_LIMIT_S)

    def close(self) -> None:
        """End the process. A job of another thread that runs in it, or waits for the GPU, raises `JobError`."""
        self._closed.set()
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._process.close()
        self._thread.shutdown()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class GpuLock:
    """A lock on the GPU `uuid` between the processes of one user, released by the kernel when its holder dies.

    Waiting processes take turns with the holder, so that two runs interleave job by job.
    """

    def __init__(self, uuid: str, folder: Path | None = None) -> None:
        self.uuid = uuid
        self._folder = folder or _lock_folder()
        self._has_warned = False

    @contextlib.contextmanager
    def held(self, deadline: float = math.inf, closed: threading.Event | None = None) -> Generator[None]:
        """Hold the lock, waiting for it until `deadline` of `time.monotonic` passes or `closed` is set.

        Raises `JobError` then. Without a lock, as on a full disk, it warns once and goes on.
        """
        with contextlib.ExitStack() as files:
            try:
                self._acquire(files, deadline, closed)
            except OSError as error:
                self._warn(error)
            yield

    def _acquire(self, files: contextlib.ExitStack, deadline: float, closed: threading.Event | None) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        gpu = files.enter_context(self._file("lock").open("ab"))
        # The first to wait holds the queue, so that the holder cannot lock the GPU again before it.
        with self._file("queue").open("ab") as queue:
            self._wait(queue, deadline, closed)
            self._wait(gpu, deadline, closed)

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"GPU {self.uuid} cannot be locked in {str(self._folder)!r}: {error.strerror}; another run may time on "
                "it at the same time",
                stacklevel=2,
            )

    def _file(self, kind: str) -> Path:
        return self._folder / f"{self.uuid}.{kind}"

    def _wait(self, file: IO[bytes], deadline: float, closed: threading.Event | None) -> None:
        while True:
            if closed is not None and closed.is_set():
                raise JobError("its process was closed")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise JobError(f"another run kept GPU {self.uuid} until the time was up") from None
                time.sleep(_POLL_S)
            else:
                return


def _lock_folder() -> Path:
    import platformdirs

    return Path(platformdirs.user_cache_dir("attention-tuner")) / "locks"


