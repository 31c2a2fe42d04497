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
    for name in ("batch", "limits", "spec", "launch.launcher", "launch.memory", "launch.plan", "launch.room",
                 "launch.tiles", "launch.work_list", "triton_family.arithmetic", "triton_family.combine",
                 "triton_family.kernel", "triton_family.launchers")
)

# A thread has at most 255 registers of 4 bytes on every GPU that Triton compiles for.
REGISTERS_PER_THREAD = 255
THREADS_PER_WARP = 32
# An accumulator of more times what its threads can hold spends its time in local memory: of 1,370 variants timed on an
# H200, the 39 whose accumulator exceeds the registers at all were 3 times slower than the best of their shape, or more.
SPILLED = 2
# Products in float32 take no tensor cores, and hold their operands in registers. Compiled with more numbers of them for
# each thread, at any head size, they need kilobytes of stack.
MOST_FLOAT32_OPERANDS = 48
# The smallest tile, of one stage and loaded through pointers, holds these many without: all that heads of more than 256
# leave.
MOST_FLOAT32_OPERANDS_AT_ONCE = 64
# What reductions across warps, and barriers, take of shared memory.
SCRATCH_BYTES = 1024
# What the accumulator takes at most on its way to the output, but for warpgroup products of capability 9.0.
STAGED_BYTES = 32768


@dataclass(frozen=True, slots=True)
class Body:
    """The tile shape of one body of a kernel: query rows and keys."""

    block_m: int
    block_n: int


SMALLEST = Body(16, 16)
Bodies = Callable[[Variant], tuple[Body, ...]]


def next_power_of_two(size: int) -> int:
    """The smallest power of two that is not below `size`, such as the columns of a tile of a head; 0 stays 0."""
    return 1 << (size - 1).bit_length() if size else 0


def is_tma(variant: Variant) -> bool:
    """Whether K and V come through TMA."""
    return variant.get("kv_load") == "tma"


def registers_of(num_warps: int) -> int:
    """The most registers of 4 bytes that the threads of a program of so many warps have together."""
    return num_warps * THREADS_PER_WARP * REGISTERS_PER_THREAD


def shared_memory_bytes(
    body: Body, spec: AttentionSpec, gpu: Gpu, num_warps: int, num_stages: int, tma: bool = False
) -> int:
    """The shared memory in bytes that a program with this body takes at most; it may take a tile of probabilities less.

    One tile of q, and tiles of K or V: one without pipelining, else of each one for every stage but the last. Warpgroup
    products read a tile in place and asynchronously, so that there is one more of it: of an fp8 cache, the one that was
    converted. Other products may pass the probabilities through shared memory. In float32 keys that come through TMA
    are turned in a tile of their own. At the end the accumulator passes through it. Read off what Triton 3.6 and 3.9
    compile.
    """
    major = gpu.capability[0]
    has_warpgroup_products = (
        major in (9, 10) and body.block_m >= 64 and num_warps >= 4 and spec.dtype != "float32"
    )
    k_dim, v_dim, size = next_power_of_two(spec.head_dim), next_power_of_two(spec.value_dim), spec.element_bytes
    if num_stages == 1:
        tiles = body.block_n * max(k_dim, v_dim) * size
    else:
        tiles = (num_stages - 1) * body.block_n * (k_dim + v_dim) * spec.kv_element_bytes
        if has_warpgroup_products:
            is_one = spec.has_fp8_cache and major == 9
            tiles += body.block_n * (max(k_dim, v_dim) if is_one else k_dim + v_dim) * size
        if tma and spec.dtype == "float32":
            tiles += body.block_n * k_dim * size
    probabilities = 0 if has_warpgroup_products else body.block_m * body.block_n * size
    scratch = SCRATCH_BYTES
    if has_warpgroup_products and major == 10:
        scratch *= 2 if num_warps == 4 else 5
    accumulator = body.block_m * v_dim * 4
    staged = accumulator if has_warpgroup_products and major == 9 else min(accumulator, STAGED_BYTES)
    return max(body.block_m * k_dim * size + tiles + probabilities, staged) + scratch


def fits_shared_memory(bodies: Bodies, num_warps: str = "num_warps") -> Constraint:
    """The tiles of each body, run by as many warps as that dimension says, are within the GPU's shared memory."""

    def holds(variant: Variant, spec: AttentionSpec, gpu: Gpu) -> bool:
        warps, stages = variant.number(num_warps), variant.number("num_stages")
        needed = max(shared_memory_bytes(body, spec, gpu, warps, stages, is_tma(variant)) for body in bodies(variant))
        return needed <= gpu.shared_memory_bytes

    return Constraint("its tiles exceed the GPU's shared memory", holds)


def fits_registers(bodies: Bodies, num_warps: str = "num_warps") -> Constraint:
    """The accumulator alone, in float32, is within `SPILLED` times the registers of the program's threads."""

    def holds(variant: Variant, spec: AttentionSpec, gpu: Gpu) -> bool:
        most = SPILLED * registers_of(variant.number(num_warps))
        columns = next_power_of_two(spec.value_dim)
        return gpu.is_interpreter or all(body.block_m * columns <= most for body in bodies(variant))

    return Constraint("its accumulator is twice what the registers of its warps hold", holds)


def fits_float32(bodies: Bodies, num_warps: str = "num_warps") -> Constraint:
    """The operands of products in float32 are within what the threads can hold."""

    def holds(variant: Variant, spec: AttentionSpec, gpu: Gpu) -> bool:
        if spec.dtype != "float32" or gpu.is_interpreter:
            return True
        is_at_once = variant.number("num_stages") == 1 and not is_tma(variant)
        is_least = is_at_once and all(body == SMALLEST for body in bodies(variant))
        most = MOST_FLOAT32_OPERANDS_AT_ONCE if is_least else MOST_FLOAT32_OPERANDS
        dim = next_power_of_two(max(spec.head_dim, spec.value_dim))
        threads = variant.number(num_warps) * THREADS_PER_WARP
        return all((body.block_m + body.block_n) * dim <= most * threads for body in bodies(variant))

    return Constraint("its tiles in float32 exceed the registers of its warps", holds)


def fits(bodies: Bodies, num_warps: str = "num_warps") -> tuple[Constraint, ...]:
    """What every body needs of registers and shared memory, run by as many warps as that dimension says."""
    return (fits_registers(bodies, num_warps), fits_float32(bodies, num_warps), fits_shared_memory(bodies, num_warps))


def _has_fp8(variant: Variant, spec: AttentionSpec, gpu: Gpu) -> bool:
    return "float8_e4m3fn" not in (spec.q_dtype, spec.kv_dtype) or gpu.is_interpreter or gpu.capability >= (8, 9)


# Of every template: what a layer needs of a GPU.
LAYER_CONSTRAINTS = (Constraint("numbers in float8_e4m3fn need a GPU of capability 8.9 or higher", _has_fp8),)
