from __future__ import annotations

import itertools

import numpy as np

from attention_tuner.tuner.sampling.forest_sampler import ForestSampler
from attention_tuner.tuner.sampling.pool_sampler import BAD, PENDING, TIMED

CODES = np.array([(t, a, b) for t, a, b in itertools.product(range(2), range(8), range(8))], np.int8)
VALUES = CODES @ np.array([2.0, 0.2, 0.1])


def sampler_that_knows(rows: list[int]) -> ForestSampler:
    sampler = ForestSampler(CODES, 0)
    sampler.state[rows], sampler.values[rows] = TIMED, VALUES[rows]
    return sampler


def test_it_chooses_where_the_best_are() -> None:
    sampler = sampler_that_knows(list(range(1, len(CODES), 5)))
    assert VALUES[sampler.choose()] <= np.quantile(VALUES, 0.15)


def test_it_keeps_away_from_what_is_bad() -> None:
    sampler = sampler_that_knows(list(range(65, len(CODES), 3)))
    sampler.state[0:64:3] = BAD
    assert CODES[sampler.choose(), 0] == 1


def test_neighbours_of_what_is_pending_are_worth_less() -> None:
    sampler = sampler_that_knows(list(range(1, len(CODES), 5)))
    chosen = sampler.choose()
    near, far = sampler.variations(chosen), np.array([127])
    before = sampler.scores(near), sampler.scores(far)
    sampler.state[chosen] = PENDING
    assert (sampler.scores(near) == before[0] / 2).all()
    assert (sampler.scores(far) == before[1]).all()


def test_with_nothing_to_tell_the_best_apart_all_of_them_count_alike() -> None:
    sampler = ForestSampler(CODES, 0)
    sampler.state[:20] = TIMED
    assert sampler.choose() >= 20
