"""How long a child process may take for a job: wall time, or CPU time."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

# A job that is limited in CPU time and idles is killed after this multiple of its limit.
IDLE_FACTOR = 10
# How the reason of a job that exceeded its limit begins: of wall time, or of CPU time.
EXCEEDED = ("gave no result within", "took more than")


class Limit:
    """A limit in seconds from now on: of wall time, or of the CPU time of the session led by `session`."""

    def __init__(self, limit_s: float, session: int | None = None) -> None:
        self._limit_s = limit_s
        self._session = session
        self._start = time.monotonic()
        self._cpu_start = 0.0 if session is None else session_cpu_s(session)
        self.reason = f"{EXCEEDED[0]} {limit_s:g} s"

    def left_s(self) -> float:
        """Seconds until the limit can have passed, not positive once it has; then `reason` says how."""
        wall = time.monotonic() - self._start
        # A session of one thread cannot have used more CPU time than wall time, and reading it costs milliseconds.
        if self._session is None or wall < self._limit_s:
            return self._limit_s - wall
        left = self._limit_s - (session_cpu_s(self._session) - self._cpu_start)
        if left <= 0:
            self.reason = f"{EXCEEDED[1]} {self._limit_s:g} s of CPU time"
            return left
        return min(left, self._limit_s * IDLE_FACTOR - wall)


def session_cpu_s(session: int) -> float:
    """CPU seconds that the processes of `session` have used, with those of theirs that have ended."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # man 5 proc: the second field, the command in parentheses, may hold anything; 6 is the session, and
            # 14 to 17 are the process's own and its reaped children's user and system time.
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[3]) == session:
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")
