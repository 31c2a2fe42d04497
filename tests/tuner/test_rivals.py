from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from portfolio_samples import DEFAULT, ENVIRONMENT, GPU, SMALL, A, B, C, add_outcomes, add_trials, best_config

from attention_tuner.db import Store
from attention_tuner.kernel_templates.gpu import Gpu
from attention_tuner.kernel_templates.outcome import Failed
from attention_tuner.tuner.rivals import one_step, rivals

BEST = best_config(SMALL, B)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "tuner.db") as opened:
        yield opened


def test_one_step_is_one_dimension_by_one_choice() -> None:
    # B has tiles of 16 rows and 64 keys, two segments, one stage and one warp.
    assert set(one_step(B, BEST, GPU)) == {
        B.replace(block_m=32), B.replace(block_n=32), B.replace(block_n=128), B.replace(num_segments=1),
        B.replace(num_segments=4), B.replace(num_stages=2), B.replace(num_warps=2)}
    fused = next(v for v in _fused())
    near = set(one_step(fused, BEST, GPU))
    # Of dimensions without an order every other choice is one step away; tiles of long rows follow those of short ones.
    assert fused.replace(order="heads") in near
    assert fused.replace(block_m=32, decode_block_m=32) in near
    assert all(v.number("block_m") == v.number("decode_block_m") for v in near)
    small = Gpu("small", (8, 0), 10, 16 << 10, 1 << 20)
    assert len(set(one_step(B, BEST, small))) < 7


def _fused():
    from attention_tuner.kernel_templates.variant import Variant

    yield Variant.of("fused", 16, {
        "block_m": 16, "block_n": 32, "decode_block_m": 16, "decode_block_n": 32, "num_warps": 4, "num_stages": 2,
        "kv_load": "pointer", "order": "items", "waves": 2, "long_weight": 1, "schedule": "long_first",
        "partials": "float32", "reduction": "kernel"})


def test_the_default_and_the_runners_up_come_before_the_neighbours(store: Store) -> None:
    before = replace(ENVIRONMENT, driver="before")
    add_trials(store, SMALL, {DEFAULT: 4.0, A: 1.2, B: 1.0, C: 1.1, B.replace(num_warps=2): 1.3}, environment=before)
    found = rivals(BEST, store, GPU, 20)
    assert found[:5] == [DEFAULT, B, C, A, B.replace(num_warps=2)]
    # The rest was never timed: what needs no other kernel than the winner's comes first.
    assert found[5] == B.replace(num_segments=1)
    assert len(found) == len(set(found))
    assert rivals(BEST, store, GPU, 3) == [DEFAULT, B, C]


def test_what_failed_last_or_is_of_another_batch_is_no_runner_up(store: Store) -> None:
    add_trials(store, SMALL, {A: 1.2, C: 1.1})
    add_outcomes(store, SMALL, Failed(C, "time", "an illegal access"))
    assert rivals(BEST, store, GPU, 3) == [DEFAULT, B, A]


def test_what_cannot_run_here_is_no_rival(store: Store) -> None:
    gone = replace(A, template="gone")
    add_trials(store, SMALL, {gone: 0.5})
    assert gone not in rivals(BEST, store, GPU, 20)
