"""Jobs that harm their process as kernels and compilers do. Children import this module."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attention_tuner.kernel_templates.outcome import StaticFacts, Timed
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.tuner.measure.jobs import MeasureJob
from attention_tuner.tuner.processes.child import Context, Job
from attention_tuner.tuner.processes.compile import CompileJob

VARIANT = Variant("toy", 16, (("block_m", 16),))

_held: weakref.ref[Held] | None = None


def wait_until(is_so: Callable[[], bool]) -> None:
    """Poll until `is_so`, for a minute at most."""
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Held:
    """What a job allocates."""


@dataclass(frozen=True, slots=True)
class Echo(Job[Any]):
    value: Any

    def run(self, context: Context) -> Any:
        return self.value


@dataclass(frozen=True, slots=True)
class Ask(Job[Any]):
    """Evaluates a question in the child."""

    question: str

    def run(self, context: Context) -> Any:
        return eval(self.question, {"os": os, "sys": sys, "context": context})


@dataclass(frozen=True, slots=True)
class Raise(Job[None]):
    """Fails at "check" while it holds something."""

    def run(self, context: Context) -> None:
        global _held
        context.report_stage("check", VARIANT)
        held = Held()
        _held = weakref.ref(held)
        raise ValueError("first line\nsecond line")


@dataclass(frozen=True, slots=True)
class IsHeld(Job[bool]):
    """True if the object that `Raise` held is still alive."""

    def run(self, context: Context) -> bool:
        assert _held is not None
        return _held() is not None


@dataclass(frozen=True, slots=True)
class Hang(Job[None]):
    """Never returns, and never lets go of the interpreter, as an endless pass of a compiler does not."""

    def run(self, context: Context) -> None:
        context.report_stage("time", VARIANT)
        ctypes.PyDLL(None).sleep(1000)


@dataclass(frozen=True, slots=True)
class Sleep(Job[str]):
    seconds: float

    def run(self, context: Context) -> str:
        time.sleep(self.seconds)
        return "slept"


@dataclass(frozen=True, slots=True)
class WaitFor(Job[None]):
    """Ends as soon as `file` is there."""

    file: str

    def run(self, context: Context) -> None:
        while not Path(self.file).exists():
            time.sleep(0.01)


@dataclass(frozen=True, slots=True)
class HangOnce(Job[str]):
    """Hangs the first time, after it has made `file`; returns at once when `file` is there."""

    file: str

    def run(self, context: Context) -> str:
        context.report_stage("time", VARIANT)
        if not Path(self.file).exists():
            Path(self.file).touch()
            time.sleep(1000)
        return "done"


@dataclass(frozen=True, slots=True)
class HangWithHelper(Job[None]):
    """Hangs after it has started a program, as a compiler starts an assembler."""

    pid_file: str

    def run(self, context: Context) -> None:
        helper = subprocess.Popen(["sleep", "1000"])
        Path(self.pid_file).write_text(str(helper.pid))
        time.sleep(1000)


@dataclass(frozen=True, slots=True)
class Die(Job[None]):
    """Says something, then ends the process by a signal."""

    number: int
    saying: str = ""

    def run(self, context: Context) -> None:
        context.report_stage("check", VARIANT)
        os.write(2, self.saying.encode())
        os.kill(os.getpid(), self.number)


@dataclass(frozen=True, slots=True)
class Exit(Job[None]):
    def run(self, context: Context) -> None:
        sys.exit(3)


@dataclass(frozen=True, slots=True)
class Shout(Job[None]):
    """Writes to both streams, from Python and below it."""

    size: int
    then_s: float = 0.0

    def run(self, context: Context) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.write("x" * self.size)
            stream.flush()
        os.write(1, b"from native code\n")
        time.sleep(self.then_s)


@dataclass(frozen=True, slots=True)
class ReturnUnpicklable(Job[Any]):
    def run(self, context: Context) -> Any:
        return lambda: None


@dataclass(frozen=True, slots=True)
class Unreadable(Job[None]):
    """Cannot be unpickled."""

    def run(self, context: Context) -> None: ...

    def __reduce__(self) -> Any:
        return int, ("not a job",)


@dataclass(frozen=True, slots=True)
class Cache(Job[int]):
    """The number of the call that made the object cached under `key`."""

    key: str

    def run(self, context: Context) -> int:
        return context.cached(self.key, lambda: time.monotonic_ns())


@dataclass(frozen=True, slots=True)
class FaultyCompile(CompileJob):
    """A compile that does what its variant's `fault` says."""

    def run(self, context: Context) -> StaticFacts:
        context.report_stage("compile", self.variant)
        fault = self.variant.text("fault")
        if fault == "endless":
            time.sleep(1000)
        if fault == "abort":
            os.write(2, b"LLVM ERROR: cannot select\nPLEASE submit a bug report\n")
            os.kill(os.getpid(), signal.SIGABRT)
        if fault == "raise":
            raise RuntimeError("no such instruction")
        if fault.startswith("hang once "):
            HangOnce(fault.removeprefix("hang once ")).run(context)
        if fault.startswith("wait for "):
            WaitFor(fault.removeprefix("wait for ")).run(context)
        return StaticFacts(os.getpid(), os.nice(0), 0)


@dataclass(frozen=True, slots=True)
class HangingMeasurement(MeasureJob):
    """Never ends its check."""

    def run(self, context: Context) -> Timed:
        context.report_stage("check", self.variant)
        time.sleep(1000)
        raise AssertionError("it should have been killed")


@dataclass(frozen=True, slots=True)
class IllegalAccess(MeasureJob):
    """Runs a variant, on a GPU, with a block table that names a page which does not exist."""

    def run(self, context: Context) -> Timed:
        import torch

        from attention_tuner.kernel_templates.launch.device import present_gpu
        from attention_tuner.kernel_templates.launch.launcher import make_launcher
        from attention_tuner.kernel_templates.oracle.inputs import make_tensors

        context.report_stage("check", self.variant)
        gpu = present_gpu()
        assert gpu is not None
        task = self.task
        tensors = make_tensors(task.spec, task.batch, task.page_size, "cuda", self.seed)
        # The farthest page whose offset 32 bits hold: that of a farther one would wrap round, to memory that is there.
        tensors.block_table.fill_((2**31 - 1) // tensors.k_cache.stride(0))
        launcher = make_launcher(self.variant, task.spec, gpu)
        launcher.plan(task.batch, "cuda")
        launcher.run(tensors)
        torch.cuda.synchronize()
        raise AssertionError("the device should be lost")


@dataclass(frozen=True, slots=True)
class OutOfMemory(Job[None]):
    """Asks for more memory than a GPU has left, holding most of it."""

    def run(self, context: Context) -> None:
        import torch

        free, _ = torch.cuda.mem_get_info()
        first = torch.empty(free * 3 // 4, dtype=torch.uint8, device="cuda")
        torch.empty_like(first)


@dataclass(frozen=True, slots=True)
class FreeMemory(Job[int]):
    """Bytes that are free on the GPU."""

    def run(self, context: Context) -> int:
        import torch

        return torch.cuda.mem_get_info()[0]
