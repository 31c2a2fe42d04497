"""The measuring process: one per GPU, replaced when a job kills it, hangs it or loses its CUDA context."""

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

# Memory is given back at once, unless the process hangs.
FREE_LIMIT_S = 10.0
_POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class FreeJob(Job[None]):
    """Give back what was kept for the next job of a task."""

    def run(self, context: Context) -> None:
        """Free it."""
        context.forget()


class Worker:
    """Runs jobs one at a time in a process of its own, which keeps what the jobs of one task share.

    With `interpret`, kernels run through Triton's interpreter on the CPU there. A process either interprets or compiles
    for as long as it lives, whatever the parent does. With `lock`, it has the card to itself while a job runs. It keeps
    what the last `room` tasks need.
    """

    def __init__(self, interpret: bool, lock: GpuLock | None = None, room: int = 1) -> None:
        self.interpret = interpret
        self._lock = lock
        self._closed = threading.Event()
        self._busy_s = 0.0
        # The process dies with the thread that started it, so there is one for as long as the worker is open.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="worker")
        self._process = ChildProcess(
            Setup(interpret=interpret, preload=("torch",), room=room),
            {"TRITON_INTERPRET": "1" if interpret else None, "TRITON_CACHE_DIR": str(triton_cache())},
        )

    @classmethod
    def on(cls, gpu: Gpu, room: int = 1) -> Worker:
        """A worker for `gpu`, the interpreter or the present one, whose card it shares with other runs."""
        uuid = None if gpu.is_interpreter else present_uuid()
        return cls(gpu.is_interpreter, None if uuid is None else GpuLock(uuid), room)

    @property
    def uuid(self) -> str | None:
        """The card that is locked for each job, if one is."""
        return None if self._lock is None else self._lock.uuid

    @property
    def pid(self) -> int | None:
        """The process now running, None before the first job and after its death."""
        return self._process.pid

    @property
    def busy_s(self) -> float:
        """For how many seconds jobs have had the process so far; waiting for the card does not count."""
        return self._busy_s

    def run(self, job: Job[R], timeout_s: float, deadline: float = math.inf) -> R:
        """The result of `job`, which for one that raised, died or took longer than `timeout_s` is the job's to say.

        Waiting for the card does not count, but ends, as starting a process and the job do, at `deadline` of
        `time.monotonic`. Where a variant is to blame it is `Failed`; raises `JobError` where none is, as for a job that
        the deadline or `close` ended, and `TunerError` when no process can be started.
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
        return job.settle(failure, lambda rest: self.run(rest, timeout_s, deadline))

    def submit(self, job: Job[R], timeout_s: float, deadline: float = math.inf) -> Future[R]:
        """Have `job` run, after those submitted before, as `run` does; the result is the future's."""
        return self._thread.submit(self.run, job, timeout_s, deadline)

    def start(self) -> None:
        """Start the process, unless one runs, and do not wait until it can work."""
        self._process.start()

    def ready(self, limit_s: float) -> bool:
        """Start the process, unless one runs, and wait for it up to `limit_s` seconds; whether it can work now.

        Raises `TunerError` when it cannot be started.
        """
        return self._process.ready(limit_s)

    def free(self) -> None:
        """Have the process give back what it keeps, such as GPU memory; a process that does not run keeps nothing."""
        if self.pid is not None:
            with contextlib.suppress(JobError):
                self._process.run(FreeJob(), FREE_LIMIT_S)

    def close(self) -> None:
        """End the process; a job that another thread runs in it, or waits for the card with, raises `JobError`."""
        self._closed.set()
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._process.close()
        self._thread.shutdown()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class GpuLock:
    """A lock on the card `uuid` between the processes of one user; the kernel releases it when its holder dies.

    Those that wait take turns with the holder, so that two runs interleave job by job.
    """

    def __init__(self, uuid: str, folder: Path | None = None) -> None:
        self.uuid = uuid
        self._folder = folder or _lock_folder()
        self._is_told = False

    @contextlib.contextmanager
    def held(self, deadline: float = math.inf, closed: threading.Event | None = None) -> Generator[None]:
        """Hold the lock, waiting for it until `deadline` of `time.monotonic` passes or `closed` is set.

        Raises `JobError` then. Where there can be no lock, as on a full disk, it warns once and goes on without.
        """
        with contextlib.ExitStack() as files:
            try:
                self._take(files, deadline, closed)
            except OSError as error:
                self._tell(error)
            yield

    def _take(self, files: contextlib.ExitStack, deadline: float, closed: threading.Event | None) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        card = files.enter_context(self._file("lock").open("ab"))
        # Whoever waits holds the place in the queue, so that the holder, who is quicker, cannot lock again first.
        with self._file("queue").open("ab") as queue:
            self._wait(queue, deadline, closed)
            self._wait(card, deadline, closed)

    def _tell(self, error: OSError) -> None:
        if not self._is_told:
            self._is_told = True
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


