"""Which variant to try next: an Optuna study over the valid variants of one task."""

from __future__ import annotations

import logging
import math
import random
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import TrialState

from ..kernel_templates.errors import InputError
from ..kernel_templates.outcome import Outcome, Timed
from ..kernel_templates.variant import Value, Variant

SAMPLERS = ("tpe", "random", "gp", "qmc")
# These sample only parameters that every trial has, so that each trial is given those of all templates.
_UNCONDITIONAL = ("gp", "qmc")
# Suggestions with nothing left to try at or beside them, after which a variant is drawn from all that are left.
FRUITLESS_ASKS = 4
# What the sampler is told at once of variants that it did not suggest: with 10,000 stored trials, TPE would take 0.2 s
# for each suggestion.
MOST_LESSONS = 1000
_TEMPLATE = "template"
_CONSTRAINT = "valid"

Point = tuple[str, tuple[Value, ...]]


class Space:
    """The variants as points: for each template, the dimensions in which its variants differ, each with its values.

    A dimension that repeats another in every variant, as one that follows its counterpart does, is none of them.
    """

    def __init__(self, variants: Iterable[Variant]) -> None:
        columns: dict[str, dict[str, list[Value]]] = {}
        for variant in variants:
            for name, value in variant.values:
                columns.setdefault(variant.template, {}).setdefault(name, []).append(value)
        self.choices = {template: _distinct(values) for template, values in columns.items()}

    def point(self, variant: Variant) -> Point | None:
        """Where `variant` is, or None when it has a value that no variant of the space has."""
        values, dimensions = variant.as_dict(), self.choices.get(variant.template)
        if dimensions is None or any(values.get(name) not in choices for name, choices in dimensions.items()):
            return None
        return variant.template, tuple(values[name] for name in dimensions)

    def neighbours(self, point: Point) -> Iterator[Point]:
        """The points that differ in one dimension: by one step where its values have an order."""
        template, values = point
        for index, choices in enumerate(self.choices[template].values()):
            at = choices.index(values[index])
            for other in (at - 1, at + 1) if _is_ordered(choices) else range(len(choices)):
                if 0 <= other < len(choices) and other != at:
                    yield template, (*values[:index], choices[other], *values[index + 1 :])


class Study:
    """Asks for variants and is told what came of them; no variant is asked for twice.

    `first` are asked for in their order, before the sampler chooses: they need not be among `valid` (the default's
    values may differ from theirs where these make no difference) and then stand for the valid variant at their point.
    The same calls with the same `seed` give the same variants. Raises `InputError` for an unknown `sampler`.
    """

    def __init__(
        self, valid: Sequence[Variant], first: Sequence[Variant] = (), sampler: str = "tpe", seed: int = 0
    ) -> None:
        self._space = Space(valid)
        self._at: dict[Point | None, Variant] = {self._space.point(variant): variant for variant in reversed(first)}
        self._at.pop(None, None)
        self._at = {self._space.point(variant): variant for variant in valid} | self._at
        self._first = deque(self._only_representatives(first))
        self._untried = dict.fromkeys([*self._first, *self._at.values()])
        self._log_ms: dict[Variant, float | None] = {}
        self._asked: dict[Variant, optuna.Trial] = {}
        # Told, and not suggested by the sampler, which does not know of them yet.
        self._lessons: list[Variant] = []
        self._random = random.Random(seed)
        self._suggests_all = sampler in _UNCONDITIONAL
        self._study = _create(sampler, seed)

    def prefer(self, variants: Sequence[Variant]) -> None:
        """Ask for these, where they were not asked for or told, before all others."""
        self._first.extendleft(variant for variant in reversed(variants) if variant in self._untried)

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
        for _ in range(FRUITLESS_ASKS if self._untried else 0):
            trial = self._study.ask()
            point = self._suggest(trial)
            variant = self._at.get(point)
            if variant in self._untried:
                self._asked[variant] = trial
                return self._take(variant)
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
        point = self._space.point(outcome.variant)
        variant = self._at.get(point, outcome.variant)
        if variant in self._log_ms:
            return
        self._untried.pop(variant, None)
        self._log_ms[variant] = math.log(outcome.timing.median_ms) if isinstance(outcome, Timed) else None
        trial = self._asked.pop(variant, None)
        if trial is not None:
            self._answer(trial, variant)
        elif point is not None:
            self._lessons.append(variant)

    def _only_representatives(self, first: Sequence[Variant]) -> list[Variant]:
        return [v for v in dict.fromkeys(first) if self._at.get(self._space.point(v), v) == v]

    def _take(self, variant: Variant) -> Variant:
        del self._untried[variant]
        return variant

    def _suggest(self, trial: optuna.Trial) -> Point:
        """The point that the sampler suggests, at which there need not be a valid variant."""
        templates = list(self._space.choices)
        chosen = str(trial.suggest_categorical(_TEMPLATE, templates)) if len(templates) > 1 else templates[0]
        points: dict[str, tuple[Value, ...]] = {}
        for template in templates if self._suggests_all else [chosen]:
            dimensions = self._space.choices[template].items()
            points[template] = tuple(_suggest(trial, _parameter(template, n), choices) for n, choices in dimensions)
        return chosen, points[chosen]

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
        if len(lessons) > MOST_LESSONS:
            half = MOST_LESSONS // 2
            lessons.sort(key=lambda v: math.inf if (log_ms := self._log_ms[v]) is None else log_ms)
            lessons = lessons[:half] + self._random.sample(lessons[half:], half)
        for variant in lessons:
            self._add(variant)

    def _add(self, variant: Variant) -> None:
        """Tell the sampler what is known of a point that it did not suggest."""
        values = variant.as_dict()
        params: dict[str, Value] = {_TEMPLATE: variant.template} if len(self._space.choices) > 1 else {}
        for template in self._space.choices if self._suggests_all else [variant.template]:
            for name, choices in self._space.choices[template].items():
                # A parameter that means nothing for this variant is given any value.
                value = values[name] if template == variant.template else self._random.choice(choices)
                params[_parameter(template, name)] = choices.index(value) if _is_ordered(choices) else value
        log_ms = self._log_ms[variant]
        trial = optuna.create_trial(
            params=params,
            distributions=self._distributions(params),
            value=self._worst() if log_ms is None else log_ms,
            constraints={_CONSTRAINT: _violation(log_ms)},
        )
        self._study.add_trial(trial)

    def _distributions(self, names: Iterable[str]) -> dict[str, BaseDistribution]:
        found: dict[str, BaseDistribution] = {_TEMPLATE: CategoricalDistribution(list(self._space.choices))}
        for template, dimensions in self._space.choices.items():
            for name, choices in dimensions.items():
                ordered = _is_ordered(choices)
                distribution = IntDistribution(0, len(choices) - 1) if ordered else CategoricalDistribution(choices)
                found[_parameter(template, name)] = distribution
        return {name: found[name] for name in names}

    def _worst(self) -> float:
        """The value of a trial that has none; only samplers that know no constraints look at it."""
        return max((value for value in self._log_ms.values() if value is not None), default=0.0)


def _distinct(columns: Mapping[str, list[Value]]) -> dict[str, tuple[Value, ...]]:
    """The sorted values of each column that has several and is not an earlier column again."""
    kept: dict[str, list[Value]] = {}
    for name, column in columns.items():
        if len(set(column)) > 1 and column not in kept.values():
            kept[name] = column
    return {name: tuple(sorted(set(column), key=lambda v: (isinstance(v, str), v))) for name, column in kept.items()}


def _suggest(trial: optuna.Trial, name: str, choices: tuple[Value, ...]) -> Value:
    # The sampler is to know that 16 and 32 are neighbours, and no further apart than 64 and 128.
    if _is_ordered(choices):
        return choices[trial.suggest_int(name, 0, len(choices) - 1)]
    return choices[choices.index(str(trial.suggest_categorical(name, choices)))]


def _is_ordered(choices: tuple[Value, ...]) -> bool:
    return all(isinstance(choice, int) for choice in choices)


def _parameter(template: str, dimension: str) -> str:
    return f"{template}.{dimension}"


def _violation(log_ms: float | None) -> float:
    return 1.0 if log_ms is None else -1.0


def _create(sampler: str, seed: int) -> optuna.Study:
    if sampler not in SAMPLERS:
        raise InputError(f"unknown sampler {sampler!r}; accepted are {', '.join(SAMPLERS)}")
    # Progress is shown by the listener; Optuna would log each study and trial on stderr.
    logging.getLogger("optuna").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        # Grouped parameters and the QMC sampler have been called experimental since 2021 and 2022.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.create_study(sampler=_make_sampler(sampler, seed))


def _make_sampler(name: str, seed: int) -> optuna.samplers.BaseSampler:
    samplers = optuna.samplers
    if name == "random":
        return samplers.RandomSampler(seed=seed)
    if name == "gp":
        return samplers.GPSampler(seed=seed, warn_independent_sampling=False)
    if name == "qmc":
        return samplers.QMCSampler(seed=seed, scramble=True, warn_independent_sampling=False)
    return samplers.TPESampler(seed=seed, multivariate=True, group=True, constant_liar=True)
