from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_tuner.kernel_templates.errors import SpecError
from attention_tuner.kernel_templates.spec import (
    DTYPES,
    FP8_DTYPES,
    HALF_DTYPES,
    HEAD_DIMS,
    MAX_FLOAT32_SOFT_CAP,
    MAX_SOFT_CAP,
    MIN_SOFT_CAP,
    AttentionSpec,
)

CACHES = st.sampled_from(
    [(dtype, "auto", "auto") for dtype in DTYPES]
    + [(dtype, kv, q) for dtype in HALF_DTYPES for kv in FP8_DTYPES for q in ("auto", *FP8_DTYPES)]
)
SPECS = st.builds(
    lambda kv, group, dim, dtypes, logits_soft_cap, **features: AttentionSpec(
        kv * group, kv, dim, *dtypes[:2], q_dtype=dtypes[2], logits_soft_cap=logits_soft_cap and min(
            logits_soft_cap, MAX_FLOAT32_SOFT_CAP if dtypes[0] == "float32" else MAX_SOFT_CAP), **features),
    st.integers(1, 16), st.integers(1, 128), st.sampled_from(HEAD_DIMS), CACHES,
    scale=st.none() | st.floats(1e-3, 1e3),
    sliding_window=st.none() | st.integers(1, 2**20),
    logits_soft_cap=st.none() | st.floats(MIN_SOFT_CAP, MAX_SOFT_CAP),
    has_sinks=st.booleans(), has_alibi=st.booleans(), has_tree_mask=st.booleans(),
    v_head_dim=st.none() | st.sampled_from(HEAD_DIMS),
)  # fmt: skip
VALUES = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}


@given(SPECS)
def test_parse_reads_what_key_wrote(spec: AttentionSpec):
    assert AttentionSpec.parse(spec.key()) == spec


@given(SPECS, SPECS)
def test_one_key_is_one_layer(a: AttentionSpec, b: AttentionSpec):
    assert (a.key() == b.key()) == (a == b)


def test_a_key_leaves_out_what_is_at_its_default():
    assert AttentionSpec(**VALUES).key() == "num_q_heads=32,num_kv_heads=8,head_dim=128,dtype=bfloat16"
    spec = AttentionSpec(8, 2, 192, "float16", "float8_e5m2", 128, 50.0, True, True, 0.5, 128, True, "float8_e4m3fn")
    assert spec.key() == (
        "num_q_heads=8,num_kv_heads=2,head_dim=192,dtype=float16,kv_dtype=float8_e5m2,sliding_window=128,"
        "logits_soft_cap=50.0,has_sinks=True,has_alibi=True,scale=0.5,v_head_dim=128,has_tree_mask=True,"
        "q_dtype=float8_e4m3fn"
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_kv_heads": 3}, "32 query heads are not divisible by 3"),
        ({"num_q_heads": 0}, "at least 1"),
        ({"head_dim": 84}, "head size of 84"),
        ({"head_dim": 24}, "head size of 24"),
        ({"head_dim": 520}, r"a head size of 520 \(supported: multiples of 8 from 32 to 512\)"),
        ({"v_head_dim": 576}, "value head size of 576"),
        ({"v_head_dim": 0}, "value head size of 0"),
        ({"dtype": "float64"}, "'float64'"),
        ({"kv_dtype": "fp8_e4m3"}, "'fp8_e4m3'"),
        ({"kv_dtype": "float16"}, "'float16' beside 'bfloat16'"),
        ({"dtype": "float32", "kv_dtype": "float8_e4m3fn"}, "'float8_e4m3fn' beside 'float32'"),
        ({"q_dtype": "fp8"}, "queries in 'fp8' beside a cache in 'bfloat16'"),
        ({"q_dtype": "float8_e4m3fn"}, "queries in 'float8_e4m3fn' beside a cache in 'bfloat16' .supported: auto"),
        ({"q_dtype": "float16", "kv_dtype": "float8_e5m2"}, "'float16' beside a cache in 'float8_e5m2'"),
        ({"dtype": "float32", "q_dtype": "float8_e5m2"}, "'float8_e5m2' beside a cache in 'float32'"),
        ({"sliding_window": 0}, "sliding window must be at least 1, not 0"),
        ({"logits_soft_cap": 0.0}, "soft cap must be from"),
        ({"logits_soft_cap": float("nan")}, "soft cap must be from"),
        ({"logits_soft_cap": float("inf")}, "soft cap must be from"),
        ({"scale": 0.0}, "softmax scale"),
    ],
)
def test_what_cannot_be_is_refused_by_name(changes: dict[str, Any], named: str):
    with pytest.raises(SpecError, match=named):
        AttentionSpec(**VALUES | changes)


@pytest.mark.parametrize("text", ["", "x", "num_q_heads=32", "num_q_heads=a,num_kv_heads=8,head_dim=128", "depth=3",
                                  "num_q_heads=4,num_kv_heads=2,head_dim=64,has_sinks=1"])
def test_text_that_names_no_layer_is_refused(text: str):
    with pytest.raises(SpecError, match="does not name an attention layer"):
        AttentionSpec.parse(text)


def test_the_scale_is_that_of_the_head_size_unless_given():
    assert AttentionSpec(4, 2, 64).softmax_scale == 0.125
    assert AttentionSpec(4, 2, 64, scale=0.5).softmax_scale == 0.5


def test_values_are_as_long_as_keys_unless_said():
    assert AttentionSpec(4, 2, 192).value_dim == 192
    assert AttentionSpec(4, 2, 192, v_head_dim=128).value_dim == 128


def test_saying_the_default_is_the_same_layer():
    said = AttentionSpec(4, 2, 64, kv_dtype="bfloat16", v_head_dim=64, q_dtype="bfloat16")
    assert said == AttentionSpec(4, 2, 64)
    assert AttentionSpec.parse(AttentionSpec(4, 2, 64).key() + ",v_head_dim=64").key() == AttentionSpec(4, 2, 64).key()


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "cache_dtype", "sizes"),
    [
        ("bfloat16", "auto", "bfloat16", (2, 2)),
        ("float16", "float8_e5m2", "float8_e5m2", (2, 1)),
        ("bfloat16", "float8_e4m3fn", "float8_e4m3fn", (2, 1)),
        ("float32", "auto", "float32", (4, 4)),
    ],
)
def test_sizes_are_those_of_the_dtypes(dtype: str, kv_dtype: str, cache_dtype: str, sizes: tuple[int, int]):
    spec = AttentionSpec(4, 2, 64, dtype, kv_dtype)
    assert (spec.element_bytes, spec.kv_element_bytes) == sizes
    assert spec.cache_dtype == cache_dtype
    assert spec.has_fp8_cache == (kv_dtype != "auto")
    assert (spec.query_dtype, spec.q_element_bytes, spec.has_fp8_queries) == (dtype, spec.element_bytes, False)


def test_queries_may_be_in_8_bits_where_the_output_is_not():
    spec = AttentionSpec(4, 2, 64, "float16", "float8_e5m2", q_dtype="float8_e4m3fn")
    assert (spec.query_dtype, spec.cache_dtype, spec.dtype) == ("float8_e4m3fn", "float8_e5m2", "float16")
    assert (spec.q_element_bytes, spec.kv_element_bytes, spec.element_bytes) == (1, 1, 2)
    assert spec.has_fp8_queries


def test_a_soft_cap_is_small_enough_for_the_digits_of_the_dtype():
    assert AttentionSpec(**VALUES, logits_soft_cap=MAX_SOFT_CAP).logits_soft_cap == MAX_SOFT_CAP
    with pytest.raises(SpecError, match=r"the logits soft cap must be from 0\.001 to 50 for float32, not 50\.5"):
        AttentionSpec(**VALUES, dtype="float32", logits_soft_cap=50.5)
