import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_tuner.kernel_templates.errors import SpecError
from attention_tuner.kernel_templates.spec import DTYPES, HEAD_DIMS, AttentionSpec

SPECS = st.builds(
    lambda kv, group, dim, dtype, scale: AttentionSpec(kv * group, kv, dim, dtype, scale=scale),
    st.integers(1, 16), st.integers(1, 128), st.sampled_from(HEAD_DIMS), st.sampled_from(DTYPES),
    st.none() | st.floats(1e-3, 1e3),
)  # fmt: skip


@given(SPECS)
def test_parse_reads_what_key_wrote(spec: AttentionSpec):
    assert AttentionSpec.parse(spec.key()) == spec


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_kv_heads": 3}, "32 query heads are not divisible by 3"),
        ({"num_q_heads": 0}, "at least 1"),
        ({"head_dim": 80}, "head size of 80"),
        ({"dtype": "float32"}, "'float32'"),
        ({"kv_dtype": "fp8_e4m3"}, "'fp8_e4m3'"),
        ({"sliding_window": 4096}, "sliding window"),
        ({"logits_soft_cap": 50.0}, "soft cap"),
        ({"has_sinks": True}, "sinks"),
        ({"has_alibi": True}, "ALiBi"),
        ({"scale": 0.0}, "softmax scale"),
    ],
)
def test_what_cannot_be_is_refused_by_name(changes: dict[str, object], named: str):
    values = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128} | changes
    with pytest.raises(SpecError, match=named):
        AttentionSpec(**values)


@pytest.mark.parametrize("text", ["", "x", "num_q_heads=32", "num_q_heads=a,num_kv_heads=8,head_dim=128", "depth=3"])
def test_text_that_names_no_layer_is_refused(text: str):
    with pytest.raises(SpecError, match="does not name an attention layer"):
        AttentionSpec.parse(text)


def test_the_scale_is_that_of_the_head_size_unless_given():
    assert AttentionSpec(4, 2, 64).softmax_scale == 0.125
    assert AttentionSpec(4, 2, 64, scale=0.5).softmax_scale == 0.5
