"""Samplers of Optuna that choose among a pool of numbered candidates, and never one that a trial already has."""

from __future__ import annotations

import abc
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna import Study
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

# The one parameter of a trial: which candidate it tries.
NUMBER = "number"

FREE, PENDING, TIMED, BAD = range(4)
Rows = NDArray[np.intp]
Codes = NDArray[np.int8]


class PoolSampler(BaseSampler):
    """Keeps what is known of each candidate; `codes` `[candidates, columns]` describe them, the template first.

    `state` `[candidates]` says whether a candidate is free, pending, timed, or bad, which is what violated a
    constraint; `values` `[candidates]` are those of the timed ones. The same trials and the same `seed` give the same
    choices.
    """

    def __init__(self, codes: Codes, seed: int = 0) -> None:
        self.codes = codes
        self.state = np.full(len(codes), FREE, np.int8)
        self.values = np.zeros(len(codes))
        self.random = np.random.default_rng(seed)
        self._read = 0
        self._open: list[int] = []

    @abc.abstractmethod
    def choose(self) -> int:
        """The number of a free candidate, of which there is at least one."""

    def expect(self, log_ratios: NDArray[np.float64]) -> None:
        """Hear the logarithms `[candidates]` of the ratios to the best to expect, NaN where none is known.

        Most samplers do not listen.
        """

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """The number."""
        return {NUMBER: IntDistribution(0, len(self.codes) - 1)}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """A free candidate; nothing where none is left."""
        self._follow(study)
        return {NUMBER: self.choose()} if (self.state == FREE).any() else {}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """The first candidate: only a study with none left asks for it."""
        return 0

    def variations(self, row: int) -> Rows:
        """The free candidates that differ from candidate `row` in one dimension, by however many steps."""
        return np.flatnonzero((self.distances(row) == 1) & (self.codes[:, 0] == self.codes[row, 0])
                              & (self.state == FREE))  # fmt: skip

    def distances(self, row: int) -> NDArray[np.intp]:
        """In how many columns each candidate differs from candidate `row`: `[candidates]`."""
        return np.count_nonzero(self.codes != self.codes[row], axis=1)

    def _follow(self, study: Study) -> None:
        """Take note of the trials that began or ended since the last time."""
        trials = study.get_trials(deepcopy=False)
        known, self._open, self._read = [*self._open, *range(self._read, len(trials))], [], len(trials)
        for number in known:
            trial = trials[number]
            if not trial.state.is_finished():
                self._open.append(number)
            if NUMBER in trial.params and trial.state != TrialState.FAIL:
                self._note(trial.params[NUMBER], trial)

    def _note(self, row: int, trial: FrozenTrial) -> None:
        if trial.state != TrialState.COMPLETE:
            self.state[row] = PENDING
        elif any(violation > 0 for violation in trial.constraints.values()):
            self.state[row] = BAD
        else:
            self.state[row] = TIMED
            self.values[row] = trial.values[0]


class BruteSampler(PoolSampler):
    """The candidates in their order."""

    def choose(self) -> int:
        """The first that is free."""
        return int(np.argmax(self.state == FREE))


class LocalSampler(PoolSampler):
    """Descends to the better of its variations, and starts anew at any candidate where none is left: its origin."""

    def __init__(self, codes: Codes, seed: int = 0) -> None:
        super().__init__(codes, seed)
        self._tried: list[int] = []

    def choose(self) -> int:
        """Any free variation of the best that this descent has tried."""
        timed = [row for row in self._tried if self.state[row] == TIMED]
        # What is told before the first choice is where the first descent begins.
        if not self._tried:
            timed = np.flatnonzero(self.state == TIMED).tolist()
        free = self.variations(min(timed, key=self.values.__getitem__)) if timed else np.empty(0, np.intp)
        if timed and not len(free):
            self._tried = []
        chosen = int(self.random.choice(free if len(free) else np.flatnonzero(self.state == FREE)))
        self._tried.append(chosen)
        return chosen
