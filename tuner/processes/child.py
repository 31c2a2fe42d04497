"""Inside a child process: jobs are received, run and answered until the parent hangs up."""

from __future__ import annotations

import abc
import ctypes
import gc
import importlib
import os
import pickle
import re
import signal
import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, Generic, TypeVar, cast

from ...kernel_templates.errors import GpuError
from ...kernel_templates.gpu import INTERPRETER, Gpu
from ...kernel_templates.outcome import JobError
from ...kernel_templates.variant import Variant

R = TypeVar("R")
T = TypeVar("T")

REASON_LENGTH = 300
_PR_SET_PDEATHSIG = 1


class Job(abc.ABC, Generic[R]):
    """A picklable record of work for a child process, which gives a picklable result."""

    __slots__ = ()

    @abc.abstractmethod
    def run(self, context: Context) -> R:
        """Do the work, in the child. Whatever it raises becomes a `JobError` in the parent."""

    def settle(self, error: JobError, again: Callable[[Job[R]], R]) -> R:
        """The result, in the parent, after `error`; `again` runs what is left of the job. Raises `error` if none."""
        raise error


@dataclass(frozen=True, slots=True)
class Setup:
    """What a child does before its first job: its niceness, and modules that are imported ahead.

    For later jobs it keeps what at most `room` keys need.
    """

    interpret: bool = False
    niceness: int = 0
    preload: tuple[str, ...] = ()
    room: int = 1


class Context:
    """What a job is given in the child: a way to say what it is at, and a place to keep things for the next job."""

    def __init__(self, interpret: bool, send: Callable[[Any], None], room: int = 1) -> None:
        self.interpret = interpret
        self._send = send
        self._room = room
        # By key, the one asked for last at the end.
        self._kept: dict[Hashable, Any] = {}

    def gpu(self) -> Gpu:
        """The GPU that jobs run on, or the interpreter. Raises `GpuError` where there is neither."""
        from ...kernel_templates.launch.device import present_gpu

        gpu = INTERPRETER if self.interpret else present_gpu()
        if gpu is None:
            raise GpuError("no NVIDIA GPU is present to run on; Triton's interpreter needs none")
        return gpu

    def at(self, stage: str, variant: Variant | None = None) -> None:
        """Tell the parent what is to blame if nothing more is heard."""
        self._send(At(stage, variant))

    def keep(self, key: Hashable, make: Callable[[], T]) -> T:
        """What an earlier job kept under `key`, else what `make` returns; that of the last few keys is kept."""
        if key in self._kept:
            self._kept[key] = self._kept.pop(key)
        else:
            # Freed first: there may not be memory for one more.
            while len(self._kept) >= self._room:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = make()
        return cast(T, self._kept[key])

    def forget(self) -> None:
        """Free what is kept."""
        self._kept.clear()
        gc.collect()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class Ready:
    """The child is set up."""


@dataclass(frozen=True, slots=True)
class At:
    """What the running job is at."""

    stage: str
    variant: Variant | None


@dataclass(frozen=True, slots=True)
class Done:
    """The job's result."""

    result: Any


@dataclass(frozen=True, slots=True)
class Raised:
    """The job raised; after a `fatal` error the process can run no further job."""

    reason: str
    fatal: bool = False


def serve(descriptor: int, parent: int) -> None:
    """Answer the jobs that come through the socket `descriptor` until process `parent` closes it or dies."""
    _die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)
    with Connection(descriptor) as connection:
        setup: Setup = connection.recv()
        os.nice(setup.niceness)
        for module in setup.preload:
            importlib.import_module(module)
        connection.send(Ready())
        context = Context(setup.interpret, connection.send, setup.room)
        while True:
            try:
                request = connection.recv_bytes()
            except EOFError:
                return
            connection.send_bytes(_answer(request, context))


def one_line(error: BaseException) -> str:
    """The class of `error` and the line of its message that says most, at most `REASON_LENGTH` characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Triton's compilation errors begin with the place and the source and end with what is wrong there.
    located = bool(lines) and re.match(r"at \d+:\d+", lines[0]) is not None
    text = lines[-1 if located else 0] if lines else ""
    name = type(error).__name__
    return (f"{name}: {text}" if text else name)[:REASON_LENGTH]


def _answer(request: bytes, context: Context) -> bytes:
    """The pickled reply to a pickled job."""
    reply = _attempt(request, context)
    if isinstance(reply, bytes):
        return reply
    return bytes(ForkingPickler.dumps(replace(reply, fatal=not _recover())))


def _attempt(request: bytes, context: Context) -> bytes | Raised:
    """The pickled result, or why there is none. On return, nothing refers to what the job held: tracebacks did."""
    try:
        job: Job[Any] = pickle.loads(request)
        return bytes(ForkingPickler.dumps(Done(job.run(context))))
    except Exception as error:  # noqa: BLE001 - the process boundary: every failure is one variant's
        return Raised(one_line(error))


def _recover() -> bool:
    """Give memory back after a failure; false when the CUDA context is lost, as after an illegal access."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, even inside a compiler that never returns."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent died first")
