"""Which variant to try next: an Optuna study over the valid variants of one task."""

from __future__ import annotations

import logging
import math
import random
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import optuna
from optuna.trial import TrialState

from ...kernel_templates.outcome import Outcome, Timed
from ...kernel_templates.variant import Variant
from .points import Point, Space
from .pool_sampler import PoolSampler
from .samplers import DEFAULT_SAMPLER, make_sampler

# Suggestions with nothing left to try at or beside them, after which a variant is drawn from all that are left.
FRUITLESS_ASKS = 4
# What a sampler of Optuna's is told at once of variants that it did not suggest: with 10,000 stored trials, TPE would
# take 0.2 s for each suggestion.
MOST_LESSONS = 1000
_CONSTRAINT = "valid"


class Study:
    """Asks for variants and is told what came of them; no variant is asked for twice.

    `first` are asked for in their order, before the sampler chooses: they need not be among `valid` (the default's
    values may differ from theirs where these make no difference) and then stand for the valid variant at their point.
    The same calls with the same `seed` give the same variants. Raises `InputError` for an unknown `sampler`.
    """

    def __init__(
        self, valid: Sequence[Variant], first: Sequence[Variant] = (), sampler: str = DEFAULT_SAMPLER, seed: int = 0
    ) -> None:
        self._space = Space(valid)
        self._at: dict[Point, Variant] = dict(zip(self._space.points, valid, strict=True))
        for variant in reversed(first):
            if (point := self._space.point(variant)) is not None:
                self._at[point] = variant
        self._first = deque(v for v in dict.fromkeys(first) if self._representative(v) == v)
        self._untried = dict.fromkeys([*self._first, *self._at.values()])
        self._log_ms: dict[Variant, float | None] = {}
        # The trials of what was asked for and not told yet.
        self._asked: dict[Variant, optuna.Trial] = {}
        # Told without having been asked for: the sampler does not know of them yet.
        self._lessons: list[Variant] = []
        self._random = random.Random(seed)
        self._sampler, self._encoding = make_sampler(sampler, self._space, list(self._at), seed)
        # Progress is shown by the listener; Optuna would log each study and trial on stderr.
        logging.getLogger("optuna").setLevel(logging.WARNING)
        self._study = optuna.create_study(sampler=self._sampler)

    def prefer(self, variants: Sequence[Variant]) -> None:
        """Ask for these, where they were not asked for or told, before all others."""
        self._first.extendleft(variant for variant in reversed(variants) if variant in self._untried)

    def expect(self, log_ratios: Mapping[Variant, float]) -> None:
        """Count on variants being so far from the best, as the logarithm of the ratio, before they are tried."""
        if isinstance(self._sampler, PoolSampler):
            known = (log_ratios.get(variant, math.nan) for variant in self._at.values())
            self._sampler.expect(np.fromiter(known, float, len(self._at)))

    def claim(self, variant: Variant) -> bool:
        """Ask for `variant` out of turn; whether it may be, for it was neither asked for nor told before."""
        if variant not in self._untried:
            return False
        self._take(variant)
        return True

    def ask(self) -> Variant | None:
        """A variant that was neither asked for nor told before; None when there is none left."""
        while self._first:
            variant = self._first.popleft()
            if variant in self._untried:
                return self._take(variant)
        self._teach()
        for _ in range(FRUITLESS_ASKS if self._untried and self._at else 0):
            trial = self._study.ask()
            point = self._encoding.suggest(trial)
            variant = self._at.get(point)
            if variant in self._untried:
                return self._take(variant, trial)
            self._answer(trial, variant)
            # The sampler means the region: asked again, it would name the same point again.
            near = [v for p in self._space.neighbours(point) if (v := self._at.get(p)) in self._untried]
            if near:
                return self._take(self._random.choice(near))
        return self._take(self._random.choice(list(self._untried))) if self._untried else None

    def tell(self, outcome: Outcome) -> None:
        """Take note of what came of a variant, asked for or not; what is told of it later changes nothing.

        Every outcome but `Timed` counts as a point to keep away from.
        """
        # What was told under values that make no difference here is known of the variant that stands at its point.
        variant = self._representative(outcome.variant)
        if variant in self._log_ms:
            return
        self._untried.pop(variant, None)
        self._log_ms[variant] = math.log(outcome.timing.median_ms) if isinstance(outcome, Timed) else None
        trial = self._asked.pop(variant, None)
        if trial is not None:
            self._answer(trial, variant)
        else:
            self._lessons.append(variant)

    def _representative(self, variant: Variant) -> Variant:
        point = self._space.point(variant)
        return variant if point is None else self._at.get(point, variant)

    def _take(self, variant: Variant, trial: optuna.Trial | None = None) -> Variant:
        """Ask for `variant`, by a trial of its own unless it is the one that `trial` suggests.

        So the sampler knows of all that is being tried, whoever chose it.
        """
        del self._untried[variant]
        point = self._space.point(variant)
        if trial is None and point is not None and (parameters := self._encoding.parameters(point)):
            self._study.enqueue_trial(dict(parameters))
            trial = self._study.ask()
            self._encoding.suggest(trial)
        if trial is not None:
            self._asked[variant] = trial
        return variant

    def _answer(self, trial: optuna.Trial, variant: Variant | None) -> None:
        """Tell the sampler what is known of the point it suggested: nothing, while its variant is being tried."""
        if variant is not None and variant not in self._log_ms:
            self._study.tell(trial, state=TrialState.FAIL)
            return
        log_ms = None if variant is None else self._log_ms[variant]
        # TPE takes no notice of a failed trial. A constraint that is violated makes it keep away, and it heeds
        # constraints only when every trial has them.
        trial.set_constraint(_CONSTRAINT, _violation(log_ms))
        self._study.tell(trial, self._worst() if log_ms is None else log_ms)

    def _teach(self) -> None:
        """Tell the sampler of points that it did not suggest: of very many, the fastest and some of the others."""
        lessons, self._lessons = self._lessons, []
        if len(lessons) > MOST_LESSONS and not isinstance(self._sampler, PoolSampler):
            half = MOST_LESSONS // 2
            lessons.sort(key=lambda v: math.inf if (log_ms := self._log_ms[v]) is None else log_ms)
            lessons = lessons[:half] + self._random.sample(lessons[half:], half)
        for variant in lessons:
            self._add(variant)

    def _add(self, variant: Variant) -> None:
        """Tell the sampler what is known of a point that it did not suggest."""
        point = self._space.point(variant)
        parameters = None if point is None else self._encoding.parameters(point)
        if parameters is None:
            return
        log_ms = self._log_ms[variant]
        trial = optuna.create_trial(
            params=parameters,
            distributions=self._encoding.distributions(parameters),
            value=self._worst() if log_ms is None else log_ms,
            constraints={_CONSTRAINT: _violation(log_ms)},
        )
        self._study.add_trial(trial)

    def _worst(self) -> float:
        """The value of a trial that has none; only samplers that know no constraints look at it."""
        return max((value for value in self._log_ms.values() if value is not None), default=0.0)


def _violation(log_ms: float | None) -> float:
    return 1.0 if log_ms is None else -1.0
