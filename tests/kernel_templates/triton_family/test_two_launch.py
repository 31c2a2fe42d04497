from attention_tuner.kernel_templates.batch import Batch, BatchBucket
from attention_tuner.kernel_templates.gpu import TARGETS
from attention_tuner.kernel_templates.registry import why_invalid
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.template import Body
from attention_tuner.kernel_templates.triton_family.templates import TWO_LAUNCH, long_body, short_body
from attention_tuner.kernel_templates.variant import Variant

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
