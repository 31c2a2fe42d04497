from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.launch.launcher import Tensors, query_start_locs
from attention_tuner.kernel_templates.oracle.inputs import make_tensors
from attention_tuner.kernel_templates.oracle.needles import (
    LATTICE_KEYS,
    LATTICE_STEP,
    MAX_NEAR_CAP,
    NEEDLE_SCORE,
    edge_positions,
    needle_keys,
    needle_scores,
    needle_sizes,
    num_cycled,
    relatives,
)
from attention_tuner.kernel_templates.oracle.reference import dequantized, gather
from attention_tuner.kernel_templates.spec import (
    DTYPES,
    HEAD_DIMS,
    MAX_FLOAT32_SOFT_CAP,
    MAX_SCALE,
    MIN_SCALE,
    AttentionSpec,
)

SPEC = AttentionSpec(4, 2, 64)
BATCH = Batch.parse("1x12@200,2x1@95,1x3@0")


def scores_of(tensors: Tensors, spec: AttentionSpec, batch: Batch, sequence: int) -> torch.Tensor:
    """Scaled products of every query, masked and capped by nothing: [num_q_heads, query_len, kv_len]."""
    q_scale = None if tensors.q_scale is None else tensors.q_scale.repeat_interleave(spec.group_size)
    q = dequantized(tensors.q[slice(*query_start_locs(batch)[sequence : sequence + 2])], q_scale, torch.float64)
    k = gather(tensors.k_cache, tensors.block_table[sequence], batch.kv_lens[sequence])
    k = dequantized(k, tensors.k_scale, torch.float64).repeat_interleave(spec.group_size, dim=1)
    return torch.einsum("ihd,jhd->hij", q, k) * spec.softmax_scale


@pytest.mark.parametrize("spec", [SPEC, AttentionSpec(7, 1, 128, "float16"), AttentionSpec(4, 4, 256, scale=0.3),
                                  AttentionSpec(4, 2, 64, "float16", scale=MIN_SCALE),
                                  AttentionSpec(4, 2, 256, "float16", scale=MAX_SCALE), AttentionSpec(4, 2, 80),
                                  AttentionSpec(4, 1, 40, "float32"),
                                  AttentionSpec(4, 1, 64, kv_dtype="float8_e5m2"),
                                  AttentionSpec(4, 1, 96, "float16", "float8_e4m3fn", scale=MIN_SCALE),
                                  AttentionSpec(4, 1, 64, kv_dtype="float8_e4m3fn", q_dtype="float8_e5m2"),
                                  AttentionSpec(4, 1, 32, "float16", "float8_e4m3fn", scale=MIN_SCALE,
                                                q_dtype="float8_e4m3fn"),
                                  AttentionSpec(4, 1, 256, kv_dtype="float8_e5m2", scale=MAX_SCALE,
                                                q_dtype="float8_e4m3fn")])
def test_a_query_attends_to_its_needles_alone_and_equally(spec: AttentionSpec) -> None:
    tensors = make_tensors(spec, BATCH, 16, "cpu", seed=0)
    scores = scores_of(tensors, spec, BATCH, 0)
    keys = needle_keys(spec, BATCH, 16)
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
    keys = needle_keys(SPEC, Batch(tuple(sequences)), page_size)
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
    keys = needle_keys(SPEC, Batch(((1, context_len),)), 16)
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


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_directions_are_orthogonal_for_every_head_size(head_dim: int) -> None:
    spec = AttentionSpec(2, 2, head_dim, "float32", sliding_window=30)
    tensors = make_tensors(spec, BATCH, 16, "cpu", seed=0)
    keys = needle_keys(spec, BATCH, 16)
    first = keys.sequence == 0
    vectors = gather(tensors.k_cache, tensors.block_table[0], 212)[keys.position[first], 0]
    products = vectors @ vectors.T / vectors[0].square().sum()
    same = keys.needle_class[first][:, None] == keys.needle_class[first]
    assert torch.equal(products, same.float())
    assert num_cycled(spec) == min(32, 2 ** int(math.log2(head_dim)) // 2 - 1)


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("scale", [None, MIN_SCALE, MAX_SCALE])
@pytest.mark.parametrize("head_dim", [32, 120, 256])
def test_a_needle_is_exact_in_8_bits(kv_dtype: str, scale: float | None, head_dim: int) -> None:
    spec = AttentionSpec(3, 3, head_dim, "float16", kv_dtype, scale=scale)
    k_scale = torch.tensor([0.5, 0.75, 1.25])
    sizes = needle_sizes(spec, k_scale)
    assert torch.equal(sizes.to(getattr(torch, kv_dtype)).double(), sizes)
    assert torch.equal((sizes * k_scale).bfloat16().double(), sizes * k_scale)
    assert bool((needle_scores(spec, k_scale) >= NEEDLE_SCORE).all())


@pytest.mark.parametrize("window", [1, 2, 7, 16, 100, 205, 500])
def test_each_row_watches_both_sides_of_its_window(window: int) -> None:
    spec = AttentionSpec(4, 2, 64, sliding_window=window)
    scores = scores_of(make_tensors(spec, BATCH, 16, "cpu", seed=0), spec, BATCH, 0)
    for row in range(12):
        position = 200 + row
        first, before = position - window + 1, position - window
        for head in range(4):
            turn = (row + head) % 4
            is_outside = turn == 2 and (row < 11 or before >= 0)
            if turn in (0, 3) or (turn == 2 and not is_outside):
                assert scores[head, row, [max(first, 0) if first >= 0 else position, position]].min() >= NEEDLE_SCORE
            if is_outside and before >= 0:
                assert scores[head, row, before] >= NEEDLE_SCORE
                inside = scores[head, row, max(first, 0) : position + 1]
                # Of the keys inside it only some that share a class with what is outside.
                assert (inside >= NEEDLE_SCORE / 2).sum() <= window // num_cycled(spec) + 1


def test_a_window_cuts_the_sequence_where_it_begins() -> None:
    edges = set(edge_positions(query_len=4, context_len=10_000, page_size=48, window=1000))
    assert {9000, 9001, 8991, 8992} <= edges
    step = math.ceil(1003 / 16 / LATTICE_STEP) * LATTICE_STEP
    assert {9001 + step - 1, 9001 + step, 9001 + 2 * step, 8992 + step} <= edges


@pytest.mark.parametrize("cap", [1e-3, 1.0, 20.0, MAX_FLOAT32_SOFT_CAP])
@pytest.mark.parametrize("dtype", DTYPES)
def test_needles_stay_apart_under_a_soft_cap_and_some_come_near_it(dtype: str, cap: float) -> None:
    spec = AttentionSpec(4, 2, 64, dtype, logits_soft_cap=cap)
    tensors = make_tensors(spec, BATCH, 16, "cpu", seed=0)
    scores = scores_of(tensors, spec, BATCH, 0)
    assert bool(scores.isfinite().all())
    needle = cap * torch.tanh(scores[0, 0, 200] / cap)
    assert needle == pytest.approx(float(needle_scores(spec, None)[0]))
    assert needle >= min(NEEDLE_SCORE, 0.75 * cap) * 0.999
    # Head 3 of row 0: edges, and what it sees last a bit above them, all about as large as the cap.
    edge, own = scores[3, 0, 0], scores[3, 0, 200]
    assert min(cap, MAX_NEAR_CAP) / 2 < edge < 2 * max(min(cap, MAX_NEAR_CAP), 1.4 * NEEDLE_SCORE) or cap < NEEDLE_SCORE
    assert 1.5 < own - edge < 6 or cap < 3


def test_tokens_of_a_tree_watch_their_parent_and_a_stranger() -> None:
    words = [0b1, 0b11, 0b101, 0b1011]
    parent, stranger = relatives(words)
    assert parent.tolist() == [-1, 0, 0, 1]
    assert stranger.tolist() == [-1, -1, 1, 2]
    spec = AttentionSpec(4, 2, 64, has_tree_mask=True)
    batch = Batch.parse("1x20@30")
    tensors = make_tensors(spec, batch, 16, "cpu", seed=0)
    assert tensors.tree_mask is not None
    scores = scores_of(tensors, spec, batch, 0)
    parent, stranger = relatives(tensors.tree_mask.tolist())
    for row in range(20):
        for head in range(4):
            turn = (row + head) % 4
            if turn in (0, 3) and parent[row] >= 0:
                assert scores[head, row, 30 + parent[row]] >= NEEDLE_SCORE
            if turn == 2 and stranger[row] >= 0:
                assert scores[head, row, 30 + stranger[row]] >= NEEDLE_SCORE
                assert scores[head, row, 30 + row] < NEEDLE_SCORE / 2


def test_a_sequence_without_query_tokens_changes_no_needle_of_the_others() -> None:
    with_none = needle_keys(SPEC, Batch.parse("1x12@200,1x0@95"), 16)
    alone = needle_keys(SPEC, Batch.parse("1x12@200"), 16)
    assert torch.equal(with_none.position[with_none.sequence == 0], alone.position)
