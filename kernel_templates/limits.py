"""Constraints that the templates share: what a tile shape needs of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .gpu import Gpu
from .spec import AttentionSpec
from .template import Constraint
from .variant import Variant

# Modules that affect every template which launches the kernel over a work list.
SHARED_SOURCES = tuple(
    f"{__package__}.{name}"
    for name in ("arithmetic", "attention", "batch", "combine", "launch", "limits", "plan", "room", "spec", "upload",
                 "work_list_launch")
)

# A thread has at most 255 registers of 4 bytes on every GPU that Triton compiles for.
REGISTERS_PER_THREAD = 255
THREADS_PER_WARP = 32
# An accumulator of more times what its threads can hold spends its time in local memory: of 1,370 variants timed on an
# H200, the 39 whose accumulator exceeds the registers at all were 3 times slower than the best of their shape, or more.
SPILLED = 2
# What reductions across warps, and barriers, take of shared memory.
SCRATCH_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Body:
    """The tile shape of one body of a kernel: query rows and keys."""

    block_m: int
    block_n: int


Bodies = Callable[[Variant], tuple[Body, ...]]


def shared_memory_bytes(body: Body, spec: AttentionSpec, gpu: Gpu, num_warps: int, num_stages: int) -> int:
    """The shared memory in bytes that a program with this body takes at most; it may take a tile of probabilities less.

    One tile of q, and tiles of K or V: one without pipelining, else one of each, twice each for warpgroup products,
    which read them in place and asynchronously. Other products may pass the probabilities through shared memory. Read
    off what Triton 3.6 and 3.9 compile.
    """
    has_warpgroup_products = gpu.capability[0] in (9, 10) and body.block_m >= 64 and num_warps >= 4
    tiles = 1 if num_stages == 1 else 4 if has_warpgroup_products else 2
    probabilities = 0 if has_warpgroup_products else body.block_m * body.block_n
    elements = (body.block_m + tiles * body.block_n) * spec.head_dim + probabilities
    return elements * spec.element_bytes + SCRATCH_BYTES


def fits_shared_memory(bodies: Bodies, num_warps: str = "num_warps") -> Constraint:
    """The tiles of each body, run by as many warps as that dimension says, are within the GPU's shared memory."""

    def holds(variant: Variant, spec: AttentionSpec, gpu: Gpu) -> bool:
        warps, stages = variant.number(num_warps), variant.number("num_stages")
        needed = max(shared_memory_bytes(body, spec, gpu, warps, stages) for body in bodies(variant))
        return needed <= gpu.shared_memory_bytes

    return Constraint("its tiles exceed the GPU's shared memory", holds)


def fits_registers(bodies: Bodies, num_warps: str = "num_warps") -> Constraint:
    """The accumulator alone, in float32, is within `SPILLED` times the registers of the program's threads."""

    def holds(variant: Variant, spec: AttentionSpec, gpu: Gpu) -> bool:
        most = SPILLED * variant.number(num_warps) * THREADS_PER_WARP * REGISTERS_PER_THREAD
        return gpu.is_interpreter or all(body.block_m * spec.head_dim <= most for body in bodies(variant))

    return Constraint("its accumulator is twice what the registers of its warps hold", holds)
