"""The state of the physical GPU, and the processes that use it, as `nvidia-smi` reports them.

None of the GPU's settings is ever changed.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

# Reading takes a tenth of a second; on a host with many GPUs whose driver must wake up first, seconds.
READ_LIMIT_S = 20.0
# Heat slows a GPU down for much longer than this, and each look starts a process.
WATCH_PERIOD_S = 0.25

_NUMBERS = {
    "sm_clock_mhz": "clocks.sm",
    "memory_clock_mhz": "clocks.mem",
    "max_sm_clock_mhz": "clocks.max.sm",
    "max_memory_clock_mhz": "clocks.max.mem",
    "power_w": "power.draw",
    "power_limit_w": "enforced.power.limit",
    "temperature_c": "temperature.gpu",
}
_PERSISTENCE = "persistence_mode"
_ECC = "ecc.mode.current"
_REASONS = "clocks_event_reasons.active"
# The bits of nvml.h, NVML API reference, nvmlClocksEventReasons.
_REASON_BITS = {
    0x001: "idle",
    0x002: "application clocks",
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "power brake",
    0x100: "display clocks",
}
# The power cap is not among them: a GPU full of matrix products always runs under it, and so do all variants of a race.
# The sentinel sees what changes under the cap within a race.
_THROTTLES = {"hardware slowdown", "software thermal slowdown", "hardware thermal slowdown", "power brake"}


@dataclass(frozen=True, slots=True)
class GpuState:
    """The state of a GPU at one moment; None for values that it does not report."""

    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    max_sm_clock_mhz: float | None = None
    max_memory_clock_mhz: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    persistence: str | None = None
    ecc: str | None = None
    # Why the clocks are below their maximum.
    reasons: tuple[str, ...] = ()

    @property
    def is_throttled(self) -> bool:
        """True if heat or the power supply holds the clocks down."""
        return not _THROTTLES.isdisjoint(self.reasons)


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that has memory on a GPU."""

    pid: int
    name: str
    # None where the driver does not report it.
    memory_mib: int | None = None


class ThrottleWatch:
    """Looks at the GPU `uuid` every quarter of a second while a `with` block runs; for None it sees nothing."""

    def __init__(self, uuid: str | None, look: Callable[[str], GpuState | None] | None = None) -> None:
        self._uuid = uuid
        self._look = look or read_gpu_state
        self._throttled: list[tuple[float, float]] = []
        self._stop = threading.Event()
        # An idle GPU cools down, so the race must not wait for a look.
        self._thread = threading.Thread(target=self._watch, name="throttle watch", daemon=True)

    def throttled(self, start_s: float, end_s: float) -> bool:
        """True if a look between these times of `time.monotonic` found the GPU throttled."""
        return any(asked <= end_s and answered >= start_s for asked, answered in tuple(self._throttled))

    def __enter__(self) -> ThrottleWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        # A slow driver must not hold up the run, so the wait is short.
        self._thread.join(WATCH_PERIOD_S)

    def _watch(self) -> None:
        while self._uuid is not None and not self._stop.is_set():
            asked = time.monotonic()
            state = self._look(self._uuid)
            if state is None:
                return
            if state.is_throttled:
                self._throttled.append((asked, time.monotonic()))
            self._stop.wait(WATCH_PERIOD_S)


def read_gpu_state(uuid: str) -> GpuState | None:
    """The present state of the GPU `uuid`, None where there is no `nvidia-smi` or it knows no such GPU."""
    fields = [*_NUMBERS.values(), _PERSISTENCE, _ECC, _REASONS]
    lines = _read(f"--id={uuid}", f"--query-gpu={','.join(fields)}")
    if not lines:
        return None
    told = dict(zip(fields, map(str.strip, lines[0].split(",")), strict=False))
    mask = told.get(_REASONS, "")
    active = int(mask, 16) if mask.startswith("0x") else 0
    return GpuState(
        **{name: _number(told.get(field, "")) for name, field in _NUMBERS.items()},
        persistence=told.get(_PERSISTENCE),
        ecc=told.get(_ECC),
        reasons=tuple(name for bit, name in _REASON_BITS.items() if active & bit),
    )


def foreign_processes(uuid: str, own_pids: Collection[int]) -> list[GpuProcess]:
    """The processes that compute on the GPU `uuid`, without `own_pids`. Empty where there is no `nvidia-smi`.

    Inside a container the driver may show none, or those of the host with the host's pids. A process without a pid is
    left out.
    """
    lines = _read("--query-compute-apps=gpu_uuid,pid,used_gpu_memory,process_name") or ()
    found = [line.split(", ", 3) for line in lines]
    processes = [
        GpuProcess(int(pid), name, int(memory) if memory.isdigit() else None)
        for where, pid, memory, name in (words for words in found if len(words) == 4)
        if where == uuid and pid.isdigit()
    ]
    return [process for process in processes if process.pid not in own_pids]


def foreign_sentence(processes: Collection[GpuProcess]) -> str:
    """The warning about `processes` of others."""
    names = ", ".join(f"{process.name} (pid {process.pid})" for process in processes)
    return f"the GPU is also used by {names}: times taken meanwhile cannot be trusted"


def _number(word: str) -> float | None:
    """The number in `word`, None for a word such as "[N/A]"."""
    try:
        return float(word)
    except ValueError:
        return None


def _read(*arguments: str) -> list[str] | None:
    """The lines of `nvidia-smi`'s answer to a query, None where there is no such tool or it fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, *arguments, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=READ_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout.splitlines()
