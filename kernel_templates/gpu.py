"""The record of a GPU: an installed GPU, Triton's interpreter, or a compile-only target."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import GpuError

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU model, or Triton's interpreter in its place."""

    # The driver's name, such as "NVIDIA H200". For a target: its architecture, such as "sm_90".
    name: str
    # Compute capability; (0, 0) for the interpreter.
    capability: tuple[int, int]
    num_sms: int
    # The most shared memory that one program may use.
    shared_memory_bytes: int
    l2_bytes: int
    # Driver version; "" for a GPU that is not installed.
    driver: str = ""

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise GpuError("a GPU needs a name")
        if self.num_sms < 1 or self.shared_memory_bytes < 1 or self.l2_bytes < 0:
            raise GpuError(f"GPU {self.name!r} has an impossible size: {self.num_sms} SMs, "
                           f"{self.shared_memory_bytes} bytes of shared memory, {self.l2_bytes} bytes of L2")

    @property
    def is_interpreter(self) -> bool:
        """True for Triton's interpreter, which runs on a CPU."""
        return self.capability == (0, 0)

    @property
    def arch(self) -> int:
        """The compute capability as one number, as in Triton's targets: 90 for (9, 0)."""
        return self.capability[0] * 10 + self.capability[1]

    @property
    def slug(self) -> str:
        """The name for file names: white space and slashes become underscores."""
        return re.sub(r"[\s/]+", "_", self.name)


INTERPRETER = Gpu("Triton interpreter", (0, 0), num_sms=4, shared_memory_bytes=227 * KIB, l2_bytes=0)

# Architectures for which variants compile without the GPU. Shared memory per program is from the CUDA C++ Programming
# Guide, table "Technical Specifications per Compute Capability". Other sizes are those of the first GPU sold.
TARGETS = {
    gpu.name: gpu
    for gpu in (
        Gpu("sm_80", (8, 0), num_sms=108, shared_memory_bytes=163 * KIB, l2_bytes=40 * MIB),
        Gpu("sm_89", (8, 9), num_sms=142, shared_memory_bytes=99 * KIB, l2_bytes=96 * MIB),
        Gpu("sm_90", (9, 0), num_sms=132, shared_memory_bytes=227 * KIB, l2_bytes=50 * MIB),
        Gpu("sm_100", (10, 0), num_sms=148, shared_memory_bytes=227 * KIB, l2_bytes=126 * MIB),
        Gpu("sm_120", (12, 0), num_sms=170, shared_memory_bytes=99 * KIB, l2_bytes=96 * MIB),
    )
}


def target(name: str) -> Gpu:
    """The compile-only target called `name`, such as `sm_90`. Raises `GpuError` for any other name."""
    if name not in TARGETS:
        raise GpuError(f"unknown GPU {name!r}; expected a GPU of this computer or one of {', '.join(TARGETS)}")
    return TARGETS[name]
