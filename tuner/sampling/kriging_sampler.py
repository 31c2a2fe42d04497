"""A sampler that ranks every candidate that is left by the improvement to expect of it under a Gaussian process.

What is expected from elsewhere was measured in another place, along a dimension of its own: how far that is, and so how
much it counts, is found like the rates of all other dimensions.
"""

from __future__ import annotations

import numpy as np

from .gaussian_process import Array, GaussianProcess, log_expected_improvement
from .points import ABSENT
from .pool_sampler import PENDING, TIMED, Codes, Rows
from .ranking_sampler import RankingSampler

# How fast things change along a dimension, and how different they are elsewhere, until measurements tell.
LOG_RATE, LOG_RATE_ELSEWHERE = 0.0, -2.0
# What is slower than this share of what was timed is only slow: how slow would bend the process where it matters.
SLOW = 0.5
# Of the candidates of which something is expected, so many of the fastest and so many of the others are remembered.
MOST_EXPECTED = 50
# A candidate without a time is at least so much slower than slow ones, as a logarithm.
LEAST_PENALTY = 1.0
# With so many trials ended here, what was measured elsewhere has nothing to add and only blurs the last percents.
ENOUGH = 40


class KrigingSampler(RankingSampler):
    """Chooses the candidate with the largest expected improvement."""

    def __init__(self, codes: Codes, seed: int = 0) -> None:
        super().__init__(codes, seed)
        self._places = _places(codes)
        self._process = GaussianProcess(np.append(np.full(self._places.shape[1] - 1, LOG_RATE), LOG_RATE_ELSEWHERE))
        self._expected = np.empty(0, np.intp)
        self._ratios = np.full(len(codes), np.nan)

    def expect(self, log_ratios: Array) -> None:
        """Count on these logarithms `[candidates]` of ratios to the best, NaN where there is none."""
        ranked = np.argsort(log_ratios)[: np.count_nonzero(~np.isnan(log_ratios))]
        fast, slow = ranked[:MOST_EXPECTED], ranked[MOST_EXPECTED:]
        if len(slow) > MOST_EXPECTED:
            slow = self.random.choice(slow, MOST_EXPECTED, replace=False)
        self._expected, self._ratios = np.concatenate([fast, slow]), log_ratios
        self._fitted = 0

    @property
    def is_informed(self) -> bool:
        """Whether candidates can be ranked before any was tried."""
        return len(self._expected) > 0

    def fit(self, ended: Rows) -> None:
        """Find how far the process changes along each dimension."""
        self._process.fit(self._known(ended), self._losses(ended))

    def scores(self, rows: Rows) -> Array:
        """The logarithm of the expected improvement."""
        ended, pending = np.flatnonzero(self.state >= TIMED), np.flatnonzero(self.state == PENDING)
        losses = self._losses(ended)
        best = losses[: len(ended) or None].min()
        mean, deviation = self._process.posterior(self._known(ended), losses, self._places[pending], self._places[rows])
        return log_expected_improvement(float(best), mean, deviation)

    def _known(self, ended: Rows) -> Array:
        """The places of the candidates that have ended, then of those of which something is expected."""
        elsewhere = self._places[self._remembered(ended)]
        elsewhere[:, -1] = 1.0
        return np.concatenate([self._places[ended], elsewhere])

    def _losses(self, ended: Rows) -> Array:
        """What is known at `_known(ended)`, with mean 0 and deviation 1; a candidate without a time is worst."""
        timed = self.state[ended] == TIMED
        expected = self._ratios[self._remembered(ended)]
        losses = np.concatenate([self.values[ended], expected + self._best(ended[timed])])
        has_time = np.append(timed, np.full(len(expected), True))
        slow = np.quantile(losses[has_time], SLOW)
        # As far beyond what is slow as the best is from it, so that the sampler keeps away; where most are as fast as
        # the best, far all the same.
        failed = slow + max(slow - losses[has_time].min(), LEAST_PENALTY)
        losses = np.where(has_time, np.minimum(losses, slow), failed)
        return (losses - losses.mean()) / (losses.std() or 1.0)

    def _remembered(self, ended: Rows) -> Rows:
        return self._expected if len(ended) < ENOUGH or not (self.state[ended] == TIMED).any() else self._expected[:0]

    def _best(self, timed: Rows) -> float:
        """What the best would take here by what is expected of those that were timed, or else the best of them."""
        if not len(timed):
            return 0.0
        both = timed[~np.isnan(self._ratios[timed])]
        return float(np.median(self.values[both] - self._ratios[both]) if len(both) else self.values[timed].min())


def _places(codes: Codes) -> Array:
    """`[candidates, dimensions]`: two templates are 1 apart, values lie evenly from 0 to 1, absent ones amid them.

    The last dimension is 0 for what was measured here.
    """
    templates = 0.5 * (codes[:, :1] == np.unique(codes[:, 0]))
    highest = np.maximum(codes[:, 1:].max(axis=0, initial=1), 1)
    values = np.where(codes[:, 1:] == ABSENT, 0.5, codes[:, 1:] / highest)
    return np.hstack([templates, values, np.zeros((len(codes), 1))])
