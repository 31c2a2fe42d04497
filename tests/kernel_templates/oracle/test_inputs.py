from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.oracle.inputs import GUARD, make_tensors, tree_words
from attention_tuner.kernel_templates.oracle.needles import NEEDLE_SCORE, query_size
from attention_tuner.kernel_templates.oracle.reference import gather, paged_attention
from attention_tuner.kernel_templates.spec import MAX_SCALE, MIN_SCALE, AttentionSpec

SPEC = AttentionSpec(4, 2, 64)
BATCH = Batch.parse("1x12@200,2x1@95,1x3@0")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("page_size", [16, 48, 528])
def test_exactly_the_slots_of_the_sequences_are_not_nan(page_size: int, packed: bool) -> None:
    tensors = make_tensors(SPEC, BATCH, page_size, "cpu", seed=0, packed=packed)
    for cache in (tensors.k_cache, tensors.v_cache):
        held = torch.zeros(cache.shape[:2], dtype=torch.bool)
        for row, kv_len in zip(tensors.block_table.tolist(), BATCH.kv_lens, strict=True):
            for position in range(kv_len):
                held[row[position // page_size], position % page_size] = True
        assert torch.equal(cache.isfinite().all(dim=(2, 3)), held)
        assert torch.equal(cache.isnan().all(dim=(2, 3)), ~held)
    assert bool(tensors.out.isnan().all())
    assert bool(tensors.q.isfinite().all())


def test_the_block_table_is_permuted_and_ends_in_a_page_of_nan() -> None:
    tensors = make_tensors(SPEC, BATCH, 16, "cpu", seed=0)
    counts = [math.ceil(kv_len / 16) for kv_len in BATCH.kv_lens]
    named = [page for row, n in zip(tensors.block_table.tolist(), counts, strict=True) for page in row[:n]]
    assert sorted(named) == list(range(1, sum(counts) + 1))
    assert named != sorted(named)
    assert tensors.block_table.shape == (4, max(counts) + 1)
    assert all(not any(row[n:]) for row, n in zip(tensors.block_table.tolist(), counts, strict=True))
    assert tensors.k_cache.shape[0] == sum(counts) + 2


def test_dtypes_shapes_and_lengths_are_those_of_the_batch() -> None:
    tensors = make_tensors(AttentionSpec(6, 3, 128, "float16"), BATCH, 32, "cpu", seed=0)
    assert tensors.q.shape == tensors.out.shape == (17, 6, 128)
    assert tensors.k_cache.shape[1:] == tensors.v_cache.shape[1:] == (32, 3, 128)
    assert {x.dtype for x in (tensors.q, tensors.k_cache, tensors.v_cache, tensors.out)} == {torch.float16}
    assert tensors.query_start_loc.tolist() == [0, 12, 13, 14, 17]
    assert tensors.kv_lens.tolist() == [212, 96, 96, 3]
    assert {x.dtype for x in (tensors.block_table, tensors.query_start_loc, tensors.kv_lens)} == {torch.int32}


def test_packed_keys_and_values_are_views_of_one_tensor() -> None:
    tensors = make_tensors(SPEC, BATCH, 48, "cpu", seed=0, packed=True)
    k, v = tensors.k_cache, tensors.v_cache
    assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    assert k.stride() == v.stride() == (2 * 48 * 2 * 64, 2 * 64, 48 * 2 * 64, 1)
    assert v.storage_offset() - k.storage_offset() == 64


@pytest.mark.parametrize("needles", [False, True])
def test_one_seed_gives_the_same_inputs_and_another_other_ones(needles: bool) -> None:
    first, again, other = (make_tensors(SPEC, BATCH, 16, "cpu", seed, needles=needles) for seed in (5, 5, 6))
    for name in ("q", "k_cache", "v_cache", "block_table"):
        assert torch.equal(getattr(first, name).nan_to_num(), getattr(again, name).nan_to_num())
        assert not torch.equal(getattr(first, name).nan_to_num(), getattr(other, name).nan_to_num())


def test_without_needles_no_key_stands_out() -> None:
    tensors = make_tensors(SPEC, BATCH, 16, "cpu", seed=0, needles=False)
    k = gather(tensors.k_cache, tensors.block_table[0], 212).double().repeat_interleave(2, dim=1)
    assert torch.einsum("ihd,jhd->hij", tensors.q[:12].double(), k).abs().max() / 8 < NEEDLE_SCORE / 2


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_a_cache_in_8_bits_has_its_nan_and_scales_that_differ_between_neighbours(kv_dtype: str) -> None:
    spec = AttentionSpec(8, 4, 64, kv_dtype=kv_dtype)
    tensors = make_tensors(spec, BATCH, 16, "cpu", seed=0)
    for cache, scale in ((tensors.k_cache, tensors.k_scale), (tensors.v_cache, tensors.v_scale)):
        assert cache.dtype == getattr(torch, kv_dtype)
        assert bool(cache[[0, -1]].float().isnan().all())
        assert bool(gather(cache, tensors.block_table[0], 212).float().isfinite().all())
        assert gather(cache, tensors.block_table[0], 212).float().std() > 0.5
        assert scale is not None
        assert (scale.shape, scale.dtype) == ((4,), torch.float32)
        ratios = scale[1:] / scale[:-1]
        assert bool((torch.maximum(ratios, 1 / ratios) >= 1.5).all())


@pytest.mark.parametrize("q_dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("scale", [None, MIN_SCALE, MAX_SCALE])
def test_queries_in_8_bits_have_numbers_and_scales_of_every_size(q_dtype: str, scale: float | None) -> None:
    spec = AttentionSpec(8, 4, 64, "float16", "float8_e4m3fn", scale=scale, q_dtype=q_dtype)
    tensors = make_tensors(spec, BATCH, 16, "cpu", seed=0)
    assert (tensors.q.dtype, tensors.out.dtype) == (getattr(torch, q_dtype), torch.float16)
    q = tensors.q.float()
    assert 0.5 < q.std() < 4
    assert bool(q.isfinite().all())
    assert tensors.q_scale is not None
    assert (tensors.q_scale.shape, tensors.q_scale.dtype) == ((4,), torch.float32)
    ratios = tensors.q_scale[1:] / tensors.q_scale[:-1]
    assert bool((torch.maximum(ratios, 1 / ratios) > 1.1).all())
    assert bool((tensors.q_scale != query_size(spec)).all())
    # Whatever the dtype of q, the rest is the same.
    plain = make_tensors(dataclasses.replace(spec, q_dtype="auto"), BATCH, 16, "cpu", seed=0)
    assert torch.equal(tensors.v_cache.float().nan_to_num(), plain.v_cache.float().nan_to_num())
    assert tensors.k_scale is not None
    assert torch.equal(tensors.k_scale, plain.k_scale)  # pyright: ignore


@pytest.mark.parametrize("packed", [False, True])
def test_values_may_be_shorter_than_keys(packed: bool) -> None:
    tensors = make_tensors(AttentionSpec(4, 2, 96, v_head_dim=64), BATCH, 16, "cpu", seed=0, packed=packed)
    assert (tensors.q.shape[-1], tensors.k_cache.shape[-1]) == (96, 96)
    assert (tensors.out.shape[-1], tensors.v_cache.shape[-1]) == (64, 64)
    assert bool(gather(tensors.v_cache, tensors.block_table[0], 212).isfinite().all())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kv_dtype", ["auto", "float8_e4m3fn"])
def test_a_guard_of_nan_follows_each_row(kv_dtype: str, packed: bool) -> None:
    spec = AttentionSpec(4, 2, 80, kv_dtype=kv_dtype, q_dtype=kv_dtype)
    guarded = make_tensors(spec, BATCH, 16, "cpu", 0, packed, guard=True)
    for tensor in (guarded.q, guarded.k_cache, guarded.v_cache, guarded.out):
        is_first_half = packed and tensor is guarded.k_cache
        after = torch.as_strided(tensor, (*tensor.shape[:-1], GUARD), tensor.stride(),
                                 tensor.storage_offset() + 80 * (2 if is_first_half else 1))
        assert bool(after.float().isnan().all())
        assert all(stride * tensor.element_size() % 16 == 0 for stride in tensor.stride()[:-1])
    assert bool(guarded.q.float().isfinite().all())


def test_a_shared_prefix_is_the_same_pages() -> None:
    batch = Batch.parse("1x12@200,1x1@95,1x3@20,1x0@300,1x2@100")
    tensors = make_tensors(SPEC, batch, 16, "cpu", seed=0, shared_prefix=70)
    table = tensors.block_table
    assert torch.equal(table[[1, 4], :4], table[:1, :4].expand(2, -1))
    own = [set(row[:n].tolist()) for row, n in zip(table, [14, 6, 2, 19, 7], strict=True)]
    assert (own[0] & own[1], own[0] & own[4], own[1] & own[4]) == (set(table[0, :4].tolist()),) * 3
    assert not (own[0] | own[1] | own[4]) & (own[2] | own[3])
    assert not own[2] & own[3]
    assert set.union(*own) == set(range(1, tensors.k_cache.shape[0] - 1))
    for row, kv_len in ((0, 212), (1, 96), (2, 23), (4, 102)):
        assert bool(gather(tensors.k_cache, table[row], kv_len).isfinite().all())


def test_the_keys_of_a_sequence_without_query_tokens_are_nan() -> None:
    tensors = make_tensors(SPEC, Batch.parse("1x3@40,1x0@50,1x0@0"), 16, "cpu", seed=0)
    assert bool(gather(tensors.k_cache, tensors.block_table[1], 50).isnan().all())
    assert tensors.kv_lens.tolist() == [43, 50, 0]
    assert tensors.query_start_loc.tolist() == [0, 3, 3, 3]


def test_what_a_feature_needs_is_there_with_it_alone() -> None:
    plain = make_tensors(SPEC, BATCH, 16, "cpu", seed=0)
    names = ("sinks", "alibi_slopes", "q_scale", "k_scale", "v_scale", "tree_mask", "lse")
    assert all(getattr(plain, name) is None for name in names)
    spec = AttentionSpec(4, 2, 64, kv_dtype="float8_e5m2", has_sinks=True, has_alibi=True, has_tree_mask=True,
                         q_dtype="float8_e4m3fn")
    tensors = make_tensors(spec, BATCH, 16, "cpu", seed=0, lse=True)
    found = {name: getattr(tensors, name) for name in names}
    assert {name: (tuple(x.shape), x.dtype) for name, x in found.items()} == {
        "sinks": ((4,), torch.float32),
        "alibi_slopes": ((4,), torch.float32),
        "q_scale": ((2,), torch.float32),
        "k_scale": ((2,), torch.float32),
        "v_scale": ((2,), torch.float32),
        "tree_mask": ((17,), torch.int64),
        "lse": ((17, 4), torch.float32),
    }
    assert bool(found["lse"].isnan().all())


@pytest.mark.parametrize("seed", range(5))
def test_sinks_and_slopes_differ_between_neighbours(seed: int) -> None:
    spec = AttentionSpec(32, 8, 64, has_sinks=True, has_alibi=True)
    tensors = make_tensors(spec, Batch.parse("1x4@4000"), 16, "cpu", seed)
    assert tensors.sinks is not None
    assert tensors.alibi_slopes is not None
    assert tensors.sinks.diff().abs().min() > 2.0
    ratios = tensors.alibi_slopes[1:] / tensors.alibi_slopes[:-1]
    assert torch.maximum(ratios, 1 / ratios).min() > 1.15
    assert bool((tensors.alibi_slopes > 0).all())


def test_a_sink_weighs_as_much_as_what_a_row_attends_to() -> None:
    spec = AttentionSpec(8, 2, 64, has_sinks=True)
    batch = Batch.parse("4x1@2000")
    tensors = make_tensors(spec, batch, 16, "cpu", seed=0)
    assert tensors.sinks is not None
    plain = AttentionSpec(8, 2, 64)
    _, lse = paged_attention(tensors, batch, plain, torch.float64)
    turn = (torch.arange(4)[:, None] + torch.arange(8)) % 4
    above = tensors.sinks - lse
    even = (torch.arange(8) % 2 == 0).expand(4, -1)
    assert above[even & (turn == 0)].abs().max() < 3
    assert above[~even & (turn == 1)].abs().max() < 3
    # And beside random keys the needles' sink is one that outweighs all: in float16 their probabilities would vanish.
    assert above[even & (turn == 1)].min() > 12


@given(st.integers(2, 64), st.integers(0, 1000))
def test_a_token_of_a_tree_sees_itself_and_what_its_parent_sees(query_len: int, seed: int) -> None:
    words = [word % 2**64 for word in tree_words(query_len, random.Random(seed))]
    for token, word in enumerate(words):
        assert word >> token == 1
        before = word ^ 1 << token
        assert before == 0 or before == words[before.bit_length() - 1]
    assert len(words) == query_len


@pytest.mark.parametrize("query_len", [0, 1, 65])
def test_what_is_not_a_tree_has_words_that_would_hide_all(query_len: int) -> None:
    assert tree_words(query_len, random.Random(0)) == [0] * query_len
