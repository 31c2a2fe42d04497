from __future__ import annotations

import itertools

import numpy as np
import optuna
import pytest

from attention_tuner.tuner.sampling import ranking_sampler
from attention_tuner.tuner.sampling.pool_sampler import FREE, NUMBER, Rows
from attention_tuner.tuner.sampling.ranking_sampler import FEWEST, POLISH_EVERY, RankingSampler

CODES = np.array([(t, a, b) for t, a, b in itertools.product(range(2), range(8), range(8))], np.int8)


class Last(RankingSampler):
    """Ranks the last candidates first, and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(CODES, 0)
        self.fits: list[int] = []
        self.ranked: list[list[int]] = []

    def fit(self, ended: Rows) -> None:
        self.fits.append(len(ended))

    def scores(self, rows: Rows) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        self.ranked.append(rows.tolist())
        return rows.astype(float)


def explore(sampler: RankingSampler, trials: int, best: int = 0) -> list[int]:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=sampler)
    chosen: list[int] = []
    for _ in range(trials):
        trial = study.ask()
        chosen.append(trial.suggest_int(NUMBER, 0, len(CODES) - 1))
        study.tell(trial, float(np.count_nonzero(CODES[chosen[-1]] != CODES[best])))
    return chosen


def test_templates_take_turns_until_there_is_something_to_rank_by() -> None:
    sampler = Last()
    chosen = explore(sampler, FEWEST + 1)
    assert np.bincount(CODES[chosen[:FEWEST], 0]).tolist() == [FEWEST // 2] * 2
    assert len(sampler.ranked) == 1
    assert chosen[-1] == len(CODES) - 1


def test_now_and_then_a_variation_of_the_best_is_chosen() -> None:
    sampler = Last()
    chosen = explore(sampler, 40)
    losses = [np.count_nonzero(CODES[row] != CODES[0]) for row in chosen]
    for count in range(FEWEST, 40):
        best = [row for row, loss in zip(chosen[:count], losses, strict=False) if loss == min(losses[:count])]
        if len(sampler.ranked[count - FEWEST]) < 15:
            assert any(np.count_nonzero(CODES[chosen[count]] != CODES[row]) == 1 for row in best)
    polished = [len(rows) < 15 for rows in sampler.ranked]
    assert sum(polished) == pytest.approx(30 / POLISH_EVERY, abs=1)


def test_a_model_is_fitted_as_trials_grow_by_a_share() -> None:
    sampler = Last()
    explore(sampler, 100)
    assert sampler.fits[:3] == [10, 11, 12]
    assert np.diff(sampler.fits).max() == 5


def test_of_a_large_pool_some_are_ranked_and_the_variations_of_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking_sampler, "MOST_RANKED", 5)
    sampler = Last()
    chosen = explore(sampler, FEWEST + 1)
    best = min(chosen[:FEWEST], key=lambda row: np.count_nonzero(CODES[row] != CODES[0]))
    near = set(np.flatnonzero((np.count_nonzero(CODES[best] != CODES, axis=1) == 1) & (CODES[:, 0] == CODES[best, 0])))
    assert near - set(chosen[:FEWEST]) <= set(sampler.ranked[0])
    assert len(sampler.ranked[0]) < len(CODES) - FEWEST
    chosen = explore(sampler := Last(), len(CODES))
    assert sorted(chosen) == list(range(len(CODES)))
    assert not (sampler.state[chosen[:-1]] == FREE).any()
