"""A sampler that ranks every candidate that is left by how likely a forest finds it to be among the best.

Likelihood-free Bayesian optimization: a classifier told which candidates are among the best, each weighted by how much
it improves on the others, estimates the expected improvement itself, up to a factor (Song et al., "A General Recipe for
Likelihood-free Bayesian Optimization", ICML 2022).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import RandomForestClassifier

from .pool_sampler import PENDING, TIMED, Codes, Rows
from .ranking_sampler import RankingSampler

TREES = 100
# The share of the trials that counts as the best.
BEST_SHARE = 0.2
# By what the score of a candidate is multiplied for each neighbour of it that is pending, or that the forest does not
# know of yet.
CROWDED = 0.5


class ForestSampler(RankingSampler):
    """Chooses the candidate that is likeliest among the best."""

    def __init__(self, codes: Codes, seed: int = 0) -> None:
        super().__init__(codes, seed)
        templates = codes[:, :1] == np.unique(codes[:, 0])
        self._features = np.hstack([templates, codes[:, 1:]]).astype(np.float32)
        self._forest: Any = None
        self._known = np.empty(0, np.intp)

    def fit(self, ended: Rows) -> None:
        """Plant the forest: the best count by what they gain on the worst of them, all others alike."""
        losses = np.where(self.state[ended] == TIMED, self.values[ended], math.inf)
        best = np.argsort(losses, kind="stable")[: max(2, math.ceil(BEST_SHARE * len(ended)))]
        best = best[np.isfinite(losses[best])]
        gains = np.max(losses[best]) - losses[best]
        gains = gains / gains.mean() if gains.any() else np.ones(len(best))
        # A candidate of the best is among the others as well, and both classes weigh the same.
        rows = np.concatenate([ended[best], ended])
        weights = np.concatenate([gains / len(best), np.full(len(ended), 1 / len(ended))])
        self._forest = RandomForestClassifier(TREES, random_state=int(self.random.integers(2**31)))
        self._forest.fit(self._features[rows], np.arange(len(rows)) < len(best), weights * len(rows))
        self._known = ended

    def scores(self, rows: Rows) -> NDArray[np.float64]:
        """The probability to be among the best, less beside those of which the forest does not know."""
        probabilities = np.asarray(self._forest.predict_proba(self._features[rows]))[:, 1]
        near = np.zeros(len(rows))
        for row in np.setdiff1d(np.flatnonzero(self.state >= PENDING), self._known):
            near += self.distances(int(row))[rows] <= 1
        return probabilities * CROWDED**near
