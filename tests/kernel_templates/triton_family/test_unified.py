from attention_tuner.kernel_templates.template import Body
from attention_tuner.kernel_templates.triton_family.templates import UNIFIED, unified_body
from attention_tuner.kernel_templates.variant import Variant


def test_one_body_serves_all_rows():
    first = {dimension.name: dimension.choices[0] for dimension in UNIFIED.dimensions}
    assert unified_body(Variant.of("unified", 16, first)) == (Body(16, 16),)


def test_only_the_segments_share_code():
    assert [d.name for d in UNIFIED.dimensions if not d.changes_code] == ["num_segments"]
