"""The features of a layer, alone and together, against the oracle, through the interpreter."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from attention_tuner.kernel_templates.batch import Batch, BatchBucket
from attention_tuner.kernel_templates.errors import SpecError
from attention_tuner.kernel_templates.gpu import INTERPRETER
from attention_tuner.kernel_templates.heuristic import candidates, default_variant
from attention_tuner.kernel_templates.launch.device import present_gpu
from attention_tuner.kernel_templates.launch.launcher import Tensors, make_launcher
from attention_tuner.kernel_templates.oracle.inputs import make_tensors
from attention_tuner.kernel_templates.oracle.reference import paged_attention
from attention_tuner.kernel_templates.registry import templates, why_invalid
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.task import Task
from attention_tuner.kernel_templates.variant import Value, Variant
from attention_tuner.runtime.merge import merge
from attention_tuner.tuner.costs import interpreted_seconds
from attention_tuner.tuner.measure.check import Checker

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

FEATURES = st.fixed_dictionaries({
    "sliding_window": st.sampled_from((None, None, 1, 16, 23, 50, 2**40)),
    "logits_soft_cap": st.sampled_from((None, 5.0, 50.0)),
    "has_sinks": st.booleans(),
    "has_alibi": st.booleans(),
    "has_tree_mask": st.booleans(),
    "v_head_dim": st.sampled_from((None, None, 32, 40, 64)),
})  # fmt: skip
# Query heads, KV heads and their size.
HEADS = st.sampled_from((
    (32, 1, 32), (2, 1, 80), (17, 1, 32), (6, 2, 40), (4, 4, 56), (4, 2, 64), (4, 2, 32), (2, 1, 192),
))  # fmt: skip
# Of the output, the cache and the queries.
DTYPES = st.sampled_from((
    ("float16", "auto", "auto"), ("float16", "float8_e4m3fn", "auto"), ("bfloat16", "auto", "auto"),
    ("bfloat16", "float8_e5m2", "auto"), ("float32", "auto", "auto"), ("float16", "float8_e4m3fn", "float8_e5m2"),
    ("bfloat16", "float8_e4m3fn", "float8_e4m3fn"),
))  # fmt: skip
# Values are smaller than the largest keys.
SPECS = st.builds(
    lambda heads, dtypes, features: AttentionSpec(
        *heads, *dtypes[:2], **features | ({"v_head_dim": 128} if heads[2] == 192 else {}), q_dtype=dtypes[2]
    ),
    HEADS, DTYPES, FEATURES,
)  # fmt: skip
SHORT, LONG = (
    st.tuples(st.integers(*query_lens), st.integers(*context_lens))
    for query_lens, context_lens in (((0, 8), (0, 90)), ((9, 20), (0, 60)))
)
# As many query tokens as a tree has at most, or one more, are drawn more rarely.
SEQUENCES = st.one_of(SHORT, LONG, SHORT, LONG, SHORT, LONG, st.tuples(st.integers(33, 65), st.integers(0, 40)))
BATCHES = (
    st.lists(SEQUENCES, min_size=1, max_size=3)
    .filter(lambda sequences: any(query_len for query_len, _ in sequences))
    .map(lambda sequences: Batch(tuple(sequences)))
)
SHARED: dict[str, Value] = {"num_warps": 4, "num_stages": 2}
TEMPLATES = ("unified", "fused", "persistent", "two_launch")
# Of those of a template that it has. Waves, the dtype of partial results and what merges them go together.
VALUES = st.fixed_dictionaries({
    "page_size": st.sampled_from((16, 48, 528, 64, 544)),
    "block_m": st.sampled_from((16, 64)),
    "block_n": st.sampled_from((32, 64)),
    "num_segments": st.sampled_from((1, 4, 16)),
    "decode_block_m": st.sampled_from((16, 32, 64)),
    "decode_block_n": st.sampled_from((32, 64)),
    "kv_load": st.sampled_from(("pointer", "tma")),
    "order": st.sampled_from(("items", "heads")),
})  # fmt: skip
MERGING = st.sampled_from((
    {"waves": 0}, {"waves": 1}, {"waves": 1, "partials": "bfloat16", "reduction": "last_program"}, {"waves": 4},
    {"waves": 4, "partials": "bfloat16"}, {"waves": 4, "reduction": "last_program"},
))  # fmt: skip
# The interpreter runs many small launches in the time of a few large ones.
LONGEST_S = 0.15


def variant_of(template: str, page_size: int, **changes: Value) -> Variant:
    values: dict[str, Value] = SHARED | {
        "block_m": 32, "block_n": 32, "decode_block_m": 16, "decode_block_n": 32, "kv_load": "pointer",
        "order": "items", "waves": 4, "long_weight": 2, "schedule": "interleaved", "partials": "float32",
        "reduction": "kernel", "num_segments": 4, "decode_num_warps": 2, "programs_per_sm": 1,
    } | changes  # fmt: skip
    if template == "persistent":
        values["num_stages"] = 3
    names = {dimension.name for dimension in templates()[template].dimensions}
    return Variant.of(template, page_size, {name: value for name, value in values.items() if name in names})


def check(variant: Variant, spec: AttentionSpec, batch: Batch, seed: int = 0, tensors: Tensors | None = None) -> None:
    """Output and log-sum-exp are right."""
    tensors = tensors or make_tensors(spec, batch, variant.page_size, "cpu", seed)
    lse = torch.full((batch.num_tokens, spec.num_q_heads), torch.nan)
    tensors = dataclasses.replace(tensors, lse=lse)
    checker = Checker(spec, batch, variant.page_size, "cpu", tensors=tensors)
    found = checker.check(make_launcher(variant, spec, INTERPRETER))
    assert found.passed, f"{variant.key()} for {spec.key()} on {batch}: {found.detail}"
    _, expected = paged_attention(tensors, batch, spec, torch.float64)
    # The products of the oracle's float64 and of the dtypes differ in the last digits.
    assert torch.allclose(lse.double(), expected, rtol=1e-4, atol=2e-2), f"{variant.key()} for {spec.key()} on {batch}"


@pytest.mark.parametrize("template", TEMPLATES)
@given(SPECS, BATCHES, VALUES, MERGING, st.integers(0, 99))
@settings(deadline=None, max_examples=8, derandomize=True,
          suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])  # fmt: skip
def test_any_combination_is_right(
    template: str, spec: AttentionSpec, batch: Batch, values: dict[str, Any], merging: dict[str, Any], seed: int
):
    assume(template != "persistent" or merging["waves"])
    variant = variant_of(template, **values, **merging)
    if values["kv_load"] == "tma" and why_invalid(variant, spec, INTERPRETER):
        # Rather through pointers than not at all.
        variant = variant_of(template, **values | {"kv_load": "pointer"}, **merging)
    assume(why_invalid(variant, spec, INTERPRETER) is None)
    assume(interpreted_seconds(Task(spec, batch, variant.page_size), variant) < LONGEST_S)
    check(variant, spec, batch, seed)


@pytest.mark.parametrize(("template", "q_dtype"), [
    ("unified", "auto"), ("fused", "float8_e4m3fn"), ("persistent", "float8_e5m2"), ("two_launch", "auto"),
])  # fmt: skip
def test_all_features_at_once_are_right(template: str, q_dtype: str):
    spec = AttentionSpec(4, 2, 40, "bfloat16", "float8_e4m3fn", 37, 20.0, True, True, v_head_dim=32, has_tree_mask=True,
                         q_dtype=q_dtype)
    variant = variant_of(template, 48)
    if template == "unified":
        variant = Variant.of("unified", 48, SHARED | {"block_m": 16, "block_n": 16, "num_segments": 4})
    check(variant, spec, Batch.parse("1x20@90,1x7@40,1x0@50,2x1@70,1x5@0"))


@pytest.mark.parametrize("template", TEMPLATES)
def test_parts_of_the_keys_that_all_query_tokens_see_merge_to_the_whole(template: str):
    """Of one query token any part does, of up to 64 one of the context with words of no own tokens."""
    spec, whole, first = AttentionSpec(4, 2, 32, "float16", has_sinks=True), Batch.parse("1x1@99,1x9@80"), 64
    tensors = make_tensors(spec, whole, 16, "cpu", 3, lse=True)
    expected, expected_lse = paged_attention(tensors, whole, spec, torch.float64)
    # A single token is the last of its part; of several, the part has room for them, which they do not see.
    context = Batch(((1, first - 1), (9, first)))
    rest = Batch(tuple((query_len, context_len - first) for query_len, context_len in whole.sequences))
    parts: list[Tensors] = []
    for batch, begin, changes in ((context, 0, {"has_tree_mask": True}), (rest, first, {"has_sinks": False})):
        layer = dataclasses.replace(spec, **changes)
        part = dataclasses.replace(
            tensors, block_table=tensors.block_table[:, begin // 16 :].contiguous(),
            sinks=tensors.sinks if layer.has_sinks else None,
            tree_mask=torch.zeros(whole.num_tokens, dtype=torch.int64) if layer.has_tree_mask else None,
            out=torch.empty_like(tensors.out), lse=torch.full(expected_lse.shape, torch.nan),
        )  # fmt: skip
        launcher = make_launcher(variant_of(template, 16), layer, INTERPRETER)
        launcher.plan(batch, "cpu")
        launcher.run(part)
        parts.append(part)
    a, b = parts
    assert a.lse is not None
    assert b.lse is not None
    out, lse = merge(a.out, a.lse, b.out, b.lse)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=4e-3)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-3)


def test_segments_are_cut_inside_the_window():
    spec = AttentionSpec(4, 2, 32, "float16", sliding_window=64, has_sinks=True)
    variant = Variant.of("unified", 16, SHARED | {"block_m": 16, "block_n": 16, "num_segments": 4})
    launcher = make_launcher(variant, spec, INTERPRETER)
    launcher.plan(Batch.parse("1x1@1000"), "cpu")
    # Of 65 keys, the first 15 of a key tile of 16 and the last: five key tiles in three items.
    items = launcher._work.items[:3].tolist()  # pyright: ignore
    assert sorted((start, stop) for *_, start, stop, _, _ in items) == [(928, 960), (960, 992), (992, 1001)]
    check(variant, spec, Batch.parse("1x1@1000,1x12@200"))


@pytest.mark.parametrize(("page_size", "load"), [(16, "pointer"), (64, "tma"), (64, "pointer")])
def test_what_every_window_has_left_behind_need_not_be_in_the_cache(page_size: int, load: str):
    spec, batch = AttentionSpec(4, 2, 32, "float16", sliding_window=30), Batch.parse("1x12@200,1x1@150")
    variant = variant_of("fused", page_size, kv_load=load)
    checker = Checker(spec, batch, page_size, "cpu")
    tensors = checker.tensors
    for sequence, (_, context_len) in enumerate(batch.sequences):
        first = context_len + 1 - 30
        page, slot = divmod(first, page_size)
        for cache in (tensors.k_cache, tensors.v_cache):
            cache[tensors.block_table[sequence, page], :slot] = torch.nan
        # Physical page 0 is NaN.
        tensors.block_table[sequence, :page] = 0
    found = checker.check(make_launcher(variant, spec, INTERPRETER))
    assert found.passed, found.detail


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_soft_cap_holds_for_scores_of_ten_thousand(dtype: str):
    spec, batch = AttentionSpec(4, 2, 32, dtype, logits_soft_cap=50.0, scale=1.0), Batch.parse("1x9@60,1x1@40")
    tensors = Checker(spec, batch, 16, "cpu").tensors
    for cache in (tensors.k_cache, tensors.v_cache):
        cache.nan_to_num_(0)
        cache.normal_(generator=torch.Generator().manual_seed(0))
    tensors.q.normal_(generator=torch.Generator().manual_seed(1)).mul_(300)
    tensors.k_cache.mul_(6)
    scores = torch.einsum("ihd,pshd->ihps", tensors.q[:, ::2].double(), tensors.k_cache.double())
    assert scores.abs().max() > 1e4
    launcher = make_launcher(variant_of("fused", 16, block_n=16), spec, INTERPRETER)
    launcher.plan(batch, "cpu")
    launcher.run(tensors)
    oracle, _ = paged_attention(tensors, batch, spec, torch.float64)
    assert torch.allclose(tensors.out.double(), oracle, atol=5e-3)


# Products are in float16 for the first and the third.
OF_SMALL_WEIGHTS = [("float16", "auto"), ("bfloat16", "auto"), ("bfloat16", "float8_e4m3fn")]
# Float16 has no smaller outputs, nor probabilities beside a key.
OUTWEIGHED = [(dtypes, by, 18.0) for dtypes in OF_SMALL_WEIGHTS for by in ("sink", "key")] + [
    (dtypes, "sink", 26.0) for dtypes in OF_SMALL_WEIGHTS[1:]
]


@pytest.mark.parametrize(("dtypes", "outweighed_by", "score"), OUTWEIGHED, ids=str)
def test_many_keys_count_beside_what_outweighs_each(dtypes: tuple[str, str], outweighed_by: str, score: float):
    spec, batch = AttentionSpec(2, 1, 32, *dtypes, has_sinks=True, scale=1.0), Batch.parse("1x1@300,1x9@150")
    tensors = Checker(spec, batch, 16, "cpu").tensors
    assert tensors.sinks is not None
    # All scores are 0, and all values 1.
    tensors.q.fill_(0.25)
    tensors.k_cache.fill_(0)
    tensors.v_cache.fill_(1)
    if tensors.k_scale is not None and tensors.v_scale is not None:
        tensors.k_scale.fill_(1)
        tensors.v_scale.fill_(1)
    tensors.sinks.fill_(score if outweighed_by == "sink" else -torch.inf)
    if outweighed_by == "key":
        for pages in tensors.block_table[:, 0]:
            tensors.k_cache[pages, 3] = score / 8
            tensors.v_cache[pages, 3] = 0
    for waves in (0, 4):
        launcher = make_launcher(variant_of("fused", 16, block_n=16, waves=waves), spec, INTERPRETER)
        launcher.plan(batch, "cpu")
        launcher.run(tensors)
        oracle, _ = paged_attention(tensors, batch, spec, torch.float64)
        assert 1e-10 < oracle.min() < oracle.max() < 1e-5
        assert torch.allclose(tensors.out.double(), oracle, rtol=2e-2)


@pytest.mark.parametrize("unmasked", [False, True])
def test_scores_that_float32_holds_to_the_next_8_overflow_no_probability(unmasked: bool):
    spec, batch = AttentionSpec(2, 1, 32, "float16", scale=1.0), Batch.parse("1x1@63" if unmasked else "1x9@40")
    tensors = Checker(spec, batch, 16, "cpu").tensors
    draw = torch.Generator().manual_seed(0)
    tensors.v_cache.normal_(generator=draw)
    tensors.q.fill_(0)
    tensors.k_cache.fill_(0)
    # One product each, so that all scores are the same number.
    tensors.k_cache[..., 0] = 8192.0
    for size in range(8200, 8300, 24):
        tensors.q[..., 0] = size
        launcher = make_launcher(variant_of("fused", 16, block_n=16), spec, INTERPRETER)
        launcher.plan(batch, "cpu")
        launcher.run(tensors)
        oracle, _ = paged_attention(tensors, batch, spec, torch.float64)
        assert torch.allclose(tensors.out.double(), oracle, atol=5e-3)


@pytest.mark.parametrize(("features", "q_dtype", "dtype"), [
    ({}, "float8_e4m3fn", "bfloat16"), ({"sliding_window": 23}, "float8_e5m2", "float16"),
    ({"has_sinks": True}, "float8_e4m3fn", "float16"), ({"logits_soft_cap": 20.0}, "float8_e5m2", "bfloat16"),
], ids=str)  # fmt: skip
def test_queries_in_8_bits_are_right(features: dict[str, Any], q_dtype: str, dtype: str):
    spec = AttentionSpec(4, 2, 32, dtype, "float8_e5m2", **features, q_dtype=q_dtype)
    for waves in (0, 4):
        check(variant_of("fused", 16, block_n=16, waves=waves), spec, Batch.parse("1x12@70,2x1@130,1x0@9"))


@pytest.mark.parametrize("soft_cap", [None, 30.0])
@pytest.mark.parametrize("q_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_products_of_the_largest_numbers_in_8_bits_overflow_nothing(q_dtype: str, soft_cap: float | None):
    spec = AttentionSpec(4, 2, 256, kv_dtype="float8_e5m2", logits_soft_cap=soft_cap, q_dtype=q_dtype)
    batch = Batch.parse("1x9@60,1x1@40")
    tensors = make_tensors(spec, batch, 16, "cpu", 0)
    assert tensors.q_scale is not None
    # All elements are the largest there are, of either sign; the scales make scores of some tens of their products.
    largest = [torch.finfo(t.dtype).max for t in (tensors.q, tensors.k_cache)]
    for tensor, size in zip((tensors.q, tensors.k_cache), largest, strict=True):
        tensor.copy_(size * tensor.float().nan_to_num().sign())
    tensors.q_scale.div_(largest[0] * largest[1])
    oracle, _ = paged_attention(tensors, batch, spec, torch.float64)
    assert bool(oracle.isfinite().all())
    check(variant_of("fused", 16, block_n=16), spec, batch, tensors=tensors)


@pytest.mark.parametrize("soft_cap", [None, 30.0])
@pytest.mark.parametrize("row", [torch.inf, torch.nan, 1e30])
def test_no_row_makes_another_of_its_tile_wrong(row: float, soft_cap: float | None):
    spec = AttentionSpec(4, 2, 32, kv_dtype="float8_e4m3fn", logits_soft_cap=soft_cap)
    batch = Batch.parse("1x12@70")
    checker = Checker(spec, batch, 16, "cpu")
    checker.tensors.q[5, 1, 7] = row
    launcher = make_launcher(variant_of("fused", 16, block_n=16), spec, INTERPRETER)
    launcher.plan(batch, "cpu")
    launcher.run(checker.tensors)
    out = checker.tensors.out
    if row != 1e30 and soft_cap is None:
        assert bool(out[5, 1].isnan().all())
    out[5, 1] = checker.oracle[5, 1].to(out)
    found = checker.judge(out)
    assert found.passed, found.detail


@pytest.mark.parametrize("template", ["unified", "fused"])
@pytest.mark.parametrize("dtypes", OF_SMALL_WEIGHTS, ids=str)
def test_sinks_are_right_beside_few_and_many_keys(dtypes: tuple[str, str], template: str):
    spec = AttentionSpec(2, 1, 32, *dtypes, has_sinks=True)
    variant = variant_of(template, 32)
    if template == "unified":
        variant = Variant.of("unified", 32, SHARED | {"block_m": 16, "block_n": 16, "num_segments": 4})
    check(variant, spec, Batch.parse("1x3@1000,1x12@40,1x1@3"))


def test_a_tree_that_hides_everything_gives_zeros_and_an_infinite_lse():
    spec, batch = AttentionSpec(4, 2, 32, "float16", has_tree_mask=True), Batch.parse("1x5@0,1x3@9,1x1@0")
    for template, waves in (("fused", 0), ("fused", 8)):
        checker = Checker(spec, batch, 16, "cpu")
        mask = checker.tensors.tree_mask
        assert mask is not None
        mask[2] = 0
        check(variant_of(template, 16, waves=waves, block_n=16), spec, batch, tensors=checker.tensors)
        assert not checker.tensors.out[2].any()


@pytest.mark.parametrize(("window", "waves"), [(None, 8), (8, 0)])
def test_the_words_alone_say_which_tokens_see_each_other(window: int | None, waves: int):
    spec = AttentionSpec(2, 1, 32, "float16", sliding_window=window, has_sinks=True, has_tree_mask=True)
    batch = Batch.parse("1x20@9,1x5@30,1x1@7,1x64@50,1x65@3")
    tensors = Checker(spec, batch, 16, "cpu").tensors
    assert tensors.tree_mask is not None
    # Later ones too, and tokens that no sequence has.
    tensors.tree_mask.random_(-(2**63), None, generator=torch.Generator().manual_seed(0))
    check(variant_of("fused", 16, block_m=16, block_n=16, waves=waves), spec, batch, tensors=tensors)


@pytest.mark.parametrize("num_tokens", [64, 65])
def test_only_sequences_of_up_to_64_tokens_heed_their_words(num_tokens: int):
    spec = AttentionSpec(2, 2, 32, "float16", has_tree_mask=True)
    check(variant_of("fused", 16, block_n=32, block_m=32), spec, Batch.parse(f"1x{num_tokens}@20"))


@pytest.mark.parametrize(("heads", "page_size"), [((128, 1), 2048), ((71, 1), 1056), ((3, 3), 16)])
def test_groups_of_1_to_128_and_pages_of_up_to_2048_are_right(heads: tuple[int, int], page_size: int):
    spec = AttentionSpec(*heads, 32, "float16", has_sinks=True)
    check(variant_of("fused", page_size, block_m=64), spec, Batch.parse("1x2@40,1x9@30,1x0@0"))


def test_a_batch_may_have_sequences_without_query_tokens():
    spec = AttentionSpec(4, 2, 32, "float16")
    for template in ("fused", "persistent", "two_launch"):
        check(variant_of(template, 16, waves=1), spec, Batch.parse("2x0@70,1x1@40,1x0@0,1x12@30,1x0@9"))


@pytest.mark.parametrize(("field", "values"), [
    ("sinks", {"has_sinks": True}), ("alibi_slopes", {"has_alibi": True}), ("tree_mask", {"has_tree_mask": True}),
    ("v_scale", {"kv_dtype": "float8_e5m2"}), ("q_scale", {"kv_dtype": "float8_e5m2", "q_dtype": "float8_e5m2"}),
])  # fmt: skip
def test_a_tensor_that_the_layer_needs_and_lacks_is_named(field: str, values: dict[str, bool | str]):
    spec, batch = AttentionSpec(4, 2, 32, **values), Batch.parse("1x1@9")  # pyright: ignore
    tensors = dataclasses.replace(Checker(spec, batch, 16, "cpu").tensors, **{field: None})
    launcher = make_launcher(variant_of("fused", 16, block_n=16), spec, INTERPRETER)
    launcher.plan(batch, "cpu")
    with pytest.raises(SpecError, match=f"needs the tensor '{field}'"):
        launcher.run(tensors)


@pytest.mark.parametrize("wrong", [torch.ones(1).expand(2), torch.ones(2, dtype=torch.bfloat16), torch.ones(4)[::2]])
def test_a_tensor_that_is_no_row_of_its_dtype_is_refused(wrong: torch.Tensor):
    spec, batch = AttentionSpec(4, 2, 32, kv_dtype="float8_e5m2"), Batch.parse("1x1@9")
    tensors = dataclasses.replace(Checker(spec, batch, 16, "cpu").tensors, k_scale=wrong)
    launcher = make_launcher(variant_of("fused", 16, block_n=16), spec, INTERPRETER)
    launcher.plan(batch, "cpu")
    with pytest.raises(SpecError, match=r"k_scale must be \[2\] in torch\.float32 on cpu with a contiguous last"):
        launcher.run(tensors)


# Beside those above: sizes that models have, and one of each width that is padded.
HEAD_SIZES = [(80, None), (96, None), (112, None), (192, None), (192, 128), (512, None), (320, 264)]


@pytest.mark.parametrize("template", ["unified", "fused"])
@pytest.mark.parametrize("sizes", HEAD_SIZES, ids=str)
def test_all_head_sizes_are_right(sizes: tuple[int, int | None], template: str):
    head_dim, v_head_dim = sizes
    variant = variant_of(template, 32, kv_load="tma", reduction="last_program", block_m=16)
    if template == "unified":
        variant = Variant.of("unified", 16, SHARED | {"block_m": 16, "block_n": 32, "num_segments": 2})
    check(variant, AttentionSpec(2, 1, head_dim, "float16", v_head_dim=v_head_dim), Batch.parse("1x9@50,1x3@90"))


@pytest.mark.parametrize("template", ["persistent", "two_launch"])
def test_the_largest_heads_with_features_are_right(template: str):
    spec = AttentionSpec(2, 1, 512, "bfloat16", "float8_e5m2", 20, 30.0, True, True, v_head_dim=504, has_tree_mask=True)
    check(variant_of(template, 32), spec, Batch.parse("1x9@30,1x3@40"))


GPU_LAYERS = [
    AttentionSpec(32, 16, 256, sliding_window=4096, logits_soft_cap=50.0),
    AttentionSpec(64, 8, 64, sliding_window=128, has_sinks=True),
    AttentionSpec(32, 8, 128, kv_dtype="float8_e4m3fn"),
    AttentionSpec(64, 8, 64, kv_dtype="float8_e4m3fn", has_sinks=True),
    AttentionSpec(64, 8, 64, "float16", has_sinks=True),
    AttentionSpec(8, 8, 80, "float16", kv_dtype="float8_e5m2", has_alibi=True),
    AttentionSpec(32, 8, 128, kv_dtype="float8_e4m3fn", q_dtype="float8_e4m3fn"),
    AttentionSpec(64, 8, 64, "float16", "float8_e5m2", 128, has_sinks=True, q_dtype="float8_e5m2"),
    AttentionSpec(16, 16, 192, v_head_dim=128, has_tree_mask=True),
    AttentionSpec(71, 1, 96, has_sinks=True, has_alibi=True, has_tree_mask=True, sliding_window=1000),
    AttentionSpec(128, 1, 64, logits_soft_cap=30.0),
    AttentionSpec(4, 2, 64, "float32", has_sinks=True),
    AttentionSpec(4, 2, 256, "float32", sliding_window=500),
    AttentionSpec(32, 4, 512, scale=1.0),
    AttentionSpec(8, 2, 512, "float16", "float8_e4m3fn", has_sinks=True, logits_soft_cap=50.0, has_tree_mask=True),
    AttentionSpec(8, 2, 320, v_head_dim=512, sliding_window=1000),
    AttentionSpec(8, 1, 264, "float16", has_alibi=True),
    AttentionSpec(4, 2, 512, "float32"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 128, 1056])
@pytest.mark.parametrize("spec", GPU_LAYERS, ids=lambda spec: spec.key())
def test_on_a_gpu(spec: AttentionSpec, page_size: int):
    gpu = present_gpu()
    assert gpu is not None
    batch = Batch.parse("1x512@3000,7x1@2047,1x0@50,1x1@20000,3x6@700,1x60@900,1x100@0")
    tensors = make_tensors(spec, batch, page_size, "cuda", 0, packed=page_size == 128, lse=True)
    checker = Checker(spec, batch, page_size, "cuda", tensors=tensors)
    plain = default_variant(spec, batch, page_size)
    found = candidates(spec, BatchBucket.of(batch), page_size, gpu)
    warps = {"num_warps": 8, "block_m": 16, "block_n": 16, "decode_block_n": 16} if spec.dtype == "float32" else {}
    if warps and spec.head_dim > 256:
        warps["num_stages"] = 1
    tried = [plain, plain.replace(num_segments=16), *found] + [
        variant_of(template, page_size, **({"kv_load": load, "reduction": "last_program"} | warps))
        for template in ("fused", "persistent") for load in ("pointer", "tma")
    ]  # fmt: skip
    valid = [variant for variant in tried if why_invalid(variant, spec, gpu) is None]
    assert len(valid) >= 4
    for variant in valid:
        verdict = checker.check(make_launcher(variant, spec, gpu))
        assert verdict.passed, f"{variant.key()}: {verdict.detail}"
