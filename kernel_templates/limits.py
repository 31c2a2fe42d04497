"""Limits of a GPU on the tile shapes of a kernel, and the constraints that templates make of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .gpu import Gpu
from .spec import AttentionSpec
from .template import SMALLEST, Body, Constraint
from .variant import Variant

# A thread has at most 255 registers of 4 bytes on every GPU that Triton compiles for.
REGISTERS_PER_THREAD = 255
THREADS_PER_WARP = 32
# An accumulator larger than this many times the registers of its threads is refused, because it would live in local
# memory. Of 1,370 variants timed on an H200, the 39 whose accumulator exceeds the registers at all were at least 3
# times slower than the best of their shape.
SPILLED = 2
# Products in float32 use no tensor cores and hold their operands in registers. With more operands than this for each
# thread, at any head size, the compiled code needs kilobytes of stack.
MOST_FLOAT32_OPERANDS = 48
# The smallest tile, with one stage and loads through pointers, holds this many without stack. Heads of more than 256
# fit no other tile.
MOST_FLOAT32_OPERANDS_AT_ONCE = 64
# Shared memory of barriers and of reductions across warps.
SCRATCH_BYTES = 1024
# The most shared memory that the accumulator passes through on its way to the output, except after warpgroup products
# of capability 9.0.
STAGED_BYTES = 32768


@dataclass(frozen=True, slots=True)
class Program:
    """Readers of the values of a variant that decide what a program of its kernel needs of a GPU.

    A rule reads only what it needs, because each value that it reads makes listing a search space slower.
    """

    # The tile shapes of the bodies of the kernel.
    bodies: Callable[[Variant], tuple[Body, ...]]
    num_warps: Callable[[Variant], int]
    num_stages: Callable[[Variant], int]
    # True if K and V come through TMA.
    has_tma: Callable[[Variant], bool]


def next_power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`, such as the columns of a head's tile; 0 stays 0."""
    return 1 << (size - 1).bit_length() if size else 0


def registers_of(num_warps: int) -> int:
    """The most registers, of 4 bytes each, of a program with this many warps."""
    return num_warps * THREADS_PER_WARP * REGISTERS_PER_THREAD


def shared_memory_bytes(
    body: Body, spec: AttentionSpec, gpu: Gpu, num_warps: int, num_stages: int, tma: bool = False
) -> int:
    """The most shared memory in bytes of a program with this body; it may need a tile of probabilities less.

    There is one tile of q. Without pipelining there is one tile for K and V together, else one of each for every stage
    but the last. Warpgroup products read a tile in place and asynchronously, so that there is one tile of each more: of
    an fp8 cache, the converted one. Other products may pass the probabilities through shared memory. In float32, keys
    that come through TMA are transposed in a tile of their own. At the end the accumulator passes through shared
    memory. These rules were read off what Triton 3.6 and 3.9 compile.
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


def fits(program: Program) -> tuple[Constraint, ...]:
    """The rules of registers and shared memory for the programs of one kernel."""
    return (_fits_registers(program), _fits_float32(program), _fits_shared_memory(program))


def _fits_registers(program: Program) -> Constraint:
    def _holds(variant: Variant, spec: AttentionSpec, gpu: Gpu) -> bool:
        most = SPILLED * registers_of(program.num_warps(variant))
        columns = next_power_of_two(spec.value_dim)
        return gpu.is_interpreter or all(body.block_m * columns <= most for body in program.bodies(variant))

    return Constraint("its accumulator is twice what the registers of its warps hold", _holds)


def _fits_float32(program: Program) -> Constraint:
    def _holds(variant: Variant, spec: AttentionSpec, gpu: Gpu) -> bool:
        if spec.dtype != "float32" or gpu.is_interpreter:
            return True
        bodies = program.bodies(variant)
        is_at_once = program.num_stages(variant) == 1 and not program.has_tma(variant)
        is_least = is_at_once and all(body == SMALLEST for body in bodies)
        most = MOST_FLOAT32_OPERANDS_AT_ONCE if is_least else MOST_FLOAT32_OPERANDS
        dim = next_power_of_two(max(spec.head_dim, spec.value_dim))
        threads = program.num_warps(variant) * THREADS_PER_WARP
        return all((body.block_m + body.block_n) * dim <= most * threads for body in bodies)

    return Constraint("its tiles in float32 exceed the registers of its warps", _holds)


def _fits_shared_memory(program: Program) -> Constraint:
    def _holds(variant: Variant, spec: AttentionSpec, gpu: Gpu) -> bool:
        settings = program.num_warps(variant), program.num_stages(variant), program.has_tma(variant)
        bodies = program.bodies(variant)
        return max(shared_memory_bytes(body, spec, gpu, *settings) for body in bodies) <= gpu.shared_memory_bytes

    return Constraint("its tiles exceed the GPU's shared memory", _holds)


def _has_fp8(variant: Variant, spec: AttentionSpec, gpu: Gpu) -> bool:
    return "float8_e4m3fn" not in (spec.q_dtype, spec.kv_dtype) or gpu.is_interpreter or gpu.capability >= (8, 9)


# For every template: the needs of the layer itself.
LAYER_CONSTRAINTS = (Constraint("numbers in float8_e4m3fn need a GPU of capability 8.9 or higher", _has_fp8),)
