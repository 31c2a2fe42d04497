import dataclasses

from attention_tuner.kernel_templates.gpu import INTERPRETER, TARGETS
from attention_tuner.kernel_templates.limits import (
    LAYER_CONSTRAINTS,
    Body,
    fits_float32,
    fits_registers,
    fits_shared_memory,
    next_power_of_two,
    registers_of,
    shared_memory_bytes,
)
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.variant import Variant

SPEC = AttentionSpec(32, 8, 128)
WIDE = Body(128, 128)
KIB = 1024


def variant(num_warps: int, num_stages: int) -> Variant:
    return Variant.of("x", 16, {"num_warps": num_warps, "num_stages": num_stages})


def test_shared_memory_grows_with_pipelining_and_with_warpgroup_products():
    sm_80, sm_90 = TARGETS["sm_80"], TARGETS["sm_90"]
    assert shared_memory_bytes(WIDE, SPEC, sm_80, 8, 1) == (64 + 32 + 1) * KIB
    assert shared_memory_bytes(WIDE, SPEC, sm_80, 8, 2) == (32 + 64 + 32 + 1) * KIB
    assert shared_memory_bytes(WIDE, SPEC, sm_80, 8, 3) == (32 + 2 * 64 + 32 + 1) * KIB
    assert shared_memory_bytes(WIDE, SPEC, sm_90, 8, 2) == (32 + 2 * 64 + 1) * KIB
    assert shared_memory_bytes(WIDE, SPEC, sm_90, 8, 3) == (32 + 3 * 64 + 1) * KIB
    assert shared_memory_bytes(WIDE, SPEC, sm_90, 2, 3) == (32 + 2 * 64 + 32 + 1) * KIB


def test_keys_in_float32_that_come_through_tma_are_turned_in_a_tile_of_their_own():
    body, sm_90 = Body(16, 16), TARGETS["sm_90"]
    for spec, more in ((AttentionSpec(8, 2, 128, "float32", v_head_dim=64), 8 * KIB), (SPEC, 0)):
        by_pointer, by_tma = (shared_memory_bytes(body, spec, sm_90, 4, 2, tma) for tma in (False, True))
        assert by_tma == by_pointer + more
        assert shared_memory_bytes(body, spec, sm_90, 4, 1, True) == shared_memory_bytes(body, spec, sm_90, 4, 1)
    constraint = fits_shared_memory(lambda _: (Body(32, 16),))
    # 99 and 115 KiB, of 99.
    for load, holds in (("pointer", True), ("tma", False)):
        loaded = Variant.of("x", 128, {**variant(8, 3).as_dict(), "kv_load": load})
        assert constraint.holds(loaded, AttentionSpec(8, 2, 256, "float32"), TARGETS["sm_120"]) == holds


def test_the_largest_body_decides():
    constraint = fits_shared_memory(lambda _: (Body(16, 16), WIDE))
    spec = AttentionSpec(32, 8, 256)
    assert constraint.holds(variant(8, 3), SPEC, TARGETS["sm_90"])
    assert not constraint.holds(variant(8, 3), spec, TARGETS["sm_90"])
    assert not constraint.holds(variant(8, 3), spec, TARGETS["sm_89"])


def test_an_accumulator_needs_warps_enough():
    constraint = fits_registers(lambda _: (WIDE,))
    assert constraint.holds(variant(2, 3), SPEC, TARGETS["sm_90"])
    assert not constraint.holds(variant(1, 3), SPEC, TARGETS["sm_90"])


def test_tiles_are_as_wide_as_the_next_power_of_two():
    assert [next_power_of_two(dim) for dim in (32, 40, 80, 128, 136, 256, 264)] == [32, 64, 128, 128, 256, 256, 512]
    sm_80 = TARGETS["sm_80"]
    for dims, same in (((96, None), 128), ((136, 200), 256), ((320, 504), 512)):
        uneven, even = AttentionSpec(32, 8, dims[0], v_head_dim=dims[1]), AttentionSpec(32, 8, same)
        assert shared_memory_bytes(WIDE, uneven, sm_80, 8, 3) == shared_memory_bytes(WIDE, even, sm_80, 8, 3)


def test_keys_and_values_count_in_their_own_widths_and_dtypes():
    sm_80, sm_90 = TARGETS["sm_80"], TARGETS["sm_90"]
    latent = AttentionSpec(32, 8, 192, v_head_dim=128)
    assert shared_memory_bytes(WIDE, latent, sm_80, 8, 3) == (64 + 2 * (64 + 32) + 32 + 1) * KIB
    assert shared_memory_bytes(WIDE, latent, sm_90, 8, 3) == (64 + 3 * (64 + 32) + 1) * KIB
    fp8 = AttentionSpec(32, 8, 128, kv_dtype="float8_e5m2")
    # Warpgroups read one tile after conversion.
    assert shared_memory_bytes(WIDE, fp8, sm_80, 8, 3) == (32 + 2 * (16 + 16) + 32 + 1) * KIB
    assert shared_memory_bytes(WIDE, fp8, sm_90, 8, 3) == (32 + 2 * (16 + 16) + 32 + 1) * KIB


def test_float32_needs_warps_for_its_operands():
    constraint = fits_float32(lambda _: (Body(16, 16),))
    wide = AttentionSpec(4, 2, 256, "float32")
    assert not constraint.holds(variant(4, 3), wide, TARGETS["sm_90"])
    assert constraint.holds(variant(8, 3), wide, TARGETS["sm_90"])
    assert constraint.holds(variant(4, 3), AttentionSpec(4, 2, 256), TARGETS["sm_90"])
    assert constraint.holds(variant(4, 3), wide, INTERPRETER)


def test_the_smallest_tile_in_float32_is_all_that_the_largest_heads_leave():
    wide = AttentionSpec(4, 2, 512, "float32")
    for body, num_stages, holds in ((Body(16, 16), 1, True), (Body(16, 16), 2, False), (Body(16, 32), 1, False)):
        assert fits_float32(lambda _, body=body: (body,)).holds(variant(8, num_stages), wide, TARGETS["sm_90"]) == holds
    constraint = fits_float32(lambda _: (Body(16, 16),))
    assert not constraint.holds(variant(4, 1), wide, TARGETS["sm_90"])
    for load in ("pointer", "tma"):
        loaded = Variant.of("x", 128, {**variant(8, 1).as_dict(), "kv_load": load})
        assert constraint.holds(loaded, wide, TARGETS["sm_90"]) == (load == "pointer")


def test_accumulators_of_the_largest_heads_need_eight_warps_for_64_rows():
    spec = AttentionSpec(32, 8, 64, v_head_dim=512)
    assert not fits_registers(lambda _: (Body(64, 16),)).holds(variant(2, 1), spec, TARGETS["sm_90"])
    assert registers_of(8) >= 64 * 512
    assert registers_of(4) < 64 * 512


def test_e4m3_needs_a_gpu_that_has_it():
    (constraint,) = LAYER_CONSTRAINTS
    found = {
        name: constraint.holds(variant(4, 3), AttentionSpec(4, 2, 64, kv_dtype="float8_e4m3fn"), gpu)
        for name, gpu in {**TARGETS, "interpreter": INTERPRETER}.items()
    }
    assert [name for name, holds in found.items() if not holds] == ["sm_80"]
    e5m2 = AttentionSpec(4, 2, 64, kv_dtype="float8_e5m2")
    assert constraint.holds(variant(4, 3), e5m2, TARGETS["sm_80"])
    assert constraint.holds(variant(4, 3), dataclasses.replace(e5m2, q_dtype="float8_e5m2"), TARGETS["sm_80"])
    assert not constraint.holds(variant(4, 3), dataclasses.replace(e5m2, q_dtype="float8_e4m3fn"), TARGETS["sm_80"])
