from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_tuner.kernel_templates.outcome import Regime, Timing
from attention_tuner.tuner.measure.blocks import (
    BLOCK_ROUNDS,
    TURN_MS,
    WARM_UP_S,
    Course,
    equal_turns,
    expected_s,
    run_blocks,
)
from attention_tuner.tuner.measure.race import compare


class FakeGpu:
    """A GPU whose time is its own: a turn takes 10 ms, the sentinel 1 ms; `slow` says by how much it is at a time."""

    def __init__(self, slow: Callable[[float], float] = lambda now: 1.0) -> None:
        self.now = 0.0
        self.slow = slow
        self.turns: list[str] = []
        self.sentinels = 0
        self.hot: tuple[float, float] = (-1.0, -1.0)

    def turn(self, entrant: str) -> float:
        self.now += 0.01
        self.turns.append(entrant)
        return self.slow(self.now) * (1 + "abcdefghij".index(entrant))

    def sentinel(self) -> float:
        self.now += 0.001
        self.sentinels += 1
        return 0.1 * self.slow(self.now)

    def throttled(self, start_s: float, end_s: float) -> bool:
        return start_s <= self.hot[1] and end_s >= self.hot[0]

    def course(self) -> Course[str]:
        return Course(self.turn, self.sentinel, self.throttled, lambda: self.now)


def test_without_a_sentinel_rounds_are_run_and_nothing_more() -> None:
    gpu = FakeGpu()
    raced = run_blocks(Course(gpu.turn), "abc", 7, seed=1)
    assert len(gpu.turns) == 21
    assert raced.samples_ms == {"a": (1.0,) * 7, "b": (2.0,) * 7, "c": (3.0,) * 7}
    assert (raced.blocks, raced.discarded, raced.sentinels_ms) == (3, 0, ())


def test_a_steady_gpu_is_warmed_up_and_every_block_counts() -> None:
    gpu = FakeGpu()
    raced = run_blocks(gpu.course(), "ab", 6, seed=1)
    assert raced.samples_ms == {"a": (1.0,) * 6, "b": (2.0,) * 6}
    assert raced.sentinels_ms == (0.1, 0.1)
    assert (raced.blocks, raced.discarded) == (2, 0)
    assert gpu.sentinels == 3  # the first only makes it
    assert len(gpu.turns) - 12 == pytest.approx(WARM_UP_S / 0.01, abs=1)


def test_a_block_that_ran_slow_is_run_again_in_its_own_orders() -> None:
    block_s = BLOCK_ROUNDS * 3 * 0.01 + 0.001
    begin = WARM_UP_S + 1.5 * block_s
    gpu = FakeGpu(lambda now: 1.05 if begin < now <= begin + block_s else 1.0)
    raced = run_blocks(gpu.course(), "abc", 4 * BLOCK_ROUNDS, seed=2)
    assert raced.blocks == 4
    assert 1 <= raced.discarded <= 2
    assert len(raced.sentinels_ms) == 4 + raced.discarded
    assert raced.sentinels_ms.count(0.1) == 4
    # Those of the block that was thrown away are not among them, though samples of a neighbour may be.
    assert all(len(samples) == 4 * BLOCK_ROUNDS for samples in raced.samples_ms.values())
    per_block = BLOCK_ROUNDS * 3
    recorded = gpu.turns[-per_block * (4 + raced.discarded):]
    blocks = [recorded[i : i + per_block] for i in range(0, len(recorded), per_block)]
    assert all(blocks.count(again) >= 2 for again in blocks[4:])


def test_throttling_discards_a_block_whose_sentinel_says_nothing() -> None:
    gpu = FakeGpu()
    gpu.hot = (WARM_UP_S, WARM_UP_S + 0.03)
    raced = run_blocks(gpu.course(), "ab", 9, seed=3)
    assert (raced.blocks, raced.discarded) == (3, 1)
    assert len(raced.sentinels_ms) == 4


def test_blocks_are_run_again_no_more_often_than_were_asked_for() -> None:
    gpu = FakeGpu()
    gpu.hot = (0, math.inf)
    raced = run_blocks(gpu.course(), "ab", 9, seed=3)
    assert (raced.blocks, raced.discarded, len(raced.sentinels_ms)) == (3, 6, 6)
    assert len(raced.samples_ms["a"]) == 18


def test_no_block_is_run_again_that_would_end_too_late() -> None:
    gpu = FakeGpu()
    gpu.hot = (0, math.inf)
    patience_s = WARM_UP_S + 3 * 0.061 + 0.1
    raced = run_blocks(gpu.course(), "ab", 9, seed=3, patience_s=patience_s)
    assert (raced.blocks, raced.discarded) == (3, 4)
    assert gpu.now <= patience_s


@given(
    st.integers(1, 9), st.integers(1, 30), st.integers(0, 99),
    st.lists(st.floats(0.95, 1.05), min_size=1, max_size=40), st.floats(0, 3),
)  # fmt: skip
def test_whatever_the_gpu_does_samples_stay_paired_and_blocks_add_up(
    entrants: int, rounds: int, seed: int, speeds: list[float], hot_s: float
) -> None:
    gpu = FakeGpu(lambda now: speeds[int(now * 20) % len(speeds)])
    gpu.hot = (0, hot_s)
    raced = run_blocks(gpu.course(), "abcdefghij"[:entrants], rounds, seed)
    counts = {len(samples) for samples in raced.samples_ms.values()}
    assert len(counts) == 1
    assert raced.blocks <= len(raced.sentinels_ms) <= 2 * raced.blocks
    kept = len(raced.sentinels_ms) - raced.discarded
    assert 0 <= kept <= raced.blocks
    if kept == raced.blocks:
        assert counts == {rounds}
    elif kept:
        assert counts.pop() < rounds


def test_a_hot_neighbour_is_no_disadvantage_and_power_that_rises_hides_nothing() -> None:
    """Two variants are equal, a third is half a percent slower, and one heats the GPU for whoever comes next."""
    draw = random.Random(7)
    true_ms = {"a": 1.0, "b": 1.0, "c": 1.005, "d": 1.3}
    last = {"": 0.0}

    def turn(entrant: str) -> float:
        last["now"] = last.get("now", 0.0) + 0.004
        power = 1 + 0.06 * (1 - math.exp(-last["now"] / 0.5))
        after_hot = 1.003 if last.get("heat") else 1.0
        last["heat"] = entrant == "d"
        return true_ms[entrant] * power * after_hot * math.exp(draw.gauss(0, 0.0005))

    raced = run_blocks(Course(turn), "abcd", 48, seed=0)
    timings = {entrant: Timing(samples, Regime("graph")) for entrant, samples in raced.samples_ms.items()}
    assert compare(timings["a"], timings["b"]).is_tie
    interval = compare(timings["a"], timings["c"])
    assert interval.is_faster
    assert interval.median == pytest.approx(-math.log(1.005), abs=0.0005)


@given(st.lists(st.floats(0.2, 20), min_size=1, max_size=10))
def test_turns_are_about_equally_long(lengths: list[float]) -> None:
    named = dict(enumerate(lengths))
    counts = equal_turns(named)
    turn_ms = max(TURN_MS, statistics.median_high(lengths))
    for entrant, length in named.items():
        # Half a sample is the most that a turn is off by; one sample is the least.
        assert counts[entrant] >= 1
        assert abs(counts[entrant] * length - turn_ms) <= length / 2 + 1e-9 or counts[entrant] == 1


def test_turns_of_short_samples_are_within_a_fifth() -> None:
    counts = equal_turns({ms: ms for ms in (0.2, 0.25, 0.3, 0.35, 0.4)})
    assert all(abs(count * ms - TURN_MS) <= TURN_MS / 5 + 1e-9 for ms, count in counts.items())


def test_a_race_is_expected_to_take_two_equal_halves_a_turn() -> None:
    assert expected_s([0.05, 0.06], rounds=10) == pytest.approx(WARM_UP_S + 10 * 2 * 2 * TURN_MS / 1e3)
    assert expected_s([2.0, 2.0, 9.0], rounds=10) == pytest.approx(WARM_UP_S + 10 * 2 * (2 + 2 + 9) / 1e3)
