"""Constraints on tile shapes from a GPU's registers, shared memory and dtypes."""

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
# An accumulator larger than this many times the registers of its threads would live in local memory, so it is invalid.
# On an H200, 39 of 1,370 timed variants had an accumulator larger than the registers. Each took at least 3 times as
# long as the best variant of its shape.
SPILLED = 2
# Products in float32 use no tensor cores and hold their operands in registers. With more operands than this per
# thread, the compiled code needs kilobytes of stack at any head size.
MOST_FLOAT32_OPERANDS = 48
# The smallest tile, with one stage and pointer loads, holds this many operands per thread without stack. Heads larger
# than 256 fit no other tile.
MOST_FLOAT32_OPERANDS_AT_ONCE = 64
# Shared memory for barriers and reductions across warps.
SCRATCH_BYTES = 1024
# The most shared memory that stages the accumulator for the output. Warpgroup products of capability 9.0 stage all of
# it.
STAGED_BYTES = 32768


@dataclass(frozen=True, slots=True)
class Program:
    """Functions that read a variant's tile shapes, warps, stages and loads.

    A rule calls only those it needs, because each value that it reads makes listing a search space slower.
    """

    # The tile shapes of the bodies of the kernel.
    bodies: Callable[[Variant], tuple[Body, ...]]
    num_warps: Callable[[Variant], int]
    num_stages: Callable[[Variant], int]
    # True if K and V come through TMA.
    has_tma: Callable[[Variant], bool]


def next_power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`; 0 stays 0."""
    return 1 << (size - 1).bit_length() if size else 0


def registers_of(num_warps: int) -> int:
    """The most registers (4 bytes each) of a program with this many warps."""
    return num_warps * THREADS_PER_WARP * REGISTERS_PER_THREAD


def shared_memory_bytes(
    body: Body, spec: AttentionSpec, gpu: Gpu, num_warps: int, num_stages: int, tma: bool = False
) -> int:
    """Upper bound in bytes on the shared memory of a program with this body.

    The rules match the code that Triton 3.6 and 3.9 compile:

    - One tile of q.
    - With one stage, one tile that K and V share. Otherwise one tile of K and one of V for every stage but the last.
    - With several stages and warpgroup products, one more tile of each, because these products read tiles in place
      and asynchronously. With an fp8 cache on capability 9, one converted tile instead.
    - With several stages and TMA in float32, one more tile of K, to transpose it.
    - Without warpgroup products, possibly one tile of probabilities. The bound includes it.
    - At the end, the accumulator.
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


# Constraints of the layer, for every template.
LAYER_CONSTRAINTS = (Constraint("numbers in float8_e4m3fn need a GPU of capability 8.9 or higher", _has_fp8),)
