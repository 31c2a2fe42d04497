from attention_tuner.kernel_templates.gpu import TARGETS
from attention_tuner.kernel_templates.limits import Body, fits_registers, fits_shared_memory, shared_memory_bytes
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
    assert shared_memory_bytes(WIDE, SPEC, sm_80, 8, 3) == (96 + 32 + 1) * KIB
    assert shared_memory_bytes(WIDE, SPEC, sm_90, 8, 3) == (160 + 1) * KIB
    assert shared_memory_bytes(WIDE, SPEC, sm_90, 2, 3) == (96 + 32 + 1) * KIB


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
