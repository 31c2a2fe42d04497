"""What the samplers that rank every free candidate have in common: how they begin, and how they polish."""

from __future__ import annotations

import abc
import functools

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from .pool_sampler import BAD, FREE, TIMED, PoolSampler, Rows

# Trials that ended before candidates are ranked: until then, templates take turns.
FEWEST = 10
# Of so many choices, one goes to the variations of the best so far.
POLISH_EVERY = 2
# A model is fitted anew once the trials that ended have grown by this share.
GROWTH = 0.05
# Of a larger pool, so many candidates are ranked until the next fit, and the variations of the best few.
MOST_RANKED = 10_000
FEW = 8


class RankingSampler(PoolSampler):
    """Chooses what ranks first, and now and then a variation of the best."""

    _fitted = 0
    _choices = 0
    _pool: Rows

    @abc.abstractmethod
    def fit(self, ended: Rows) -> None:
        """Learn from the candidates `ended`, of which at least one is timed."""

    @abc.abstractmethod
    def scores(self, rows: Rows) -> NDArray[np.float64]:
        """How worth trying the free candidates `rows` are, as the model has it and beside those that are pending."""

    @property
    def is_informed(self) -> bool:
        """Whether candidates can be ranked before any was tried."""
        return False

    def choose(self) -> int:
        """The number of a free candidate."""
        # Matrices of a few hundred rows are too small to share, and the cores are needed for compiling.
        with _linear_algebra().limit(limits=1, user_api="blas"):  # pyright: ignore[reportUnknownMemberType]
            return self._choose()

    def _choose(self) -> int:
        self._choices += 1
        ended = np.flatnonzero((self.state == TIMED) | (self.state == BAD))
        has_time = bool((self.state == TIMED).any())
        if (len(ended) < FEWEST or not has_time) and not self.is_informed:
            return self._explore()
        best = ended[np.argsort(np.where(self.state[ended] == TIMED, self.values[ended], np.inf), kind="stable")]
        if not self._fitted or len(ended) >= self._fitted * (1 + GROWTH):
            self.fit(ended)
            self._fitted = len(ended)
            self._pool = self._candidates(best)
        near = self.variations(int(best[0])) if has_time and self._choices % POLISH_EVERY == 0 else best[:0]
        left = self._pool[self.state[self._pool] == FREE]
        return self._first(next(rows for rows in (near, left, np.flatnonzero(self.state == FREE)) if len(rows)))

    def _explore(self) -> int:
        """Any candidate of the template that was tried least."""
        free = np.flatnonzero(self.state == FREE)
        kinds = self.codes[:, 0]
        tried = np.bincount(kinds[self.state != FREE], minlength=int(kinds.max()) + 1)
        left = np.unique(kinds[free])
        fewest = left[np.argmin(tried[left])]
        return int(self.random.choice(free[kinds[free] == fewest]))

    def _first(self, rows: Rows) -> int:
        scores = self.scores(rows)
        return int(self.random.choice(rows[scores == scores.max()]))

    def _candidates(self, best: Rows) -> Rows:
        """The free candidates to rank: all, or some of them and the variations of the first few of `best`."""
        free = np.flatnonzero(self.state == FREE)
        if len(free) <= MOST_RANKED:
            return free
        some = self.random.choice(free, MOST_RANKED, replace=False)
        return np.unique(np.concatenate([some, *(self.variations(int(row)) for row in best[:FEW])]))


@functools.cache
def _linear_algebra() -> ThreadpoolController:
    """The libraries that do it in this process: looking for them takes longer than a choice."""
    return ThreadpoolController()
