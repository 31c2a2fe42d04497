"""What is compiled ahead in one run: every search asks here, so that no code is compiled twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from ...kernel_templates.gpu import Gpu
from ...kernel_templates.outcome import Failed, StaticFacts
from ...kernel_templates.registry import template_of
from ...kernel_templates.spec import AttentionSpec
from ...kernel_templates.task import Task
from ...kernel_templates.variant import Variant
from ..measure.jobs import CompileJob

Code = tuple[AttentionSpec, str]


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
