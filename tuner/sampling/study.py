"""The choice of the next variant to try: an Optuna study over the valid variants of one task."""

from __future__ import annotations

import logging
import math
import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import TrialState

from ...kernel_templates.outcome import Outcome, Timed
from ...kernel_templates.variant import Value, Variant
from .kriging import NUMBER, KrigingSampler
from .points import Point, Space, is_ordered
from .samplers import DEFAULT_SAMPLER, make_sampler

# After so many suggestions without an untried variant at or near them, a random untried variant is taken.
FRUITLESS_ASKS = 4
# At most so many trials are added at once to a sampler of Optuna's: with 10,000 of them, TPE would take 0.2 s for each
# suggestion.
MOST_ADDED = 1000
_CONSTRAINT = "valid"
_TEMPLATE = "template"

Parameters = dict[str, Value]


class Study:
    """Asks for variants and is told their outcomes; no variant is asked for twice.

    `first` are asked for in their order, before the sampler chooses. One that is not among `valid` takes the place of
    the valid variant at its point: the default may differ from it in values that make no difference. The same calls
    with the same `seed` give the same variants. Raises `InputError` for an unknown `sampler`.
    """

    def __init__(
        self, valid: Sequence[Variant], first: Sequence[Variant] = (), sampler: str = DEFAULT_SAMPLER, seed: int = 0
    ) -> None:
        self._space = Space(valid)
        self._at: dict[Point, Variant] = dict(zip(self._space.points, valid, strict=True))
        for variant in reversed(first):
            if (point := self._space.point(variant)) is not None:
                self._at[point] = variant
        self._first = deque(v for v in dict.fromkeys(first) if self._canonical(v) == v)
        self._untried = dict.fromkeys([*self._first, *self._at.values()])
        self._log_ms: dict[Variant, float | None] = {}
        # The trials of variants that were asked for and not told yet.
        self._asked: dict[Variant, optuna.Trial] = {}
        # Variants told without having been asked for, which the sampler does not know yet.
        self._unasked: list[Variant] = []
        self._random = random.Random(seed)
        points = list(self._at)
        self._sampler = make_sampler(sampler, self._space.codes(points), seed)
        # Optuna's Gaussian process samples only parameters that every trial has.
        self._encoding = (ByNumber(points) if isinstance(self._sampler, KrigingSampler)
                          else ByDimension(self._space, sampler != "gp", random.Random(seed)))  # fmt: skip
        # The listener shows progress; Optuna would log each study and trial on stderr.
        logging.getLogger("optuna").setLevel(logging.WARNING)
        self._study = optuna.create_study(sampler=self._sampler)

    def prefer(self, variants: Sequence[Variant]) -> None:
        """Ask for those of `variants` that are untried before all others."""
        self._first.extendleft(variant for variant in reversed(variants) if variant in self._untried)

    def expect(self, log_ratios: Mapping[Variant, float]) -> None:
        """Expect these logarithms of each variant's ratio to the best, measured on other batches.

        Optuna's samplers ignore them.
        """
        if isinstance(self._sampler, KrigingSampler):
            known = (log_ratios.get(variant, math.nan) for variant in self._at.values())
            self._sampler.expect(np.fromiter(known, float, len(self._at)))

    def claim(self, variant: Variant) -> bool:
        """Ask for `variant` out of turn; false if it was asked for or told before, or is not in the space."""
        if variant not in self._untried:
            return False
        self._take(variant)
        return True

    @property
    def has_first(self) -> bool:
        """True if the next variant is one to try first, which the sampler does not choose."""
        while self._first and self._first[0] not in self._untried:
            self._first.popleft()
        return bool(self._first)

    def ask(self) -> Variant | None:
        """The next variant to try, None when none is left."""
        if self.has_first:
            return self._take(self._first.popleft())
        self._add_unasked()
        for _ in range(FRUITLESS_ASKS if self._untried and self._at else 0):
            trial = self._study.ask()
            point = self._encoding.suggest(trial)
            variant = self._at.get(point)
            if variant in self._untried:
                return self._take(variant, trial)
            self._answer(trial, variant)
            # Asked again, the sampler would name the same point: take an untried variant near it.
            near = [v for p in self._space.neighbours(point) if (v := self._at.get(p)) in self._untried]
            if near:
                return self._take(self._random.choice(near))
        return self._take(self._random.choice(list(self._untried))) if self._untried else None

    def tell(self, outcome: Outcome) -> None:
        """Note the outcome of a variant, asked for or not; only the first outcome of a variant counts.

        Every outcome but `Timed` keeps the sampler away from that point.
        """
        variant = self._canonical(outcome.variant)
        if variant in self._log_ms:
            return
        self._untried.pop(variant, None)
        self._log_ms[variant] = math.log(outcome.timing.median_ms) if isinstance(outcome, Timed) else None
        trial = self._asked.pop(variant, None)
        if trial is not None:
            self._answer(trial, variant)
        else:
            self._unasked.append(variant)

    def _canonical(self, variant: Variant) -> Variant:
        """Map equivalent variants to their canonical one."""
        point = self._space.point(variant)
        return variant if point is None else self._at.get(point, variant)

    def _take(self, variant: Variant, trial: optuna.Trial | None = None) -> Variant:
        """Ask for `variant`, with the `trial` that suggests it or a new one.

        So the sampler knows all pending variants, whoever chose them.
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
        """Tell the sampler the result of `trial`, which fails while its variant is pending."""
        if variant is not None and variant not in self._log_ms:
            self._study.tell(trial, state=TrialState.FAIL)
            return
        log_ms = None if variant is None else self._log_ms[variant]
        # TPE ignores failed trials; a violated constraint keeps it away, provided that every trial has constraints.
        trial.set_constraint(_CONSTRAINT, _violation(log_ms))
        self._study.tell(trial, self._value(log_ms))

    def _add_unasked(self) -> None:
        """Add to the study what was told without having been asked for: if it is very much, only a part."""
        variants, self._unasked = self._unasked, []
        if len(variants) > MOST_ADDED and not isinstance(self._sampler, KrigingSampler):
            half = MOST_ADDED // 2
            variants.sort(key=lambda v: math.inf if (log_ms := self._log_ms[v]) is None else log_ms)
            variants = variants[:half] + self._random.sample(variants[half:], half)
        for variant in variants:
            point = self._space.point(variant)
            parameters = None if point is None else self._encoding.parameters(point)
            if parameters is None:
                continue
            log_ms = self._log_ms[variant]
            self._study.add_trial(optuna.create_trial(
                params=parameters,
                distributions=self._encoding.distributions(parameters),
                value=self._value(log_ms),
                constraints={_CONSTRAINT: _violation(log_ms)},
            ))  # fmt: skip

    def _value(self, log_ms: float | None) -> float:
        """The objective value of a trial: without a time the largest so far, for samplers that ignore constraints."""
        if log_ms is not None:
            return log_ms
        return max((value for value in self._log_ms.values() if value is not None), default=0.0)


def _violation(log_ms: float | None) -> float:
    return 1.0 if log_ms is None else -1.0


class ByNumber:
    """Encodes a point as one parameter: its number among `points`."""

    def __init__(self, points: Sequence[Point]) -> None:
        self._points = points
        self._number = {point: number for number, point in enumerate(points)}
        self._distribution = IntDistribution(0, max(0, len(points) - 1))

    def suggest(self, trial: optuna.Trial) -> Point:
        """The point that the sampler suggests."""
        return self._points[trial.suggest_int(NUMBER, 0, self._distribution.high)]

    def parameters(self, point: Point) -> Parameters | None:
        """Trial parameters that encode `point`; None for a point without a number."""
        number = self._number.get(point)
        return None if number is None else {NUMBER: number}

    def distributions(self, names: Iterable[str]) -> dict[str, BaseDistribution]:
        """The distributions of the parameters `names`."""
        return dict.fromkeys(names, self._distribution)


class ByDimension:
    """Encodes a point as its template and one parameter for each dimension.

    Trials have the parameters of their own template if `is_conditional`, else those of all templates.
    """

    def __init__(self, space: Space, is_conditional: bool, rng: random.Random) -> None:
        self._choices = space.choices
        self._is_conditional = is_conditional
        self._random = rng

    def suggest(self, trial: optuna.Trial) -> Point:
        """The point that the sampler suggests; it may have no valid variant."""
        templates = list(self._choices)
        chosen = str(trial.suggest_categorical(_TEMPLATE, templates)) if len(templates) > 1 else templates[0]
        points: dict[str, tuple[Value, ...]] = {}
        for template in self._templates_of(chosen):
            dimensions = self._choices[template].items()
            points[template] = tuple(_suggest(trial, _parameter(template, n), choices) for n, choices in dimensions)
        return chosen, points[chosen]

    def parameters(self, point: Point) -> Parameters:
        """Trial parameters that encode `point`, with random values for the dimensions of other templates."""
        chosen, values = point
        found: Parameters = {_TEMPLATE: chosen} if len(self._choices) > 1 else {}
        for template in self._templates_of(chosen):
            for index, (name, choices) in enumerate(self._choices[template].items()):
                value = values[index] if template == chosen else self._random.choice(choices)
                found[_parameter(template, name)] = choices.index(value) if is_ordered(choices) else value
        return found

    def distributions(self, names: Iterable[str]) -> dict[str, BaseDistribution]:
        """The distributions of the parameters `names`."""
        found: dict[str, BaseDistribution] = {_TEMPLATE: CategoricalDistribution(list(self._choices))}
        for template, dimensions in self._choices.items():
            for name, choices in dimensions.items():
                ordered = is_ordered(choices)
                distribution = IntDistribution(0, len(choices) - 1) if ordered else CategoricalDistribution(choices)
                found[_parameter(template, name)] = distribution
        return {name: found[name] for name in names}

    def _templates_of(self, chosen: str) -> list[str]:
        return [chosen] if self._is_conditional else list(self._choices)


def _suggest(trial: optuna.Trial, name: str, choices: tuple[Value, ...]) -> Value:
    # Ordered values are suggested by index, so that 16 and 32 are neighbours, as near as 64 and 128.
    if is_ordered(choices):
        return choices[trial.suggest_int(name, 0, len(choices) - 1)]
    return choices[choices.index(str(trial.suggest_categorical(name, choices)))]


def _parameter(template: str, dimension: str) -> str:
    return f"{template}.{dimension}"
