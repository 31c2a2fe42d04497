import pytest

from attention_tuner.kernel_templates.gpu import TARGETS
from attention_tuner.kernel_templates.registry import why_invalid
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.triton_family.templates import FUSED, PERSISTENT
from attention_tuner.kernel_templates.variant import Variant


def test_it_has_the_dimensions_of_fused_and_the_programs():
    fused = {dimension.name for dimension in FUSED.dimensions}
    assert {dimension.name for dimension in PERSISTENT.dimensions} == fused | {"programs_per_sm"}
    choices = {dimension.name: dimension.choices for dimension in FUSED.dimensions}
    for dimension in PERSISTENT.dimensions:
        assert dimension.name not in choices or set(dimension.choices) <= set(choices[dimension.name])


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
