from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.launch.launcher import Tensors
from attention_tuner.kernel_templates.oracle import reference
from attention_tuner.kernel_templates.oracle.inputs import make_tensors
from attention_tuner.kernel_templates.oracle.reference import Features, attention, dequantized, gather, paged_attention
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.runtime.merge import merge

FEATURES = st.fixed_dictionaries({
    "window": st.none() | st.integers(1, 60),
    "soft_cap": st.none() | st.sampled_from([0.5, 5.0]),
    "sinks": st.booleans(),
    "slopes": st.booleans(),
    "tree": st.booleans(),
})
SIZES = st.tuples(st.integers(1, 20), st.integers(0, 40), st.integers(1, 3), st.sampled_from([1, 2, 7]))


def inputs(query_len: int, context_len: int, kv_heads: int, group: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    kv_len = query_len + context_len
    shapes = ((query_len, kv_heads * group, 16), (kv_len, kv_heads, 16), (kv_len, kv_heads, 16))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context_len: int, scale: float) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))
    mask = torch.ones(q.shape[0], k.shape[1], dtype=torch.bool).tril(context_len)
    out = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=mask, scale=scale)
    return out.transpose(0, 1)


def torch_lse(q: torch.Tensor, k: torch.Tensor, context_len: int, scale: float) -> torch.Tensor:
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("ihd,jhd->ihj", q, k) * scale
    hidden = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).triu(context_len + 1)
    return torch.logsumexp(scores.masked_fill(hidden[:, None], -torch.inf), dim=-1)


@settings(deadline=None, max_examples=60)
@given(SIZES, st.sampled_from([0.05, 0.25, 1.0]), st.sampled_from([30, 400, reference.MAX_SCORES]))
def test_attention_is_torchs_in_blocks_of_any_size(sizes: tuple[int, int, int, int], scale: float, limit: int) -> None:
    q, k, v = inputs(*sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "MAX_SCORES", limit)
        out, lse = attention(q, k, v, sizes[1], scale)
    torch.testing.assert_close(out, torch_attention(q, k, v, sizes[1], scale), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, torch_lse(q, k, sizes[1], scale), rtol=1e-12, atol=1e-12)


def drawn(query_len: int, num_q_heads: int, wanted: dict[str, Any]) -> Features:
    """Features with random numbers where `wanted` is true; any word, whatever it shows."""
    generator = torch.Generator().manual_seed(1)
    sinks, slopes = torch.randn(2, num_q_heads, generator=generator, dtype=torch.float64)
    words = torch.randint(-(2**63), 2**63 - 1, (query_len,), generator=generator)
    return Features(wanted["window"], wanted["soft_cap"], sinks if wanted["sinks"] else None,
                    slopes / 4 if wanted["slopes"] else None, words if wanted["tree"] else None)


def one_row(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row: int, head: int, context_len: int, features: Features
) -> tuple[torch.Tensor, float]:
    """The output and log-sum-exp of one row and head, key by key as the formulas are written, with a scale of 0.25."""
    kv_head, position = head // (q.shape[1] // k.shape[1]), context_len + row
    exponentials, weighted = 0.0, torch.zeros(v.shape[-1], dtype=v.dtype)
    for key in range(len(k)):
        seen = key <= position and (features.window is None or position - features.window < key)
        if features.tree is not None and key >= context_len:
            seen = bool(int(features.tree[row]) >> (key - context_len) & 1)
        score = 0.25 * float(q[row, head] @ k[key, kv_head])
        if features.soft_cap is not None:
            score = features.soft_cap * math.tanh(score / features.soft_cap)
        if features.slopes is not None:
            score += float(features.slopes[head]) * (key - position)
        exponentials += math.exp(score) * seen
        weighted += math.exp(score) * seen * v[key, kv_head]
    if features.sinks is not None:
        exponentials += math.exp(float(features.sinks[head]))
    return weighted / (exponentials or 1.0), math.log(exponentials) if exponentials else -math.inf


@settings(deadline=None, max_examples=80)
@given(SIZES, FEATURES, st.sampled_from([30, 400, reference.MAX_SCORES]), st.sampled_from([8, 24]))
def test_every_feature_is_what_its_formula_says(
    sizes: tuple[int, int, int, int], wanted: dict[str, Any], limit: int, value_dim: int
) -> None:
    q, k, v = inputs(*sizes)
    v = torch.cat([v, -v], dim=-1)[..., :value_dim]
    features = drawn(sizes[0], q.shape[1], wanted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "MAX_SCORES", limit)
        out, lse = attention(q, k, v, sizes[1], 0.25, features)
    assert out.shape == (*q.shape[:2], value_dim)
    for row, head in {(0, 0), (sizes[0] // 2, q.shape[1] // 2), (sizes[0] - 1, q.shape[1] - 1)}:
        expected, expected_lse = one_row(q, k, v, row, head, sizes[1], features)
        torch.testing.assert_close(out[row, head], expected, rtol=1e-9, atol=1e-9)
        assert float(lse[row, head]) == pytest.approx(expected_lse, abs=1e-9)


@settings(deadline=None, max_examples=40)
@given(SIZES, st.floats(0, 1), st.booleans())
def test_attention_over_two_parts_of_the_context_merges_to_the_whole(
    sizes: tuple[int, int, int, int], cut: float, sink_first: bool
) -> None:
    q, k, v = inputs(*sizes)
    sinks = torch.linspace(-1, 2, q.shape[1], dtype=torch.float64)
    first = round(cut * sizes[1])
    # To a part of the context alone, every query token is past its end: as a word of no own tokens says.
    unseen = torch.zeros(sizes[0], dtype=torch.int64)
    context = attention(q, k[: first + sizes[0]], v[: first + sizes[0]], first, 0.25,
                        Features(sinks=sinks if sink_first else None, tree=unseen))
    rest = attention(q, k[first:], v[first:], sizes[1] - first, 0.25, Features(sinks=None if sink_first else sinks))
    out, lse = merge(*context, *rest)
    whole, whole_lse = attention(q, k, v, sizes[1], 0.25, Features(sinks=sinks))
    torch.testing.assert_close(out, whole, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_soft_cap_is_stable_for_scores_in_the_thousands(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in inputs(6, 40, 2, 2))
    out, lse = attention(q * 64, k * 64, v, 40, 0.25, Features(soft_cap=50.0))
    assert bool(out.isfinite().all())
    assert bool((lse.abs() <= 50 + math.log(46)).all())
    scores = torch.einsum("ihd,jhd->ihj", q.double(), k.double().repeat_interleave(2, dim=1)) * 1024
    assert scores.abs().max() > 5000


def test_a_row_that_sees_nothing_is_zero_and_a_sink_alone_is_the_log_sum_exp() -> None:
    q, k, v = inputs(3, 0, 1, 2)
    words, sinks = torch.tensor([0b1, 0, 0b100]), torch.tensor([0.5, -2.0], dtype=torch.float64)
    out, lse = attention(q, k, v, 0, 0.25, Features(tree=words))
    assert not out[1].any()
    assert lse[1].tolist() == [-math.inf, -math.inf]
    assert bool(lse[[0, 2]].isfinite().all())
    torch.testing.assert_close(out[2], v[2].expand(2, -1))
    out, lse = attention(q, k, v, 0, 0.25, Features(tree=words, sinks=sinks))
    assert not out[1].any()
    assert lse[1].tolist() == sinks.tolist()


@pytest.mark.parametrize("context_len", [0, 30])
def test_no_query_tokens_give_no_rows(context_len: int) -> None:
    q, k, v = inputs(1, context_len, 2, 2)
    out, lse = attention(q[:0], k[:context_len], v[:context_len], context_len, 0.25)
    assert (out.shape, lse.shape) == ((0, 4, 16), (0, 4))


def test_float32_stays_float32_and_close() -> None:
    q, k, v = inputs(9, 30, 2, 2)
    out, lse = attention(q.float(), k.float(), v.float(), 30, 0.25)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(out.double(), torch_attention(q, k, v, 30, 0.25), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_rounds_what_eager_attention_rounds(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in inputs(6, 50, 1, 2))
    out, lse = attention(q, k, v, 50, 0.25)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    scores = torch.stack([q[:, head] @ k[:, 0].T for head in range(2)]) * 0.25
    scores = scores.masked_fill(torch.ones(6, 56, dtype=torch.bool).triu(51), -torch.inf)
    expected = torch.softmax(scores, dim=-1, dtype=torch.float32).to(dtype) @ v[:, 0]
    torch.testing.assert_close(out, expected.transpose(0, 1), rtol=torch.finfo(dtype).eps, atol=1e-3)
    error = (out.double() - torch_attention(*(x.double() for x in (q, k, v)), 50, 0.25)).abs().max()
    assert torch.finfo(dtype).eps / 50 < error < 4 * torch.finfo(dtype).eps


def test_tf32_is_forbidden_inside_and_restored_after(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(2, 3, 1, 1)
    seen: list[object] = []
    product = torch.bmm

    def watched(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        seen.append(torch.backends.cuda.matmul.fp32_precision)
        return product(first, second)

    monkeypatch.setattr(torch, "bmm", watched)
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        attention(q, k, v, 3, 0.25)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert set(seen) == {"ieee"}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("page_size", [16, 48])
def test_paged_attention_is_each_sequences_own(page_size: int, packed: bool) -> None:
    spec = AttentionSpec(6, 2, 64)
    batch = Batch.parse("1x5@60,2x1@47,1x20@0")
    tensors = make_tensors(spec, batch, page_size, "cpu", seed=3, packed=packed)
    out, lse = paged_attention(tensors, batch, spec, torch.float64)
    assert out.shape == tensors.q.shape
    assert lse.shape == tensors.q.shape[:2]
    start = 0
    for index, (query_len, context_len) in enumerate(batch.sequences):
        rows = slice(start, start + query_len)
        places = [divmod(position, page_size) for position in range(query_len + context_len)]
        pages = tensors.block_table[index].tolist()
        k, v = (
            torch.stack([cache[pages[page], slot] for page, slot in places]).double()
            for cache in (tensors.k_cache, tensors.v_cache)
        )
        expected = torch_attention(tensors.q[rows].double(), k, v, context_len, spec.softmax_scale)
        torch.testing.assert_close(out[rows], expected, rtol=1e-10, atol=1e-10)
        start += query_len


def test_a_batch_with_a_sequence_of_no_query_tokens_is_the_batch_without_it() -> None:
    spec = AttentionSpec(6, 2, 64)
    tensors = make_tensors(spec, Batch.parse("1x5@60,2x1@47"), 16, "cpu", seed=3)
    table = tensors.block_table
    with_none = dataclasses.replace(tensors, block_table=torch.cat([table[:1], 0 * table[:1], table[1:]]))
    expected = paged_attention(tensors, Batch.parse("1x5@60,2x1@47"), spec, torch.float64)
    found = paged_attention(with_none, Batch.parse("1x5@60,1x0@9,2x1@47"), spec, torch.float64)
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


def test_each_sequence_has_its_own_words_and_only_trees_heed_them() -> None:
    spec = AttentionSpec(2, 1, 64, has_tree_mask=True, sliding_window=4)
    batch = Batch.parse("1x1@9,1x3@9,1x64@2,1x65@2")
    words = [0, 0b001, 0b011, 0b101, *(-(2**63) | 1 << i for i in range(64)), *([0] * 65)]
    tensors = dataclasses.replace(make_tensors(spec, batch, 16, "cpu", seed=0), tree_mask=torch.tensor(words))
    tokens = [slice(0, 1), slice(1, 4), slice(4, 68), slice(68, 133)]
    features = [Features.of(spec, tensors, rows) for rows in tokens]
    assert [f.window for f in features] == [4] * 4
    assert [f.tree is None for f in features] == [True, False, False, True]
    out, _ = paged_attention(tensors, batch, spec, torch.float64)
    assert bool(out.isfinite().all())
    # The last of 64 tokens sees itself by the sign, every other sees the last one too.
    k, v = (gather(cache, tensors.block_table[2], 66).double() for cache in (tensors.k_cache, tensors.v_cache))
    features = Features(window=4, tree=torch.tensor(words[4:68]))
    for row in (0, 20, 63):
        expected, _ = one_row(2 * tensors.q[4:68].double(), k / 4, v, row, 1, 2, features)
        torch.testing.assert_close(out[4 + row, 1], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_a_cache_in_8_bits_is_scaled_by_kv_head(kv_dtype: str) -> None:
    spec, plain = AttentionSpec(6, 3, 64, kv_dtype=kv_dtype), AttentionSpec(6, 3, 64)
    batch = Batch.parse("1x5@60,2x1@47")
    tensors = make_tensors(spec, batch, 16, "cpu", seed=3)
    assert tensors.k_scale is not None
    assert tensors.v_scale is not None
    wide: Tensors = dataclasses.replace(
        tensors,
        k_cache=tensors.k_cache.double() * tensors.k_scale.double()[:, None],
        v_cache=tensors.v_cache.double() * tensors.v_scale.double()[:, None],
        k_scale=None,
        v_scale=None,
    )
    found, expected = (paged_attention(t, batch, s, torch.float64) for t, s in ((tensors, spec), (wide, plain)))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("q_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_queries_in_8_bits_are_scaled_by_the_kv_head_of_their_group(q_dtype: str) -> None:
    spec = AttentionSpec(6, 3, 64, kv_dtype="float8_e5m2", q_dtype=q_dtype)
    batch = Batch.parse("1x5@60,2x1@47")
    tensors = make_tensors(spec, batch, 16, "cpu", seed=3)
    assert tensors.q_scale is not None
    scales = tensors.q_scale.double()[[0, 0, 1, 1, 2, 2], None]
    wide: Tensors = dataclasses.replace(tensors, q=tensors.q.double() * scales, q_scale=None)
    plain = dataclasses.replace(spec, q_dtype="auto")
    found, expected = (paged_attention(t, batch, s, torch.float64) for t, s in ((tensors, spec), (wide, plain)))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_dequantizing_rounds_once() -> None:
    keys = torch.tensor([[[1.125], [-3.0]]]).to(torch.float8_e4m3fn)
    scale = torch.tensor([1.0039, 0.3337])
    assert torch.equal(dequantized(keys, scale, torch.bfloat16), (keys.float() * scale[:, None]).bfloat16())
    assert dequantized(keys, None, torch.float16).tolist() == [[[1.125], [-3.0]]]


def test_gather_reads_the_pages_in_the_order_of_the_table() -> None:
    cache = torch.arange(4 * 16, dtype=torch.float32).view(4, 16, 1, 1)
    keys = gather(cache, torch.tensor([2, 0, 3], dtype=torch.int32), 20).flatten()
    assert keys.tolist() == [*range(32, 48), *range(4)]
