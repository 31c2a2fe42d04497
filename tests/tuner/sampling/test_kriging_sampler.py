from __future__ import annotations

import itertools

import numpy as np
import pytest

from attention_tuner.tuner.sampling.kriging_sampler import MOST_EXPECTED, KrigingSampler
from attention_tuner.tuner.sampling.pool_sampler import BAD, PENDING, TIMED

CODES = np.array([(t, a, b) for t, a, b in itertools.product(range(2), range(8), range(8))], np.int8)
VALUES = CODES @ np.array([0.5, 0.2, 0.1])


def sampler_that_knows(rows: list[int]) -> KrigingSampler:
    sampler = KrigingSampler(CODES, 0)
    sampler.state[rows], sampler.values[rows] = TIMED, VALUES[rows]
    return sampler


def test_it_expects_improvement_where_the_trend_leads() -> None:
    known = [row for row in range(len(CODES)) if CODES[row, 1] >= 3 and row % 2]
    sampler = sampler_that_knows(known)
    assert VALUES[sampler.choose()] < VALUES[known].min()


def test_what_is_pending_is_neither_chosen_again_nor_crowded() -> None:
    sampler = sampler_that_knows(list(range(1, len(CODES), 5)))
    chosen: list[int] = []
    for _ in range(12):
        chosen.append(sampler.choose())
        sampler.state[chosen[-1]] = PENDING
    assert len(set(chosen)) == 12
    assert len({tuple(CODES[row, 1:]) for row in chosen}) >= 6


def test_what_has_no_time_counts_as_slow() -> None:
    sampler = sampler_that_knows(list(range(0, len(CODES), 4)))
    bad = [row for row in range(len(CODES)) if CODES[row, 0] == 0 and CODES[row, 1] == 0 and row % 4]
    free = sampler.scores(np.array([1]))
    sampler.state[bad[1:]] = BAD
    assert sampler.scores(np.array([1])) < free


@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_what_is_expected_is_held_against_what_was_timed_here(shift: float) -> None:
    sampler = KrigingSampler(CODES, 0)
    sampler.expect(np.where(np.arange(len(CODES)) % 3, VALUES, np.nan))
    assert sampler.is_informed
    first = sampler.choose()
    assert VALUES[first] <= np.quantile(VALUES, 0.1)
    rows = [first, 100, 101, 50]
    sampler.state[rows], sampler.values[rows] = TIMED, VALUES[rows] + shift
    assert sampler._best(np.array(rows)) == pytest.approx(shift)
    assert VALUES[sampler.choose()] <= np.quantile(VALUES, 0.1)


def test_of_very_much_that_is_expected_the_fastest_and_some_others_are_remembered() -> None:
    codes = np.array([(0, a, b) for a, b in itertools.product(range(30), repeat=2)], np.int8)
    ratios = codes @ np.array([0.0, 1.0, 0.1])
    sampler = KrigingSampler(codes, 0)
    sampler.expect(ratios)
    kept = np.sort(ratios[sampler._expected])
    assert len(kept) == 2 * MOST_EXPECTED
    assert kept[:MOST_EXPECTED] == pytest.approx(np.sort(ratios)[:MOST_EXPECTED])
    sampler.expect(np.full(len(codes), np.nan))
    assert not sampler.is_informed
