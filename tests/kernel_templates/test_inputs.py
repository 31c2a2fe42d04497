from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.inputs import (
    LATTICE_KEYS,
    LATTICE_STEP,
    NEEDLE_SCORE,
    edge_positions,
    make_tensors,
    needle_keys,
)
from attention_tuner.kernel_templates.launch import Tensors
from attention_tuner.kernel_templates.reference import gather
from attention_tuner.kernel_templates.spec import MAX_SCALE, MIN_SCALE, AttentionSpec

SPEC = AttentionSpec(4, 2, 64)
BATCH = Batch.parse("1x12@200,2x1@95,1x3@0")


def probabilities(tensors: Tensors, spec: AttentionSpec, batch: Batch, sequence: int) -> torch.Tensor:
    """Scores of every query, masked by nothing: [num_q_heads, query_len, kv_len]."""
    start = int(tensors.query_start_loc[sequence])
    q = tensors.q[start : int(tensors.query_start_loc[sequence + 1])].double()
    k = gather(tensors.k_cache, tensors.block_table[sequence], batch.kv_lens[sequence]).double()
    return torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(spec.group_size, dim=1)) * spec.softmax_scale


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
    assert probabilities(tensors, SPEC, BATCH, 0).abs().max() < NEEDLE_SCORE / 2


@pytest.mark.parametrize("spec", [SPEC, AttentionSpec(7, 1, 128, "float16"), AttentionSpec(4, 4, 256, scale=0.3),
                                  AttentionSpec(4, 2, 64, "float16", scale=MIN_SCALE),
                                  AttentionSpec(4, 2, 256, "float16", scale=MAX_SCALE)])
def test_a_query_attends_to_its_needles_alone_and_equally(spec: AttentionSpec) -> None:
    tensors = make_tensors(spec, BATCH, 16, "cpu", seed=0)
    scores = probabilities(tensors, spec, BATCH, 0)
    keys = needle_keys(BATCH, 16)
    classes = torch.full((212,), -1)
    classes[keys.position[keys.sequence == 0]] = keys.needle_class[keys.sequence == 0]
    assert scores[0, 0, 200] >= NEEDLE_SCORE
    for row in range(12):
        for head in range(spec.num_q_heads):
            own, outside, turn = classes[200 + row], 200 + row + 1, (row + head) % 4
            if turn == 2 and row < 11:
                assert scores[head, row, outside] == scores[0, 0, 200]
                assert scores[head, row, :outside].max() < NEEDLE_SCORE / 2
            elif turn != 1:
                watched = (classes == 1) | (classes == own) | ((classes == 0) & (turn != 3))
                assert set(scores[head, row, watched].tolist()) == {float(scores[0, 0, 200])}
                assert scores[head, row, ~watched].max() < NEEDLE_SCORE / 2
            else:
                assert scores[head, row, :200].abs().max() < NEEDLE_SCORE / 2


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3000)), min_size=1, max_size=4),
    st.sampled_from([16, 48, 128, 528]),
)
def test_needles_are_distinct_keys_and_stand_in_every_16(sequences: list[tuple[int, int]], page_size: int) -> None:
    keys = needle_keys(Batch(tuple(sequences)), page_size)
    for sequence, (query_len, context_len) in enumerate(sequences):
        positions = keys.position[keys.sequence == sequence]
        assert len(set(positions.tolist())) == len(positions)
        assert set(range(context_len, context_len + query_len)) <= set(positions.tolist())
        full = context_len // LATTICE_STEP
        assert set(range(full)) <= set((positions // LATTICE_STEP).tolist())
        edges = keys.position[(keys.sequence == sequence) & (keys.needle_class == 1)]
        assert edges.tolist() == edge_positions(query_len, context_len, page_size)


@pytest.mark.parametrize("context_len", [65536, 65537, 1_200_000])
def test_the_lattice_is_bounded_and_even(context_len: int) -> None:
    keys = needle_keys(Batch(((1, context_len),)), 16)
    lattice = keys.position[keys.needle_class == 0]
    assert LATTICE_KEYS / 2 - 200 < len(lattice) <= LATTICE_KEYS
    units = math.ceil(math.ceil(context_len / LATTICE_STEP) / LATTICE_KEYS)
    watched = keys.position[keys.needle_class < 2].sort().values
    assert watched.diff().max() < (units + 2) * LATTICE_STEP


def test_edges_are_the_places_where_a_kernel_may_cut() -> None:
    edges = set(edge_positions(query_len=5, context_len=1000, page_size=48))
    assert {0, 15, 16, 31, 32, 63, 64, 127, 128, 511, 512} <= edges
    assert {47, 48, 95, 96, 767, 768} <= edges
    assert {1005 // 48 * 48 - 1, 1000 - 1} <= edges
    assert edge_positions(query_len=3, context_len=0, page_size=16) == []
