import dataclasses

import pytest

from attention_tuner.kernel_templates.gpu import INTERPRETER, TARGETS, Gpu
from attention_tuner.kernel_templates.limits import (
    LAYER_CONSTRAINTS,
    Program,
    fits,
    next_power_of_two,
    registers_of,
    shared_memory_bytes,
)
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.template import Body
from attention_tuner.kernel_templates.variant import Variant

SPEC = AttentionSpec(32, 8, 128)
WIDE = Body(128, 128)
KIB = 1024


VARIANT = Variant.of("x", 16, {})
MEMORY, ACCUMULATOR, OPERANDS = "shared memory", "registers of its warps hold", "registers of its warps"


def broken(
    bodies: tuple[Body, ...], spec: AttentionSpec, gpu: Gpu, num_warps: int, num_stages: int, tma: bool = False
) -> set[str]:
    """The last words of the rules that a program with these bodies breaks."""
    program = Program(lambda _: bodies, lambda _: num_warps, lambda _: num_stages, lambda _: tma)
    reasons = {rule.reason for rule in fits(program) if not rule.holds(VARIANT, spec, gpu)}
    return {words for words in (MEMORY, ACCUMULATOR, OPERANDS) if any(reason.endswith(words) for reason in reasons)}


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
    # 99 and 115 KiB, of 99.
    spec = AttentionSpec(8, 2, 256, "float32")
    assert broken((Body(32, 16),), spec, TARGETS["sm_120"], 8, 3) == set()
    assert broken((Body(32, 16),), spec, TARGETS["sm_120"], 8, 3, tma=True) == {MEMORY}


def test_the_largest_body_decides():
    bodies, spec = (Body(16, 16), WIDE), AttentionSpec(32, 8, 256)
    assert broken(bodies, SPEC, TARGETS["sm_90"], 8, 3) == set()
    assert broken(bodies, spec, TARGETS["sm_90"], 8, 3) == {MEMORY}
    assert broken(bodies, spec, TARGETS["sm_89"], 8, 3) == {MEMORY}


def test_an_accumulator_needs_warps_enough():
    assert broken((WIDE,), SPEC, TARGETS["sm_90"], 2, 3) == set()
    assert broken((WIDE,), SPEC, TARGETS["sm_90"], 1, 3) == {ACCUMULATOR}
    wide = AttentionSpec(32, 8, 64, v_head_dim=512)
    assert broken((Body(64, 16),), wide, TARGETS["sm_90"], 2, 1) == {ACCUMULATOR}
    assert registers_of(4) < 64 * 512 <= registers_of(8)


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
    wide, smallest = AttentionSpec(4, 2, 256, "float32"), (Body(16, 16),)
    assert broken(smallest, wide, TARGETS["sm_90"], 4, 3) == {OPERANDS}
    assert broken(smallest, wide, TARGETS["sm_90"], 8, 3) == set()
    assert broken(smallest, AttentionSpec(4, 2, 256), TARGETS["sm_90"], 4, 3) == set()
    assert broken(smallest, wide, INTERPRETER, 4, 3) == set()


@pytest.mark.parametrize(("body", "num_warps", "num_stages", "tma", "fits"), [
    (Body(16, 16), 8, 1, False, True),
    (Body(16, 16), 8, 2, False, False),
    (Body(16, 32), 8, 1, False, False),
    (Body(16, 16), 4, 1, False, False),
    (Body(16, 16), 8, 1, True, False),
])  # fmt: skip
def test_the_largest_heads_in_float32_fit_the_smallest_tile_only(
    body: Body, num_warps: int, num_stages: int, tma: bool, fits: bool
):
    wide = AttentionSpec(4, 2, 512, "float32")
    assert (OPERANDS not in broken((body,), wide, TARGETS["sm_90"], num_warps, num_stages, tma)) == fits


def test_e4m3_needs_a_gpu_that_has_it():
    (constraint,) = LAYER_CONSTRAINTS
    found = {
        name: constraint.holds(VARIANT, AttentionSpec(4, 2, 64, kv_dtype="float8_e4m3fn"), gpu)
        for name, gpu in {**TARGETS, "interpreter": INTERPRETER}.items()
    }
    assert [name for name, holds in found.items() if not holds] == ["sm_80"]
    e5m2 = AttentionSpec(4, 2, 64, kv_dtype="float8_e5m2")
    assert constraint.holds(VARIANT, e5m2, TARGETS["sm_80"])
    assert constraint.holds(VARIANT, dataclasses.replace(e5m2, q_dtype="float8_e5m2"), TARGETS["sm_80"])
    assert not constraint.holds(VARIANT, dataclasses.replace(e5m2, q_dtype="float8_e4m3fn"), TARGETS["sm_80"])
