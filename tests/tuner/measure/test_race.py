from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_tuner.kernel_templates.outcome import Regime, Timing, Verdict
from attention_tuner.kernel_templates.registry import templates
from attention_tuner.kernel_templates.variant import Value, Variant
from attention_tuner.tuner.measure.race import (
    DRIFT,
    TIE,
    balanced_orders,
    choose,
    compare,
    num_comparisons,
    rounds_needed,
    simplicity,
    sound_blocks,
)

DEFAULT = Variant.of("unified", 16, {"block_m": 16, "block_n": 32, "num_segments": 1, "num_warps": 4})
SPLIT = DEFAULT.replace(num_segments=8)
WIDE = DEFAULT.replace(num_warps=8)
TALL = DEFAULT.replace(block_m=64)
VARIANTS = (DEFAULT, SPLIT, WIDE, TALL)


def timing(samples: Sequence[float]) -> Timing:
    return Timing(tuple(samples), Regime("graph"))


def race(
    medians: dict[Variant, float], rounds: int = 40, noise: float = 0.003, seed: int = 0, drift: float = 0.0
) -> dict[Variant, Timing]:
    """Samples whose noise is each variant's own, and whose drift is common to a round."""
    draw = random.Random(seed)
    common = [1 + drift * draw.random() for _ in range(rounds)]
    return {v: timing([ms * c * math.exp(draw.gauss(0, noise)) for c in common]) for v, ms in medians.items()}


def test_the_interval_is_that_of_the_sign_test() -> None:
    # Conover's table of the binomial: with 10 pairs, ranks 2 and 9 enclose the median with 97.9 %.
    a = timing([math.exp(i) for i in range(10)])
    interval = compare(a, timing([1.0] * 10), alpha=0.05)
    assert (interval.median, interval.low, interval.high) == pytest.approx((4.5, 1, 8))
    wider = compare(a, timing([1.0] * 10), alpha=0.01)
    assert (wider.low, wider.high) == pytest.approx((0, 9))


def test_the_interval_agrees_with_scipy() -> None:
    from scipy.stats import quantile_test

    draw = random.Random(5)
    for count in (6, 9, 20, 61, 200):
        ratios = [draw.gauss(0, 1) for _ in range(count)]
        interval = compare(timing([math.exp(r) for r in ratios]), timing([1.0] * count), alpha=0.05)
        expected = quantile_test(ratios, q=0, p=0.5).confidence_interval(0.95)
        assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high))


def test_too_few_pairs_decide_nothing() -> None:
    interval = compare(timing([1.0] * 5), timing([2.0] * 5), alpha=0.05)
    assert interval.low == -math.inf
    assert interval.high == math.inf
    assert rounds_needed(0.05) == 6
    assert choose({DEFAULT: timing([2.0] * 5), TALL: timing([1.0] * 5)}, DEFAULT) == (DEFAULT, Verdict.AMBIGUOUS)


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=60), st.floats(0.1, 10))
def test_comparing_is_antisymmetric_and_free_of_scale(pairs: list[tuple[float, float]], scale: float) -> None:
    a, b = timing([x for x, _ in pairs]), timing([y for _, y in pairs])
    forth, back = compare(a, b), compare(b, a)
    assert (forth.median, forth.low, forth.high) == pytest.approx((-back.median, -back.high, -back.low))
    scaled = compare(timing([x * scale for x, _ in pairs]), timing([y * scale for _, y in pairs]))
    assert scaled.median == pytest.approx(forth.median, abs=1e-9)
    assert forth.low <= forth.median <= forth.high


def test_equal_variants_are_called_different_no_more_often_than_promised() -> None:
    wrong = 0
    for seed in range(2000):
        times = race({DEFAULT: 1.0, TALL: 1.0}, rounds=20, noise=0.05, seed=seed)
        interval = compare(times[DEFAULT], times[TALL], alpha=0.05)
        wrong += interval.low > 0 or interval.high < 0
    # The test is discrete: at 20 pairs it misses with 4.1 %, 83 of 2,000; four standard deviations are 36.
    assert 47 <= wrong <= 119


def test_a_winner_that_is_no_faster_is_seldom_declared_however_many_race() -> None:
    wrong = 0
    entrants = [DEFAULT.replace(block_m=m, num_warps=w) for m in (16, 32, 64) for w in (1, 2, 4)]
    for seed in range(300):
        chosen, _ = choose(race(dict.fromkeys(entrants, 1.0), rounds=30, noise=0.05, seed=seed), DEFAULT)
        wrong += chosen != DEFAULT
    assert wrong <= 15


def test_a_clear_winner_is_fast() -> None:
    assert choose(race({DEFAULT: 1.0, SPLIT: 0.9, TALL: 0.5}), DEFAULT) == (TALL, Verdict.FAST)


def test_drift_common_to_a_round_does_not_hide_a_difference() -> None:
    times = race({DEFAULT: 1.0, TALL: 0.98}, drift=0.3)
    assert choose(times, DEFAULT) == (TALL, Verdict.FAST)


def test_of_those_that_tie_the_simplest_is_kept() -> None:
    times = race({DEFAULT: 1.0, SPLIT: 0.5, WIDE: 0.5005, TALL: 0.5002}, rounds=60, noise=0.0005)
    assert choose(times, DEFAULT) == (TALL, Verdict.TIE)


def test_what_is_undecided_is_said_to_be() -> None:
    times = race({DEFAULT: 1.0, SPLIT: 0.5, TALL: 0.501}, rounds=30, noise=0.05)
    chosen, verdict = choose(times, DEFAULT)
    assert chosen in (SPLIT, TALL)
    assert verdict is Verdict.AMBIGUOUS


def test_the_default_is_kept_against_one_that_may_be_slower() -> None:
    times = race({DEFAULT: 1.0, TALL: 0.99}, rounds=20, noise=0.1)
    assert choose(times, DEFAULT) == (DEFAULT, Verdict.AMBIGUOUS)
    assert choose(race({DEFAULT: 1.0}), DEFAULT) == (DEFAULT, Verdict.TIE)
    assert choose(race({DEFAULT: 0.5, TALL: 1.0}), DEFAULT) == (DEFAULT, Verdict.FAST)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.floats(0.8, 1.2), min_size=len(VARIANTS), max_size=len(VARIANTS)),
    st.integers(1, 40), st.floats(0, 0.1), st.integers(0, 1000),
)  # fmt: skip
def test_what_is_chosen_was_never_slower_than_the_default(
    medians: list[float], rounds: int, noise: float, seed: int
) -> None:
    times = race(dict(zip(VARIANTS, medians, strict=True)), rounds, noise, seed)
    chosen, _ = choose(times, DEFAULT)
    assert compare(times[chosen], times[DEFAULT]).median <= 0


def variant(name: str, **changes: Value) -> Variant:
    """A variant of the template called `name`: the first choices, with `changes`."""
    return Variant.of(name, 16, {d.name: d.choices[0] for d in templates()[name].dimensions} | changes)


def test_simplicity_is_in_the_order_of_the_design() -> None:
    sizes = {"block_m": 64, "block_n": 32, "decode_block_m": 16, "decode_block_n": 32, "num_warps": 4}
    base = variant("fused", **sizes)
    ordered = [
        base,
        base.replace(block_m=128),
        base.replace(num_warps=8, block_m=16),
        base.replace(kv_load="tma", num_warps=1),
        base.replace(waves=1, num_warps=1),
        base.replace(waves=2, block_m=16),
    ]
    assert sorted(ordered, key=simplicity) == ordered
    split = base.replace(waves=2)
    alike = [split, split.replace(schedule="interleaved"), split.replace(partials="bfloat16")]
    assert sorted(alike, key=simplicity) == alike
    # The last program of a tile merges: one launch, though there are more segments.
    assert simplicity(split.replace(waves=8, reduction="last_program")) < simplicity(split)
    two = variant("two_launch", **sizes, decode_num_warps=4)
    assert simplicity(base) < simplicity(two)
    alone = two.replace(decode_block_m=64)
    assert simplicity(alone)[0] == 1
    assert simplicity(SPLIT) > simplicity(DEFAULT)
    assert TIE > 0
    assert num_comparisons(9) == 36


def test_variants_of_different_templates_compare_by_traits_that_are_no_dimensions() -> None:
    tiles = {"block_m": 128, "block_n": 128, "decode_block_m": 16, "decode_block_n": 128, "num_warps": 8}
    fused, hopper = variant("fused", **tiles, kv_load="tma"), variant("gluon_hopper")
    # The Hopper kernel merges partial results without waves, too, and has nine warps.
    ordered = [fused.replace(kv_load="pointer"), fused, hopper, hopper.replace(block_n=128), hopper.replace(waves=1)]
    assert sorted(ordered, key=simplicity) == ordered


@given(st.integers(1, 12), st.integers(0, 1000))
def test_each_has_every_place_and_follows_every_other_equally_often(count: int, seed: int) -> None:
    orders = balanced_orders(count, seed)
    squares = 1 + count % 2
    assert len(orders) == squares * count
    assert all(sorted(order) == list(range(count)) for order in orders)
    places = Counter(each for order in orders for each in enumerate(order))
    assert set(places.values()) == {squares}
    follows = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert set(follows) == set(itertools.permutations(range(count), 2))
    assert set(follows.values()) <= {squares}


def test_orders_are_drawn_by_the_seed() -> None:
    assert balanced_orders(6, 1) == balanced_orders(6, 1)
    assert len({tuple(balanced_orders(6, seed)) for seed in range(50)}) == 50
    assert {balanced_orders(6, seed)[0][0] for seed in range(50)} == set(range(6))


BLOCKS = st.lists(st.tuples(st.floats(0.09, 0.11), st.booleans()), min_size=1, max_size=20)


@given(BLOCKS, st.floats(0.1, 10), st.randoms())
def test_blocks_are_judged_each_by_itself_and_free_of_scale(
    blocks: list[tuple[float, bool]], scale: float, draw: random.Random
) -> None:
    judged = list(zip(blocks, sound_blocks(*zip(*blocks, strict=True)), strict=True))
    by_block = dict(judged)
    draw.shuffle(blocks)
    assert sound_blocks(*zip(*blocks, strict=True)) == tuple(by_block[block] for block in blocks)
    # A block that is within rounding of the limit may fall on either side once it is scaled.
    steady = [ms for ms, hot in blocks if not hot]
    middle = statistics.median_low(steady) if steady else 0.1
    if all(abs(abs(math.log(ms / middle)) - DRIFT) > 1e-9 for ms, _ in blocks):
        scaled = [(ms * scale, hot) for ms, hot in blocks]
        assert sound_blocks(*zip(*scaled, strict=True)) == sound_blocks(*zip(*blocks, strict=True))


@given(BLOCKS)
def test_no_throttled_block_counts_and_one_of_the_others_always_does(blocks: list[tuple[float, bool]]) -> None:
    sentinels, throttled = zip(*blocks, strict=True)
    sound = sound_blocks(sentinels, throttled)
    assert not any(ok and hot for ok, hot in zip(sound, throttled, strict=True))
    assert any(sound) is not all(throttled)
    counted = [ms for ms, ok in zip(sentinels, sound, strict=True) if ok]
    assert not counted or max(counted) / min(counted) <= math.exp(2 * DRIFT) * (1 + 1e-9)


def test_a_block_counts_up_to_one_and_a_half_percent_from_the_median() -> None:
    sentinels = [0.1, 0.1014, 0.1016, 0.0986, 0.0984, 0.1, 0.1]
    assert sound_blocks(sentinels, [False] * 7) == (True, True, False, True, False, True, True)
    assert sound_blocks([0.1, 0.2, 0.2], [False, True, True]) == (True, False, False)
