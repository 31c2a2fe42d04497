"""The measuring process: one per GPU, replaced when a job kills it, hangs it or loses its CUDA context."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from ...kernel_templates.gpu import Gpu
from ...kernel_templates.launch.device import present_uuid
from ...kernel_templates.outcome import JobError
from ..measure.card import GpuLock
from ..measure.jobs import FreeJob
from .cache import triton_cache
from .child import Job, Setup
from .process import ChildProcess

R = TypeVar("R")

# Memory is given back at once, unless the process hangs.
FREE_LIMIT_S = 10.0


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
