from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from gluon_samples import HOPPER, SPEC, variant_of
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.errors import VariantError
from attention_tuner.kernel_templates.hopper.launcher import GluonHopperLauncher, rows_view
from attention_tuner.kernel_templates.launch.device import present_gpu
from attention_tuner.kernel_templates.launch.launcher import make_launcher
from attention_tuner.kernel_templates.launch.room import Limit, Room
from attention_tuner.kernel_templates.oracle.reference import paged_attention
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.variant import Value
from attention_tuner.tuner.measure.check import Checker

PAGES, SLOTS, HEADS, DIM = 5, 16, 3, 64


def where(cache: torch.Tensor) -> list[tuple[int, int, int]]:
    """Where the view finds each first element of a slot: by page, slot and head."""
    descriptor, rows_per_page, rows_per_head, columns_per_head = rows_view(cache, SLOTS)
    width = descriptor.strides[0]
    found: list[tuple[int, int, int]] = []
    for page in range(PAGES):
        for slot in range(SLOTS):
            for head in range(HEADS):
                row, column = page * rows_per_page + head * rows_per_head + slot, head * columns_per_head
                assert row < descriptor.shape[0]
                assert column + DIM <= descriptor.shape[1] <= width
                assert row * width + column == cache[page, slot, head].storage_offset() - cache.storage_offset()
                found.append((page, slot, head))
    return found


@pytest.mark.parametrize("layout", ["slots before heads", "heads before slots", "K and V in one", "padded pages"])
def test_a_cache_is_a_matrix_whatever_its_layout(layout: str):
    cache = torch.empty(PAGES, SLOTS, HEADS, DIM, dtype=torch.bfloat16)
    if layout == "heads before slots":
        cache = torch.empty(PAGES, HEADS, SLOTS, DIM, dtype=torch.bfloat16).permute(0, 2, 1, 3)
    elif layout == "K and V in one":
        packed = torch.empty(PAGES, HEADS, SLOTS, 2 * DIM, dtype=torch.bfloat16).permute(0, 2, 1, 3)
        cache = packed[..., DIM:]
    elif layout == "padded pages":
        cache = torch.empty(PAGES, SLOTS + 2, HEADS, DIM, dtype=torch.bfloat16)[:, :SLOTS]
    assert len(where(cache)) == PAGES * SLOTS * HEADS


def test_a_cache_that_is_no_matrix_is_refused():
    pages = torch.empty(PAGES, SLOTS * HEADS * DIM + 8, dtype=torch.bfloat16)
    cache = pages[:, : SLOTS * HEADS * DIM].view(PAGES, SLOTS, HEADS, DIM)
    with pytest.raises(VariantError, match=r"cannot read a cache with strides \(3080, 192, 64, 1\)"):
        rows_view(cache, SLOTS)


def started(batch: Batch, **changes: Value) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The grid and the compile-time arguments of the attention kernel."""
    launcher = GluonHopperLauncher(variant_of(**changes), SPEC, HOPPER)
    launches: list[tuple[tuple[int, ...], dict[str, Any]]] = []
    launcher.start = lambda kernel, grid, arguments, constants: launches.append((grid, constants))
    launcher.plan(batch, "cpu")
    launcher.run(Checker(SPEC, batch, launcher.variant.page_size, "cpu").tensors)
    # The reduction comes second: both consumers of a short sequence have a result.
    assert len(launches) == 2
    return launches[0]


def test_it_is_refused_where_a_log_sum_exp_is_asked_for():
    batch = Batch.parse("1x1@70")
    launcher = GluonHopperLauncher(variant_of(), SPEC, HOPPER)
    launcher.start = lambda *_: None
    launcher.plan(batch, "cpu")
    tensors = Checker(SPEC, batch, launcher.variant.page_size, "cpu").tensors
    with pytest.raises(VariantError, match="writes no log-sum-exp"):
        launcher.run(dataclasses.replace(tensors, lse=torch.empty(1, SPEC.num_q_heads)))


def test_its_grid_is_the_units_or_the_multiprocessors():
    batch = Batch.parse("20x1@70")
    assert started(batch, waves=0)[0] == (20 * SPEC.num_kv_heads,)
    for dispatch in ("persistent", "dynamic"):
        assert started(batch, waves=0, dispatch=dispatch)[0] == (HOPPER.num_sms,)
    assert started(Batch.parse("2x1@70"), waves=0, dispatch="persistent")[0] == (2 * SPEC.num_kv_heads,)


@pytest.mark.parametrize(("page_size", "block_n", "chunk"), [(16, 128, 16), (48, 128, 16), (96, 64, 32), (128, 64, 64)])
def test_a_load_stays_within_a_page(page_size: int, block_n: int, chunk: int):
    _, constants = started(Batch.parse("2x1@70"), page_size=page_size, block_n=block_n)
    assert constants["CHUNK"] == chunk
    assert page_size % chunk == block_n % chunk == 0


def test_in_few_waves_there_are_no_more_units_than_programs():
    def num_units(text: str, waves: int, spec: AttentionSpec) -> int:
        launcher = GluonHopperLauncher(variant_of(waves=waves), spec, HOPPER)
        return len(launcher.work_list(Batch.parse(text)).items) * spec.num_kv_heads

    assert num_units("1x1@131071", 1, SPEC) == 128
    assert num_units("1x512@32256", 1, AttentionSpec(8, 1, 128)) == 128
    assert num_units("1x512@32256", 4, AttentionSpec(8, 1, 128)) > 4 * HOPPER.num_sms


@given(
    st.lists(st.tuples(st.one_of(st.integers(0, 9), st.integers(1, 700)), st.one_of(st.integers(0, 300),
             st.integers(0, 200_000))), min_size=1, max_size=40).filter(lambda seqs: any(q for q, _ in seqs)),
    st.integers(0, 5), st.integers(0, 900), st.sampled_from(((32, 8), (8, 1), (7, 1), (64, 64))),
    st.sampled_from((0, 1, 2, 4)), st.sampled_from((1, 4)), st.sampled_from((64, 128)),
    st.sampled_from(("kernel", "last_program")),
)  # fmt: skip
@settings(deadline=None, max_examples=300, derandomize=True)
def test_what_is_reserved_is_enough_for_every_smaller_batch(
    sequences: list[tuple[int, int]], more_seqs: int, more_tokens: int, heads: tuple[int, int], waves: int, weight: int,
    block_n: int, reduction: str,
):  # fmt: skip
    batch = Batch(tuple(sequences))
    variant = variant_of(waves=waves, long_weight=weight, block_n=block_n, reduction=reduction)
    launcher = GluonHopperLauncher(variant, AttentionSpec(*heads, 128), HOPPER)
    c = launcher.constants
    limit = Limit(batch.num_seqs + more_seqs, batch.num_tokens + more_tokens, launcher.spec.group_size, c.long, c.short,
                  launcher.combine_rows, launcher.short_partials)
    work, room = launcher.work_list(batch), launcher.room(limit)
    need = Room(len(work.items), len(work.entries), work.partial_rows)
    assert room.holds(need), (room, need)


# Of 33 tokens with four heads each the second tile has rows for one consumer only.
MIXED = "1x300@1000,7x1@2047,1x1@9000,3x6@700,1x100@0,1x1@5,1x2@127,1x8@31,1x33@215"


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 48, 128, 528])
@pytest.mark.parametrize(
    "spec",
    [SPEC, AttentionSpec(7, 1, 64, "float16"), AttentionSpec(4, 4, 128), AttentionSpec(16, 1, 128),
     AttentionSpec(8, 2, 256)],
    ids=str,
)  # fmt: skip
def test_it_is_right(spec: AttentionSpec, page_size: int):
    gpu = present_gpu()
    assert gpu is not None
    checker = Checker(spec, Batch.parse(MIXED), page_size, "cuda")
    width = 64 if spec.head_dim == 256 else 128
    tried: list[dict[str, Value]] = [
        {"waves": 0},
        {"waves": 2, "dispatch": "persistent", "schedule": "interleaved", "order": "items"},
        {"waves": 8, "dispatch": "dynamic", "num_stages": 3 if spec.head_dim == 128 else 2},
        {"waves": 4, "block_n": 64, "num_stages": 2 if spec.head_dim == 256 else 6, "schedule": "interleaved"},
        {"waves": 0, "reduction": "last_program"},
        {"waves": 8, "reduction": "last_program", "dispatch": "persistent", "schedule": "interleaved"},
        {"waves": 2, "reduction": "last_program", "dispatch": "dynamic", "order": "items"},
    ]
    if spec.dtype == "bfloat16":
        tried.append({"waves": 4, "reduction": "last_program", "partials": "bfloat16"})
    for changes in tried:
        variant = variant_of(page_size, **{"block_n": width, **changes})
        found = checker.check(make_launcher(variant, spec, gpu))
        assert found.passed, f"{variant.key()}: {found.detail}"


@pytest.mark.gpu
def test_in_float16_many_keys_count_beside_one_that_outweighs_each():
    gpu = present_gpu()
    assert gpu is not None
    spec, batch = AttentionSpec(2, 1, 64, "float16", scale=1.0), Batch.parse("1x1@511,1x100@400")
    tensors = Checker(spec, batch, 16, "cuda").tensors
    # All values are 1 and all scores 0, but for one key's.
    tensors.q.fill_(0.25)
    tensors.k_cache.fill_(0)
    tensors.v_cache.fill_(1)
    for page in tensors.block_table[:, 0].tolist():
        tensors.k_cache[page, 3] = 18 / 16
        tensors.v_cache[page, 3] = 0
    oracle, _ = paged_attention(tensors, batch, spec, torch.float64)
    for reduction in ("kernel", "last_program"):
        launcher = make_launcher(variant_of(waves=4, reduction=reduction), spec, gpu)
        launcher.plan(batch, "cuda")
        launcher.run(tensors)
        assert torch.allclose(tensors.out.double(), oracle, rtol=2e-2)


@pytest.mark.gpu
def test_its_answer_is_the_same_each_time():
    gpu = present_gpu()
    assert gpu is not None
    checker = Checker(SPEC, Batch.parse("1x512@9000,5x1@20000,2x6@3000"), 16, "cuda")
    narrow: dict[str, Value] = {"block_n": 64, "num_stages": 6, "dispatch": "dynamic"}
    for changes in ({"num_stages": 3}, narrow, {"reduction": "last_program"}, narrow | {"reduction": "last_program"}):
        launcher = make_launcher(variant_of(**changes), SPEC, gpu)
        assert checker.check(launcher).passed
        expected = checker.tensors.out.clone()
        for _ in range(200):
            checker.tensors.out.fill_(torch.nan)
            launcher.run(checker.tensors)
            assert torch.equal(checker.tensors.out, expected)
