"""The parent's side of a child process: starts it, gives it jobs, watches it, kills and replaces it."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from typing import Any, TypeVar

from ...kernel_templates.errors import TunerError
from ...kernel_templates.outcome import JobError
from .child import REASON_LENGTH, Done, Job, Raised, Setup, Stage, serve

R = TypeVar("R")

# Importing torch from a cold disk takes most of a minute.
START_LIMIT_S = 180.0
# The driver takes seconds to end a process whose kernel never ends.
KILL_LIMIT_S = 60.0
LOG_BYTES = 1 << 20
# The reason of a job that exceeded its limit begins with this.
EXCEEDED = "gave no result within"

_TICK_S = 1.0
_LATE = "the time was up before it could begin"
_CLOSED = "its process was closed"


class JobTimeoutError(JobError):
    """A job exceeded its limit of wall time; its process is killed."""


class ChildProcess:
    """Runs jobs one at a time in a process of its own session.

    A job that kills the process harms no other. The process starts with the first job, and anew with the next job after
    its death; it dies with the thread that started it. Its output goes to a bounded, unnamed file that is read only to
    explain its death. `environment` is added to the parent's; None removes a name. `close` may be called from any
    thread.
    """

    def __init__(self, setup: Setup, environment: Mapping[str, str | None] | None = None) -> None:
        self._setup = setup
        self._environment = dict(environment or {})
        self._running = threading.Lock()
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._is_ready = False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        # Without O_APPEND a child would go on at its old offset after the file is emptied.
        fcntl.fcntl(self._log, fcntl.F_SETFL, fcntl.fcntl(self._log, fcntl.F_GETFL) | os.O_APPEND)

    @property
    def pid(self) -> int | None:
        """The process, which leads its own session; None before the first job and after its death."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(self) -> None:
        """Start the process, unless one runs, without waiting until it can work."""
        with self._running:
            if not self._closed:
                self._spawned()

    def ready(self, limit_s: float) -> bool:
        """Start the process, unless one runs, and wait up to `limit_s` seconds for it. True if it can work now.

        Raises `TunerError` when it cannot be started.
        """
        with self._running:
            if self._closed:
                return False
            _, connection = self._spawned()
            if not self._is_ready and not connection.poll(min(max(0.0, limit_s), START_LIMIT_S)):
                if limit_s < START_LIMIT_S:
                    return False
                raise TunerError(f"a worker process could not start: it took more than {START_LIMIT_S:.0f} s")
            self._started()
            return True

    def run(self, job: Job[R], limit_s: float, deadline: float = math.inf) -> R:
        """The result of `job`, which may take `limit_s` seconds of wall time.

        The job ends at `deadline` of `time.monotonic`, and so does starting a process for it. A job whose process was
        killed from outside is run once more. Raises `JobError` when the job raised or killed the process,
        `JobTimeoutError` when it exceeded a limit, and `TunerError` when no process could be started.
        """
        with self._running:
            try:
                reply, stage = self._exchange_or_repeat(job, limit_s, deadline)
            except BaseException:
                # A late answer must not be taken for the next job's.
                self._end()
                raise
            if isinstance(reply, Done):
                return reply.result
            if reply.fatal:
                self._end()
            raise JobError(reply.reason, stage.name, stage.variant)

    def close(self) -> None:
        """End the process for good; a job that runs in it now, or is given later, raises `JobError`."""
        self._closed = True
        self._kill()
        with self._running:
            self._end()
            self._log.close()

    def __enter__(self) -> ChildProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exchange_or_repeat(self, job: Job[R], limit_s: float, deadline: float) -> tuple[Done | Raised, Stage]:
        was_running, start = self._process is not None, time.monotonic()
        try:
            return self._exchange(job, limit_s, deadline)
        except _DeathError as death:
            # A crash does not end in SIGKILL. A job that had not begun did not kill a process that ran before.
            is_innocent = death.status == -signal.SIGKILL or (was_running and not death.stage)
            left_s = limit_s - (time.monotonic() - start)
            if self._closed or not is_innocent or left_s <= 0:
                raise
            self._end()
            return self._exchange(job, left_s, deadline)

    def _exchange(self, job: Job[R], limit_s: float, deadline: float) -> tuple[Done | Raised, Stage]:
        """The reply to `job`, and the stage that it had reached."""
        stage = Stage("", None)
        if self._closed:
            raise JobError(_CLOSED)
        process, connection = self._started(deadline)
        self._log.truncate(0)
        start = time.monotonic()
        limit_s = min(limit_s, deadline - start)
        if limit_s <= 0:
            raise JobError(_LATE)
        try:
            self._send(process, connection, job)
            while True:
                message = self._receive(process, connection, start, limit_s)
                if isinstance(message, Done | Raised):
                    return message, stage
                stage = message
        except JobError as error:
            error.stage, error.variant = stage.name, stage.variant
            raise

    def _send(self, process: subprocess.Popen[bytes], connection: Connection, message: Any) -> None:
        try:
            connection.send(message)
        except ConnectionError:
            raise self._death(process) from None

    def _receive(
        self, process: subprocess.Popen[bytes], connection: Connection, start: float, limit_s: float
    ) -> Any:
        """The child's next message. Raises `JobError` if it dies, or `limit_s` seconds after `start`."""
        while (left_s := start + limit_s - time.monotonic()) > 0:
            try:
                if connection.poll(min(left_s, _TICK_S)):
                    return connection.recv()
            except (EOFError, ConnectionError):
                raise self._death(process) from None
            if self._closed:
                raise JobError(_CLOSED)
            if process.poll() is not None:
                raise self._death(process)
            if os.fstat(self._log.fileno()).st_size > LOG_BYTES:
                self._log.truncate(0)
        raise JobTimeoutError(f"{EXCEEDED} {limit_s:g} s")

    def _started(self, deadline: float = math.inf) -> tuple[subprocess.Popen[bytes], Connection]:
        """The running process or a new one, once it can work. Raises `TunerError`, and `JobError` at `deadline`."""
        if time.monotonic() >= deadline:
            raise JobError(_LATE)
        process, connection = self._spawned()
        if not self._is_ready:
            try:
                start = time.monotonic()
                self._receive(process, connection, start, min(START_LIMIT_S, deadline - start))
            except JobError as error:
                if self._closed:
                    raise
                if time.monotonic() >= deadline:
                    raise JobError(_LATE) from error
                raise TunerError(f"a worker process could not start: {error}") from error
            self._is_ready = True
        return process, connection

    def _spawned(self) -> tuple[subprocess.Popen[bytes], Connection]:
        """The running process or a new one. Raises `TunerError` when none can be started."""
        if self._process is not None and self._connection is not None:
            if self._process.poll() is None:
                return self._process, self._connection
            # It was killed between two jobs, so neither is to blame.
            self._end()
        ours, theirs = Pipe()
        call = f"from {serve.__module__} import serve; serve({theirs.fileno()}, {os.getpid()})"
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", call],
                env=self._child_environment(),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        finally:
            theirs.close()
        self._process, self._connection, self._is_ready = process, ours, False
        try:
            self._send(process, ours, self._setup)
        except JobError as error:
            raise TunerError(f"a worker process could not start: {error}") from error
        return process, ours

    def _child_environment(self) -> dict[str, str]:
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        merged = {**os.environ, **self._environment, "PYTHONPATH": path}
        return {name: value for name, value in merged.items() if value is not None}

    def _kill(self) -> None:
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _end(self) -> None:
        """Kill the process and its children, and wait for its end, so that the GPU is free again."""
        self._kill()
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if process is not None:
            try:
                process.wait(KILL_LIMIT_S)
            except subprocess.TimeoutExpired:
                raise TunerError(f"process {process.pid} could not be ended within {KILL_LIMIT_S:.0f} s") from None

    def _death(self, process: subprocess.Popen[bytes]) -> _DeathError:
        """The error for the death of `process`: how it ended, and the most telling line of its output."""
        try:
            status = process.wait(KILL_LIMIT_S)
        except subprocess.TimeoutExpired:
            return _DeathError("hung up without ending")
        said = _telling_line(os.pread(self._log.fileno(), LOG_BYTES, 0).decode(errors="replace"))
        how = f"killed by {_signal_name(-status)}" if status < 0 else f"exited with status {status}"
        return _DeathError((f"{how}: {said}" if said else how)[:REASON_LENGTH], status)


class _DeathError(JobError):
    """The process ended with `status`, negative for a signal."""

    def __init__(self, reason: str, status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status


def _telling_line(text: str) -> str:
    """The first line of `text` with the message of a C++ exception, else one that names an error, else the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = (line.removeprefix("what():").strip() for line in lines if line.startswith("what():"))
    errors = (line for line in lines if "error" in line.lower() or "assert" in line.lower())
    return next(said, next(errors, lines[-1] if lines else ""))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
