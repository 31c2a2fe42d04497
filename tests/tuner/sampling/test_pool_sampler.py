from __future__ import annotations

import itertools

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState

from attention_tuner.tuner.sampling.pool_sampler import (
    BAD,
    FREE,
    NUMBER,
    PENDING,
    TIMED,
    BruteSampler,
    LocalSampler,
    PoolSampler,
)

# One template, two dimensions of four values.
CODES = np.array([(0, a, b) for a, b in itertools.product(range(4), repeat=2)], np.int8)


def study_of(sampler: PoolSampler) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(sampler=sampler)


def ask(study: optuna.Study) -> optuna.Trial:
    trial = study.ask()
    trial.suggest_int(NUMBER, 0, len(CODES) - 1)
    return trial


def tell(study: optuna.Study, trial: optuna.Trial, value: float, violation: float = -1.0) -> None:
    trial.set_constraint("valid", violation)
    study.tell(trial, value)


@pytest.mark.parametrize("kind", [BruteSampler, LocalSampler])
def test_it_chooses_each_candidate_once(kind: type[PoolSampler]) -> None:
    study = study_of(kind(CODES, 3))
    pending: list[optuna.Trial] = []
    for _ in CODES:
        pending.append(ask(study))
        if len(pending) > 3:
            trial = pending.pop(0)
            tell(study, trial, trial.params[NUMBER])
    assert sorted(trial.params[NUMBER] for trial in study.trials) == list(range(len(CODES)))


def test_it_knows_what_is_pending_timed_and_bad_whoever_asked() -> None:
    sampler = BruteSampler(CODES)
    study = study_of(sampler)
    study.enqueue_trial({NUMBER: 2})
    pending, timed, bad, failed = (ask(study) for _ in range(4))
    tell(study, timed, 0.5)
    tell(study, bad, 9.0, violation=1.0)
    study.tell(failed, state=TrialState.FAIL)
    study.add_trial(optuna.create_trial(params={NUMBER: 7}, distributions=timed.distributions, value=3.0))
    assert pending.params == {NUMBER: 2}
    ask(study)
    assert sampler.state[[2, 0, 1, 7]].tolist() == [PENDING, TIMED, BAD, TIMED]
    assert sampler.values[[0, 7]].tolist() == [0.5, 3.0]
    assert (sampler.state == FREE).sum() >= len(CODES) - 5


def test_variations_are_free_and_differ_in_one_dimension_of_the_same_template() -> None:
    sampler = BruteSampler(np.array([[0, 0, 0], [0, 0, 3], [0, 1, 1], [1, 0, 0], [0, 2, 0]], np.int8))
    assert sampler.variations(0).tolist() == [1, 4]
    sampler.state[4] = TIMED
    assert sampler.variations(0).tolist() == [1]
    assert sampler.distances(0).tolist() == [0, 1, 2, 1, 1]


def test_a_descent_goes_to_variations_of_its_best_until_there_are_none() -> None:
    sampler = LocalSampler(CODES, 0)
    study = study_of(sampler)
    chosen: list[int] = []
    for _ in range(9):
        trial = ask(study)
        chosen.append(trial.params[NUMBER])
        tell(study, trial, float(CODES[chosen[-1]].sum()))
    assert 0 in chosen
    for count in range(1, chosen.index(0) + 1):
        best = min(chosen[:count], key=lambda row: CODES[row].sum())
        assert np.count_nonzero(CODES[best] != CODES[chosen[count]]) == 1
