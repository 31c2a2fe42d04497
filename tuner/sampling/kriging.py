"""A sampler that ranks all untried candidates by expected improvement under a Gaussian process (kriging).

Its search space is the list of valid candidates, by number, so that no trial names an invalid variant or a tried one.
Losses expected from other batches lie apart from measured ones along a dimension of their own: the rate of that
dimension, fitted like all others, decides how much they count.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna import Study
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState
from threadpoolctl import ThreadpoolController

from .gaussian_process import Array, GaussianProcess, log_expected_improvement
from .points import ABSENT

# The only parameter of a trial: the number of its candidate.
NUMBER = "number"

# The states of a candidate; a bad one violated a constraint.
FREE, PENDING, TIMED, BAD = range(4)

# Ended trials before candidates are ranked; until then, templates take turns.
FEWEST = 10
# Period, in choices, of choosing a variation of the best candidate so far.
POLISH_EVERY = 2
# The process is fitted again once the ended trials have grown by this share.
GROWTH = 0.05
# Most free candidates ranked: of more, this many are drawn until the next fit, beside variations of the `FEW` best.
MOST_RANKED = 10_000
FEW = 8
# Logarithms of the rates before the first fit: along a dimension of the variant, and towards other batches.
LOG_RATE, LOG_RATE_ELSEWHERE = 0.0, -2.0
# Losses above this quantile are cut to it: large differences between slow candidates would distort the fit where it
# matters.
SLOW = 0.5
# The number of expected losses in use: the fastest, and as many drawn from the others.
MOST_EXPECTED = 50
# Least logarithm by which a candidate without a time counts as slower than the slow ones.
LEAST_PENALTY = 1.0
# Ended trials after which losses expected from other batches are ignored: they blur the last percents.
ENOUGH = 40

Rows = NDArray[np.intp]
Codes = NDArray[np.int8]


class KrigingSampler(BaseSampler):
    """Chooses the candidate with the largest expected improvement, or a variation of the best candidate.

    `codes` `[candidates, columns]` describe the candidates, the template first. The same trials and the same `seed`
    give the same choices.
    """

    def __init__(self, codes: Codes, seed: int = 0) -> None:
        self.codes = codes
        # The state of each candidate, and its value if it is timed.
        self.state = np.full(len(codes), FREE, np.int8)
        self.values = np.zeros(len(codes))
        self._random = np.random.default_rng(seed)
        self._x = _coordinates(codes)
        self._process = GaussianProcess(np.append(np.full(self._x.shape[1] - 1, LOG_RATE), LOG_RATE_ELSEWHERE))
        # The expected logarithm of each candidate's ratio to the best; `_expected` are the rows in use.
        self._ratios = np.full(len(codes), np.nan)
        self._expected = np.empty(0, np.intp)
        self._trials_read = 0
        self._unfinished: list[int] = []
        self._choices = 0
        # Ended trials at the latest fit, and the candidates that are ranked until the next one.
        self._fitted = 0
        self._pool = np.empty(0, np.intp)

    def expect(self, log_ratios: Array) -> None:
        """Expect the logarithms `[candidates]` of each time's ratio to the best; NaN expects nothing."""
        ranked = np.argsort(log_ratios)[: np.count_nonzero(~np.isnan(log_ratios))]
        fast, slow = ranked[:MOST_EXPECTED], ranked[MOST_EXPECTED:]
        if len(slow) > MOST_EXPECTED:
            slow = self._random.choice(slow, MOST_EXPECTED, replace=False)
        self._expected, self._ratios = np.concatenate([fast, slow]), log_ratios
        self._fitted = 0

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """The number of a candidate."""
        return {NUMBER: IntDistribution(0, len(self.codes) - 1)}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Choose a free candidate; nothing where none is left."""
        self._read_trials(study)
        return {NUMBER: self.choose()} if (self.state == FREE).any() else {}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Give the first candidate: Optuna asks only where no free candidate is left."""
        return 0

    def choose(self) -> int:
        """Choose the number of the next candidate among the free ones, at least one."""
        # The matrices have a few hundred rows, too few to gain from threads, and the cores are needed for compiling.
        with _linear_algebra().limit(limits=1, user_api="blas"):  # pyright: ignore[reportUnknownMemberType]
            return self._choose()

    def scores(self, rows: Rows) -> Array:
        """The logarithm of the expected improvement of each candidate in `rows`."""
        ended, pending = np.flatnonzero(self.state >= TIMED), np.flatnonzero(self.state == PENDING)
        losses = self._losses(ended)
        best = losses[: len(ended) or None].min()
        mean, deviation = self._process.posterior(self._known(ended), losses, self._x[pending], self._x[rows])
        return log_expected_improvement(float(best), mean, deviation)

    def variations(self, row: int) -> Rows:
        """The free candidates that differ from candidate `row` in one dimension."""
        differences = np.count_nonzero(self.codes != self.codes[row], axis=1)
        return np.flatnonzero((differences == 1) & (self.codes[:, 0] == self.codes[row, 0]) & (self.state == FREE))

    def _read_trials(self, study: Study) -> None:
        """Update the candidates by the trials that began or ended since the last time."""
        trials = study.get_trials(deepcopy=False)
        changed, self._unfinished = [*self._unfinished, *range(self._trials_read, len(trials))], []
        self._trials_read = len(trials)
        for number in changed:
            trial = trials[number]
            if not trial.state.is_finished():
                self._unfinished.append(number)
            if NUMBER in trial.params and trial.state != TrialState.FAIL:
                self._update(trial.params[NUMBER], trial)

    def _update(self, row: int, trial: FrozenTrial) -> None:
        if trial.state != TrialState.COMPLETE:
            self.state[row] = PENDING
        elif any(violation > 0 for violation in trial.constraints.values()):
            self.state[row] = BAD
        else:
            self.state[row] = TIMED
            self.values[row] = trial.values[0]

    def _choose(self) -> int:
        self._choices += 1
        ended = np.flatnonzero(self.state >= TIMED)
        has_time = bool((self.state == TIMED).any())
        if (len(ended) < FEWEST or not has_time) and not len(self._expected):
            return self._explore()
        best = ended[np.argsort(np.where(self.state[ended] == TIMED, self.values[ended], np.inf), kind="stable")]
        if not self._fitted or len(ended) >= self._fitted * (1 + GROWTH):
            self._process.fit(self._known(ended), self._losses(ended))
            self._fitted = len(ended)
            self._pool = self._candidates(best)
        near = self.variations(int(best[0])) if has_time and self._choices % POLISH_EVERY == 0 else best[:0]
        left = self._pool[self.state[self._pool] == FREE]
        rows = next(each for each in (near, left, np.flatnonzero(self.state == FREE)) if len(each))
        scores = self.scores(rows)
        return int(self._random.choice(rows[scores == scores.max()]))

    def _explore(self) -> int:
        """A random free candidate of the template that was tried least."""
        free = np.flatnonzero(self.state == FREE)
        templates = self.codes[:, 0]
        tried = np.bincount(templates[self.state != FREE], minlength=int(templates.max()) + 1)
        left = np.unique(templates[free])
        fewest = left[np.argmin(tried[left])]
        return int(self._random.choice(free[templates[free] == fewest]))

    def _candidates(self, best: Rows) -> Rows:
        """The free candidates to rank: all, or some of them and the variations of the first few of `best`."""
        free = np.flatnonzero(self.state == FREE)
        if len(free) <= MOST_RANKED:
            return free
        some = self._random.choice(free, MOST_RANKED, replace=False)
        return np.unique(np.concatenate([some, *(self.variations(int(row)) for row in best[:FEW])]))

    def _known(self, ended: Rows) -> Array:
        """The coordinates of the candidates `ended`, then of those with an expected loss in use."""
        elsewhere = self._x[self._in_use(ended)]
        elsewhere[:, -1] = 1.0
        return np.concatenate([self._x[ended], elsewhere])

    def _losses(self, ended: Rows) -> Array:
        """The losses at `_known(ended)`, with mean 0 and deviation 1; a candidate without a time has the largest."""
        timed = self.state[ended] == TIMED
        expected = self._ratios[self._in_use(ended)]
        losses = np.concatenate([self.values[ended], expected + self._best_here(ended[timed])])
        has_time = np.append(timed, np.full(len(expected), True))
        slow = np.quantile(losses[has_time], SLOW)
        # A failure counts as far beyond the slow ones as the best is before them; where most are about as fast as the
        # best, it is still far enough to keep the sampler away.
        failed = slow + max(slow - losses[has_time].min(), LEAST_PENALTY)
        losses = np.where(has_time, np.minimum(losses, slow), failed)
        return (losses - losses.mean()) / (losses.std() or 1.0)

    def _in_use(self, ended: Rows) -> Rows:
        return self._expected if len(ended) < ENOUGH or not (self.state[ended] == TIMED).any() else self._expected[:0]

    def _best_here(self, timed: Rows) -> float:
        """The best value to expect here: from the expected ratios of the timed candidates, or else their minimum."""
        if not len(timed):
            return 0.0
        both = timed[~np.isnan(self._ratios[timed])]
        return float(np.median(self.values[both] - self._ratios[both]) if len(both) else self.values[timed].min())


def _coordinates(codes: Codes) -> Array:
    """`[candidates, dimensions]`: templates are 1 apart, values evenly spaced from 0 to 1, absent ones at 0.5.

    The last dimension is 0 for measured losses, and 1 for losses expected from other batches.
    """
    templates = 0.5 * (codes[:, :1] == np.unique(codes[:, 0]))
    highest = np.maximum(codes[:, 1:].max(axis=0, initial=1), 1)
    values = np.where(codes[:, 1:] == ABSENT, 0.5, codes[:, 1:] / highest)
    return np.hstack([templates, values, np.zeros((len(codes), 1))])


@functools.cache
def _linear_algebra() -> ThreadpoolController:
    """The linear algebra libraries of this process, cached: finding them takes longer than one choice."""
    return ThreadpoolController()
