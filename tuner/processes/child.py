"""A child process's side: it receives jobs, runs them and answers until its parent closes the connection."""

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

# Most characters of the reason of a failure.
REASON_LENGTH = 300
_PR_SET_PDEATHSIG = 1


class Job(abc.ABC, Generic[R]):
    """A picklable record of work for a child process. Its result is picklable too."""

    __slots__ = ()

    @abc.abstractmethod
    def run(self, context: Context) -> R:
        """Do the work in the child. An exception becomes a `JobError` in the parent."""

    def result_after(self, error: JobError, run: Callable[[Job[R]], R]) -> R:
        """Result of a job that failed with `error`, in the parent; `run` runs the rest of it. Raises `error` if none.
        """
        raise error


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings of a child process, applied before its first job."""

    # Run kernels through Triton's interpreter.
    interpret: bool = False
    niceness: int = 0
    # Modules that are imported at once.
    preload: tuple[str, ...] = ()
    # Keys whose objects are kept for later jobs.
    cache_size: int = 1


class Context:
    """The child's services for a job: reports to the parent, and a cache shared with later jobs.

    The cache holds the objects of the `cache_size` keys that were used last.
    """

    def __init__(self, interpret: bool, send: Callable[[Any], None], cache_size: int = 1) -> None:
        self.interpret = interpret
        self._send = send
        self._cache_size = cache_size
        # In order of use, the last used at the end.
        self._cache: dict[Hashable, Any] = {}

    def gpu(self) -> Gpu:
        """The GPU that jobs run on, or the interpreter. Raises `GpuError` where there is neither."""
        from ...kernel_templates.launch.device import present_gpu

        gpu = INTERPRETER if self.interpret else present_gpu()
        if gpu is None:
            raise GpuError("no NVIDIA GPU is present to run on; Triton's interpreter needs none")
        return gpu

    def report_stage(self, name: str, variant: Variant | None = None) -> None:
        """Tell the parent the stage, and the variant to blame if the process dies in it."""
        self._send(Stage(name, variant))

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """The object cached under `key`, made by `make` if there is none."""
        if key in self._cache:
            self._cache[key] = self._cache.pop(key)
        else:
            # Memory may not hold one more, so the oldest is freed first.
            while len(self._cache) >= self._cache_size:
                del self._cache[next(iter(self._cache))]
            self._cache[key] = make()
        return cast(T, self._cache[key])

    def clear_cache(self) -> None:
        """Free all that is cached."""
        self._cache.clear()
        gc.collect()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class Ready:
    """Message: the child is set up."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Message: the running job has reached the stage `name`."""

    name: str
    # To blame if the process dies in this stage.
    variant: Variant | None


@dataclass(frozen=True, slots=True)
class Done:
    """Message: the job's result."""

    result: Any


@dataclass(frozen=True, slots=True)
class Raised:
    """Message: the job raised an exception."""

    reason: str
    # The process can run no further job.
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
        context = Context(setup.interpret, connection.send, setup.cache_size)
        while True:
            try:
                request = connection.recv_bytes()
            except EOFError:
                return
            connection.send_bytes(_answer(request, context))


def one_line(error: BaseException) -> str:
    """The class and the most telling line of `error`, at most `REASON_LENGTH` characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A compilation error of Triton begins with the place and the source; its last line is the reason.
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
    """The pickled result, or the exception's reason.

    The traceback, which would keep the job's tensors alive, is gone on return.
    """
    try:
        job: Job[Any] = pickle.loads(request)
        return bytes(ForkingPickler.dumps(Done(job.run(context))))
    except Exception as error:  # noqa: BLE001 - the process boundary: no failure may end the process
        return Raised(one_line(error))


def _recover() -> bool:
    """Free memory after a failure. False if the CUDA context is lost, as after an illegal access."""
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
    """Ask the kernel to kill this process when its parent dies, even inside a compiler that never returns."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent died first")
