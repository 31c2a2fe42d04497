"""How a variant is written as the parameters of an Optuna trial: a value for each dimension, or one number."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Protocol

from optuna import Trial
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from ...kernel_templates.variant import Value
from .points import Point, Space, is_ordered
from .pool_sampler import NUMBER

Parameters = dict[str, Value]
_TEMPLATE = "template"


class Encoding(Protocol):
    """Points as parameters of trials."""

    def suggest(self, trial: Trial) -> Point:
        """The point that the sampler suggests, at which there need not be a valid variant."""
        ...

    def parameters(self, point: Point) -> Parameters | None:
        """What would have to be suggested to name `point`; None where nothing can name it."""
        ...

    def distributions(self, names: Iterable[str]) -> dict[str, BaseDistribution]:
        """Those of the parameters called `names`."""
        ...


class ByNumber:
    """One parameter: the number of the point among `points`."""

    def __init__(self, points: Sequence[Point]) -> None:
        self._points = points
        self._number = {point: number for number, point in enumerate(points)}
        self._distribution = IntDistribution(0, max(0, len(points) - 1))

    def suggest(self, trial: Trial) -> Point:
        """The point that the sampler chooses."""
        return self._points[trial.suggest_int(NUMBER, 0, self._distribution.high)]

    def parameters(self, point: Point) -> Parameters | None:
        """The number of `point`; None where it is none of the points."""
        number = self._number.get(point)
        return None if number is None else {NUMBER: number}

    def distributions(self, names: Iterable[str]) -> dict[str, BaseDistribution]:
        """That of the number."""
        return dict.fromkeys(names, self._distribution)


class ByDimension:
    """The template and a value for each of its dimensions; of all templates where a sampler knows no conditions."""

    def __init__(self, space: Space, is_conditional: bool, rng: random.Random) -> None:
        self._choices = space.choices
        self._is_conditional = is_conditional
        self._random = rng

    def suggest(self, trial: Trial) -> Point:
        """The point that the sampler suggests, at which there need not be a valid variant."""
        templates = list(self._choices)
        chosen = str(trial.suggest_categorical(_TEMPLATE, templates)) if len(templates) > 1 else templates[0]
        points: dict[str, tuple[Value, ...]] = {}
        for template in self._described(chosen):
            dimensions = self._choices[template].items()
            points[template] = tuple(_suggest(trial, _parameter(template, n), choices) for n, choices in dimensions)
        return chosen, points[chosen]

    def parameters(self, point: Point) -> Parameters:
        """The template and the values of `point`; what means nothing for its template is given any value."""
        chosen, values = point
        found: Parameters = {_TEMPLATE: chosen} if len(self._choices) > 1 else {}
        for template in self._described(chosen):
            for index, (name, choices) in enumerate(self._choices[template].items()):
                value = values[index] if template == chosen else self._random.choice(choices)
                found[_parameter(template, name)] = choices.index(value) if is_ordered(choices) else value
        return found

    def distributions(self, names: Iterable[str]) -> dict[str, BaseDistribution]:
        """Those of the parameters called `names`."""
        found: dict[str, BaseDistribution] = {_TEMPLATE: CategoricalDistribution(list(self._choices))}
        for template, dimensions in self._choices.items():
            for name, choices in dimensions.items():
                ordered = is_ordered(choices)
                distribution = IntDistribution(0, len(choices) - 1) if ordered else CategoricalDistribution(choices)
                found[_parameter(template, name)] = distribution
        return {name: found[name] for name in names}

    def _described(self, chosen: str) -> list[str]:
        return [chosen] if self._is_conditional else list(self._choices)


def _suggest(trial: Trial, name: str, choices: tuple[Value, ...]) -> Value:
    # The sampler is to know that 16 and 32 are neighbours, and no further apart than 64 and 128.
    if is_ordered(choices):
        return choices[trial.suggest_int(name, 0, len(choices) - 1)]
    return choices[choices.index(str(trial.suggest_categorical(name, choices)))]


def _parameter(template: str, dimension: str) -> str:
    return f"{template}.{dimension}"
