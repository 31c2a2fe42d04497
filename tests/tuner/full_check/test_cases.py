from __future__ import annotations

from typing import get_args

import pytest

from attention_tuner.kernel_templates.batch import SHORT_QUERY, Batch, BatchBucket
from attention_tuner.kernel_templates.errors import InputError
from attention_tuner.kernel_templates.gpu import INTERPRETER, TARGETS
from attention_tuner.kernel_templates.heuristic import candidates, default_variant
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.tuner.full_check.cases import (
    FIXED_SPLIT,
    FRESH_PROCESSES,
    LARGEST_TILE,
    SEEDS,
    Case,
    Way,
    cases_of,
    fresh_cases,
    interpreted_check_seconds,
    refuse_slow,
)

SPEC = AttentionSpec(4, 2, 64)
H200_LAYER = AttentionSpec(32, 8, 128)


def variant(spec: AttentionSpec = SPEC, page_size: int = 16, **changes: int) -> Variant:
    return default_variant(spec, Batch.parse("1x1@0"), page_size).replace(**changes)


def named(cases: tuple[Case, ...]) -> dict[str, Case]:
    return {case.name: case for case in cases}


@pytest.mark.parametrize("spec", [SPEC, H200_LAYER, AttentionSpec(128, 1, 64), AttentionSpec(1, 1, 256)])
@pytest.mark.parametrize("page_size", [16, 48, 528, 2048])
def test_every_case_has_a_name_of_its_own_and_small_ones_come_first(spec: AttentionSpec, page_size: int) -> None:
    cases = cases_of(spec, variant(spec, page_size))
    assert len(named(cases)) == len(cases)
    on_gpu = [case.needs_gpu for case in cases]
    assert on_gpu == sorted(on_gpu)


def test_lengths_are_at_the_edges_of_pages_and_tiles() -> None:
    lengths = {
        kv_len for case in cases_of(SPEC, variant(page_size=528)) if not case.needs_gpu for kv_len in case.batch.kv_lens
    }
    assert {1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 527, 528, 529} <= lengths


@pytest.mark.parametrize("heads", [(4, 2), (1, 1), (128, 1)])
def test_a_query_is_longer_than_any_tile(heads: tuple[int, int]) -> None:
    spec = AttentionSpec(*heads, 64)
    ((query_len, _),) = named(cases_of(spec, variant(spec)))["a query longer than a tile"].batch.sequences
    assert query_len * spec.group_size > LARGEST_TILE


def test_what_is_asked_of_a_launch_is_asked() -> None:
    cases = [case for case in cases_of(SPEC, variant()) if not case.needs_gpu]
    assert {case.way for case in cases} == set(get_args(Way))
    assert sum(case.packed for case in cases) == sum(case.large_logits for case in cases) == 1
    (shared,) = (case for case in cases if case.shared_prefix)
    assert all(context_len >= shared.shared_prefix for _, context_len in shared.batch.sequences)
    assert len({case.seed for case in cases}) == SEEDS
    assert any(0 in dict(case.batch.sequences) for case in cases)


def test_seeds_begin_where_they_are_told_to() -> None:
    assert {case.seed for case in cases_of(SPEC, variant(), 7)} == {7, 8, 9}
    assert len({case.name for case in fresh_cases()}) == FRESH_PROCESSES


def test_a_window_and_trees_have_cases_of_their_own() -> None:
    plain = set(named(cases_of(SPEC, variant())))
    windowed = named(cases_of(AttentionSpec(4, 2, 64, sliding_window=100), variant()))
    assert set(windowed) - plain == {"lengths at window edges"}
    assert {99, 100, 101} <= set(windowed["lengths at window edges"].batch.kv_lens)
    assert not windowed["lengths at window edges"].needs_gpu
    wide = named(cases_of(AttentionSpec(4, 2, 64, sliding_window=4096), variant()))
    assert wide["lengths at window edges"].needs_gpu
    assert set(named(cases_of(AttentionSpec(4, 2, 64, has_tree_mask=True), variant()))) - plain == {"trees of tokens"}


@pytest.mark.parametrize("spec", [SPEC, H200_LAYER, AttentionSpec(16, 16, 192, v_head_dim=128)])
def test_offsets_are_past_what_32_bits_hold(spec: AttentionSpec) -> None:
    past = {case.past: case for case in cases_of(spec, variant(spec, num_segments=16)) if case.past}
    dim = min(spec.head_dim, spec.value_dim)
    assert past["q"].batch.num_tokens * spec.num_q_heads * dim > 2**31
    assert sum(past["cache"].batch.kv_lens) * spec.num_kv_heads * dim > 2**31
    assert past["partials"].batch.num_tokens * spec.num_q_heads * spec.value_dim * 16 > 2**31
    assert min(context_len for _, context_len in past["partials"].batch.sequences) >= 16 * LARGEST_TILE
    assert not any(case.skip for case in past.values())


def test_partial_results_that_stay_few_are_not_asked_for() -> None:
    assert [case.past for case in cases_of(SPEC, variant(num_segments=1)) if case.skip] == ["partials"]


def test_a_log_sum_exp_is_asked_only_of_templates_that_write_it() -> None:
    likely = candidates(H200_LAYER, BatchBucket.of(Batch.parse("4x1@99")), 16, TARGETS["sm_90"])
    skipped = {
        v.template: {case.name for case in cases_of(H200_LAYER, v) if case.skip == "its template writes none"}
        for v in likely
    }
    without = {"log-sum-exp", "log-sum-exp, large batch"}
    assert skipped == {"gluon_hopper": without, "fused": set(), "persistent": set()}


@pytest.mark.parametrize(("template", "writes_lse"), [("gluon_hopper", False), ("fused", True)])
def test_the_same_call_twice_gives_the_same_log_sum_exp_where_there_is_one(template: str, writes_lse: bool) -> None:
    likely = candidates(H200_LAYER, BatchBucket.of(Batch.parse("4x1@99")), 16, TARGETS["sm_90"])
    twice = [
        case for v in likely if v.template == template for case in cases_of(H200_LAYER, v) if case.way == "twice"
    ]
    assert twice
    assert all(case.lse == writes_lse and not case.skip for case in twice)


def test_a_fixed_split_cuts_short_and_long_sequences() -> None:
    sequences = named(cases_of(SPEC, variant()))["a fixed split"].batch.sequences
    short_keys, long_keys = (
        [sum(sequence) for sequence in sequences if (sequence[0] > SHORT_QUERY) == is_long] for is_long in (False, True)
    )
    for keys, most in zip((short_keys, long_keys), FIXED_SPLIT, strict=True):
        assert max(keys) > most
    assert min(short_keys) < FIXED_SPLIT[0]



def test_the_interpreter_takes_seconds_for_a_small_layer() -> None:
    smallest = variant(block_n=16)
    assert 2 < interpreted_check_seconds(SPEC, smallest) < 20
    refuse_slow(SPEC, smallest, INTERPRETER)


def test_a_layer_that_is_too_large_for_the_interpreter_is_refused_with_the_estimate() -> None:
    large = AttentionSpec(64, 64, 128)
    with pytest.raises(InputError, match=r"it would take about \d+ s a variant"):
        refuse_slow(large, variant(large, 32768), INTERPRETER)
    refuse_slow(large, variant(large, 32768), TARGETS["sm_90"])
