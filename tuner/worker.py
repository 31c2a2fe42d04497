"""The measuring process: one per GPU, replaced when a job kills it, hangs it or loses its CUDA context."""

from __future__ import annotations

from typing import TypeVar

from ..kernel_templates.errors import JobError
from .cache import triton_cache
from .child import Job, Setup
from .process import ChildProcess

R = TypeVar("R")


class Worker:
    """Runs jobs one at a time in a process of its own, which keeps what the jobs of one task share.

    With `interpret`, kernels run through Triton's interpreter on the CPU there. A process either interprets or compiles
    for as long as it lives, whatever the parent does.
    """

    def __init__(self, interpret: bool) -> None:
        self.interpret = interpret
        self._process = ChildProcess(
            Setup(interpret=interpret, preload=("torch",)),
            {"TRITON_INTERPRET": "1" if interpret else None, "TRITON_CACHE_DIR": str(triton_cache())},
        )

    @property
    def pid(self) -> int | None:
        """The process now running, None before the first job and after a death."""
        return self._process.pid

    def run(self, job: Job[R], timeout_s: float) -> R:
        """The result of `job`, which for one that raised, died or took longer than `timeout_s` is the job's to say.

        Where a variant is to blame it is `Failed`; raises `JobError` where none is, and `TunerError` when no process
        can be started.
        """
        try:
            return self._process.run(job, timeout_s)
        except JobError as error:
            return job.settle(error, lambda rest: self.run(rest, timeout_s))

    def close(self) -> None:
        """End the process; a job that another thread runs in it now ends as if it had died."""
        self._process.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
