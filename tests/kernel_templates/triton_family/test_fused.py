import pytest

from attention_tuner.kernel_templates.gpu import INTERPRETER, TARGETS, Gpu
from attention_tuner.kernel_templates.registry import why_invalid
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.template import Body
from attention_tuner.kernel_templates.triton_family.templates import FUSED, bodies
from attention_tuner.kernel_templates.variant import Variant

SPEC = AttentionSpec(32, 8, 128)
VALUES = {
    "block_m": 64, "block_n": 64, "decode_block_m": 16, "decode_block_n": 32, "num_warps": 4, "num_stages": 2,
    "kv_load": "tma", "order": "items", "waves": 1, "long_weight": 1,
    "schedule": "long_first", "partials": "float32", "reduction": "kernel",
}  # fmt: skip


def test_long_and_short_sequences_have_their_own_bodies():
    assert bodies(Variant.of("fused", 16, VALUES)) == (Body(64, 64), Body(16, 32))


@pytest.mark.parametrize(
    ("gpu", "page_size", "reason"),
    [
        (TARGETS["sm_90"], 128, None),
        (INTERPRETER, 64, None),
        (TARGETS["sm_89"], 128, "TMA needs a GPU of capability 9.0 or higher"),
        (TARGETS["sm_90"], 16, "TMA needs pages that its key tiles divide"),
        (TARGETS["sm_90"], 528, "TMA needs pages that its key tiles divide"),
    ],
)
def test_tma_needs_a_gpu_and_pages_for_it(gpu: Gpu, page_size: int, reason: str | None):
    variant = Variant.of("fused", page_size, VALUES)
    assert why_invalid(variant, SPEC, gpu) == reason
    assert why_invalid(variant.replace(kv_load="pointer"), SPEC, gpu) is None


def test_the_counterparts_have_the_same_choices():
    choices = {d.name: d.choices for d in FUSED.dimensions}
    for dimension in FUSED.dimensions:
        if dimension.counterpart:
            assert dimension.choices == choices[dimension.counterpart]


def test_tma_needs_rows_of_16_bytes():
    variant = Variant.of("fused", 128, VALUES)
    reason = "TMA needs keys and values of a multiple of 16 bytes"
    for spec, expected in (
        (AttentionSpec(32, 8, 72), None),
        (AttentionSpec(32, 8, 72, kv_dtype="float8_e5m2"), reason),
        (AttentionSpec(32, 8, 80, v_head_dim=72, kv_dtype="float8_e5m2"), reason),
        (AttentionSpec(32, 8, 80, kv_dtype="float8_e5m2"), None),
    ):
        assert why_invalid(variant, spec, TARGETS["sm_90"]) == expected
        assert why_invalid(variant.replace(kv_load="pointer"), spec, TARGETS["sm_90"]) is None
