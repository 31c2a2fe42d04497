from __future__ import annotations

import itertools

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState

from attention_tuner.tuner.sampling import kriging
from attention_tuner.tuner.sampling.gaussian_process import Array
from attention_tuner.tuner.sampling.kriging import (
    BAD,
    FEWEST,
    FREE,
    MOST_EXPECTED,
    NUMBER,
    PENDING,
    POLISH_EVERY,
    TIMED,
    Codes,
    KrigingSampler,
    Rows,
)

# Two templates, two dimensions of eight values.
CODES = np.array([(t, a, b) for t, a, b in itertools.product(range(2), range(8), range(8))], np.int8)
VALUES = CODES @ np.array([0.5, 0.2, 0.1])


def sampler_that_knows(rows: list[int]) -> KrigingSampler:
    sampler = KrigingSampler(CODES, 0)
    sampler.state[rows], sampler.values[rows] = TIMED, VALUES[rows]
    return sampler


class RanksLast(KrigingSampler):
    """Ranks the last candidates first without a model, and records what it ranked and when it would have fitted."""

    def __init__(self) -> None:
        super().__init__(CODES, 0)
        self.fits: list[int] = []
        self.ranked: list[list[int]] = []
        self._process.fit = lambda x, losses: self.fits.append(len(losses))

    def scores(self, rows: Rows) -> Array:
        self.ranked.append(rows.tolist())
        return rows.astype(float)


def study_of(sampler: KrigingSampler) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(sampler=sampler)


def ask(study: optuna.Study) -> optuna.Trial:
    trial = study.ask()
    trial.suggest_int(NUMBER, 0, len(CODES) - 1)
    return trial


def explore(sampler: KrigingSampler, trials: int, best: int = 0) -> list[int]:
    """The candidates chosen; the value of each is the number of columns in which it differs from `best`."""
    study = study_of(sampler)
    chosen: list[int] = []
    for _ in range(trials):
        trial = ask(study)
        chosen.append(trial.params[NUMBER])
        study.tell(trial, float(np.count_nonzero(CODES[chosen[-1]] != CODES[best])))
    return chosen


def test_it_expects_improvement_where_the_trend_leads() -> None:
    known = [row for row in range(len(CODES)) if CODES[row, 1] >= 3 and row % 2]
    sampler = sampler_that_knows(known)
    assert VALUES[sampler.choose()] < VALUES[known].min()


def test_pending_candidates_are_not_chosen_again_and_their_neighbours_are_spread() -> None:
    sampler = sampler_that_knows(list(range(1, len(CODES), 5)))
    chosen: list[int] = []
    for _ in range(12):
        chosen.append(sampler.choose())
        sampler.state[chosen[-1]] = PENDING
    assert len(set(chosen)) == 12
    assert len({tuple(CODES[row, 1:]) for row in chosen}) >= 6


def test_a_candidate_without_a_time_counts_as_slow() -> None:
    sampler = sampler_that_knows(list(range(0, len(CODES), 4)))
    bad = [row for row in range(len(CODES)) if CODES[row, 0] == 0 and CODES[row, 1] == 0 and row % 4]
    free = sampler.scores(np.array([1]))
    sampler.state[bad[1:]] = BAD
    assert sampler.scores(np.array([1])) < free


@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_expected_ratios_are_compared_with_the_times_measured_here(shift: float) -> None:
    sampler = KrigingSampler(CODES, 0)
    sampler.expect(np.where(np.arange(len(CODES)) % 3, VALUES, np.nan))
    first = sampler.choose()
    assert VALUES[first] <= np.quantile(VALUES, 0.1)
    rows = [first, 100, 101, 50]
    sampler.state[rows], sampler.values[rows] = TIMED, VALUES[rows] + shift
    assert sampler._best_here(np.array(rows)) == pytest.approx(shift)
    assert VALUES[sampler.choose()] <= np.quantile(VALUES, 0.1)


def test_of_many_expected_ratios_the_fastest_and_some_others_are_used() -> None:
    codes: Codes = np.array([(0, a, b) for a, b in itertools.product(range(30), repeat=2)], np.int8)
    ratios = codes @ np.array([0.0, 1.0, 0.1])
    sampler = KrigingSampler(codes, 0)
    sampler.expect(ratios)
    kept = np.sort(ratios[sampler._expected])
    assert len(kept) == 2 * MOST_EXPECTED
    assert kept[:MOST_EXPECTED] == pytest.approx(np.sort(ratios)[:MOST_EXPECTED])


def test_it_knows_every_trial_of_the_study_whoever_asked() -> None:
    sampler = KrigingSampler(CODES)
    study = study_of(sampler)
    for number in (2, 0, 1, 3):
        study.enqueue_trial({NUMBER: number})
    _, timed, bad, failed = (ask(study) for _ in range(4))
    study.tell(timed, 0.5)
    bad.set_constraint("valid", 1.0)
    study.tell(bad, 9.0)
    study.tell(failed, state=TrialState.FAIL)
    study.add_trial(optuna.create_trial(params={NUMBER: 7}, distributions=timed.distributions, value=3.0))
    chosen = ask(study).params[NUMBER]
    assert chosen not in (2, 0, 1, 7)
    assert sampler.state[[2, 0, 1, 7]].tolist() == [PENDING, TIMED, BAD, TIMED]
    assert sampler.values[[0, 7]].tolist() == [0.5, 3.0]


def test_variations_are_free_and_differ_in_one_dimension_of_the_same_template() -> None:
    sampler = KrigingSampler(np.array([[0, 0, 0], [0, 0, 3], [0, 1, 1], [1, 0, 0], [0, 2, 0]], np.int8))
    assert sampler.variations(0).tolist() == [1, 4]
    sampler.state[4] = TIMED
    assert sampler.variations(0).tolist() == [1]


def test_templates_take_turns_until_there_are_enough_trials_to_rank_by() -> None:
    sampler = RanksLast()
    chosen = explore(sampler, FEWEST + 1)
    assert np.bincount(CODES[chosen[:FEWEST], 0]).tolist() == [FEWEST // 2] * 2
    assert len(sampler.ranked) == 1
    assert chosen[-1] == len(CODES) - 1


def test_every_other_choice_is_a_variation_of_the_best() -> None:
    sampler = RanksLast()
    chosen = explore(sampler, 40)
    losses = [np.count_nonzero(CODES[row] != CODES[0]) for row in chosen]
    for count in range(FEWEST, 40):
        best = [row for row, loss in zip(chosen[:count], losses, strict=False) if loss == min(losses[:count])]
        if len(sampler.ranked[count - FEWEST]) < 15:
            assert any(np.count_nonzero(CODES[chosen[count]] != CODES[row]) == 1 for row in best)
    polished = [len(rows) < 15 for rows in sampler.ranked]
    assert sum(polished) == pytest.approx(30 / POLISH_EVERY, abs=1)


def test_the_process_is_fitted_again_when_trials_grow_by_a_share() -> None:
    sampler = RanksLast()
    explore(sampler, 100)
    assert sampler.fits[:3] == [10, 11, 12]
    assert np.diff(sampler.fits).max() == 5


def test_of_a_large_pool_a_sample_and_the_variations_of_the_best_are_ranked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kriging, "MOST_RANKED", 5)
    sampler = RanksLast()
    chosen = explore(sampler, FEWEST + 1)
    best = min(chosen[:FEWEST], key=lambda row: np.count_nonzero(CODES[row] != CODES[0]))
    near = set(np.flatnonzero((np.count_nonzero(CODES[best] != CODES, axis=1) == 1) & (CODES[:, 0] == CODES[best, 0])))
    assert near - set(chosen[:FEWEST]) <= set(sampler.ranked[0])
    assert len(sampler.ranked[0]) < len(CODES) - FEWEST
    chosen = explore(sampler := RanksLast(), len(CODES))
    assert sorted(chosen) == list(range(len(CODES)))
    assert not (sampler.state[chosen[:-1]] == FREE).any()
