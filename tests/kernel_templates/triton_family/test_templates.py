"""The bodies and the constraints of the templates in plain Triton."""

from __future__ import annotations

import pytest

from attention_tuner.kernel_templates.batch import Batch, BatchBucket
from attention_tuner.kernel_templates.gpu import INTERPRETER, TARGETS, Gpu
from attention_tuner.kernel_templates.registry import why_invalid
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.template import Body
from attention_tuner.kernel_templates.triton_family.templates import (
    FUSED,
    PERSISTENT,
    TWO_LAUNCH,
    UNIFIED,
    bodies,
    long_body,
    short_body,
    unified_body,
)
from attention_tuner.kernel_templates.variant import Variant

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


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


def test_one_body_serves_all_rows():
    first = {dimension.name: dimension.choices[0] for dimension in UNIFIED.dimensions}
    assert unified_body(Variant.of("unified", 16, first)) == (Body(16, 16),)


def test_only_the_segments_share_code():
    assert [d.name for d in UNIFIED.dimensions if not d.changes_code] == ["num_segments"]


VARIANT = Variant.of("two_launch", 16, {
    "block_m": 128, "block_n": 64, "num_warps": 8, "decode_block_m": 16, "decode_block_n": 128, "decode_num_warps": 2,
    "num_stages": 3, "kv_load": "pointer", "order": "items", "waves": 1,
})  # fmt: skip
SPEC, GPU = AttentionSpec(32, 8, 128), TARGETS["sm_90"]


def test_each_launch_has_its_own_body():
    assert (long_body(VARIANT), short_body(VARIANT)) == ((Body(128, 64),), (Body(16, 128),))


def test_each_body_is_judged_with_the_warps_of_its_own_launch():
    assert why_invalid(VARIANT, SPEC, GPU) is None
    assert "registers" in str(why_invalid(VARIANT.replace(num_warps=1), SPEC, GPU))
    assert "registers" in str(why_invalid(VARIANT.replace(decode_block_m=128, decode_num_warps=1), SPEC, GPU))
    assert why_invalid(VARIANT.replace(decode_num_warps=1), SPEC, GPU) is None


def test_for_one_kind_of_sequences_both_halves_are_the_same():
    for text, kept in (("4x1@9", "decode_"), ("1x64@9", "")):
        found = TWO_LAUNCH.settle(VARIANT, BatchBucket.of(Batch.parse(text)))
        for name in ("block_m", "block_n", "num_warps"):
            assert found.number(name) == found.number(f"decode_{name}") == VARIANT.number(kept + name)


def test_bfloat16_partial_results_need_a_bfloat16_layer():
    variant = Variant.of("persistent", 16, {d.name: d.choices[-1] for d in PERSISTENT.dimensions})
    variant = variant.replace(kv_load="pointer", block_m=64, block_n=64, num_stages=2)
    assert variant.text("partials") == "bfloat16"
    assert why_invalid(variant, AttentionSpec(8, 1, 128), TARGETS["sm_90"]) is None
    assert "too coarse" in str(why_invalid(variant, AttentionSpec(8, 1, 128, "float16"), TARGETS["sm_90"]))


@pytest.mark.parametrize("name", ["partials", "reduction"])
def test_where_nothing_is_cut_nothing_is_merged(name: str):
    values = {d.name: d.choices[0] for d in FUSED.dimensions} | {"waves": 0}
    spec, gpu = AttentionSpec(8, 1, 128), TARGETS["sm_90"]
    variant = Variant.of("fused", 16, values)
    assert why_invalid(variant, spec, gpu) is None
    changed = variant.replace(**{name: {d.name: d.choices for d in FUSED.dimensions}[name][1]})
    assert why_invalid(changed, spec, gpu) == "without waves there are no partial results"
    assert why_invalid(changed.replace(waves=1), spec, gpu) is None
