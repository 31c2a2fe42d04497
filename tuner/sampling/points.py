"""Variants as points: by the dimensions in which they differ, and as rows of small numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ...kernel_templates.variant import Value, Variant

Point = tuple[str, tuple[Value, ...]]

# Code of a dimension that the template of a point lacks.
ABSENT = -1


class Space:
    """The dimensions in which the variants of each template differ, with their values (`choices`).

    A dimension that has the value of another one in every variant is left out. `points` are those of `variants`.
    """

    def __init__(self, variants: Sequence[Variant]) -> None:
        rows: dict[str, list[tuple[tuple[str, Value], ...]]] = {}
        for variant in variants:
            rows.setdefault(variant.template, []).append(variant.values)
        self.choices: dict[str, dict[str, tuple[Value, ...]]] = {}
        values: dict[str, Iterator[tuple[Value, ...]]] = {}
        for template, own in rows.items():
            columns = _distinct(own)
            self.choices[template] = {name: _ordered(set(column)) for name, column in columns.items()}
            values[template] = zip(*columns.values(), strict=True) if columns else itertools.repeat(())
        self.points: list[Point] = [(variant.template, next(values[variant.template])) for variant in variants]

    def point(self, variant: Variant) -> Point | None:
        """The point of `variant`, None if it has a value that no variant of the space has."""
        values, dimensions = variant.as_dict(), self.choices.get(variant.template)
        if dimensions is None or any(values.get(name) not in choices for name, choices in dimensions.items()):
            return None
        return variant.template, tuple(values[name] for name in dimensions)

    def neighbours(self, point: Point) -> Iterator[Point]:
        """The points that differ from `point` in one dimension: by one step if its values are ordered."""
        template, values = point
        for index, choices in enumerate(self.choices[template].values()):
            for other in beside(values[index], choices):
                yield template, (*values[:index], other, *values[index + 1 :])

    def codes(self, points: Sequence[Point]) -> NDArray[np.int8]:
        """`[points, 1 + dimensions]`: the number of the template, then the rank of each value in its dimension.

        Templates share dimensions of the same name. `ABSENT` stands for a dimension that the template lacks.
        """
        merged: dict[str, set[Value]] = {}
        for dimensions in self.choices.values():
            for name, choices in dimensions.items():
                merged.setdefault(name, set()).update(choices)
        ranks = {name: {value: rank for rank, value in enumerate(_ordered(values))} for name, values in merged.items()}
        column = {name: 1 + index for index, name in enumerate(ranks)}
        numbers = {template: number for number, template in enumerate(self.choices)}
        found = np.full((len(points), 1 + len(ranks)), ABSENT, np.int8)
        found[:, 0] = [numbers[template] for template, _ in points]
        for template, dimensions in self.choices.items():
            rows = np.flatnonzero(found[:, 0] == numbers[template])
            values = [own for name, own in points if name == template]
            for index, name in enumerate(dimensions):
                rank = ranks[name]
                found[rows, column[name]] = [rank[own[index]] for own in values]
        return found


def beside(value: Value, choices: Sequence[Value]) -> Sequence[Value]:
    """The `choices` one step from `value`, which is one of them: all others if they are not ordered."""
    at = choices.index(value)
    steps = (at - 1, at + 1) if is_ordered(choices) else range(len(choices))
    return [choices[step] for step in steps if 0 <= step < len(choices) and step != at]


def is_ordered(choices: Iterable[Value]) -> bool:
    """True if the values are ordered: all are integers."""
    return all(isinstance(choice, int) for choice in choices)


def _distinct(rows: Sequence[tuple[tuple[str, Value], ...]]) -> dict[str, list[Value]]:
    """The columns with several values, by name, without those equal to an earlier column."""
    kept: dict[str, list[Value]] = {}
    for index, (name, _) in enumerate(rows[0]):
        column = [row[index][1] for row in rows]
        if len(set(column)) > 1 and column not in kept.values():
            kept[name] = column
    return kept


def _ordered(values: Iterable[Value]) -> tuple[Value, ...]:
    return tuple(sorted(values, key=lambda value: (isinstance(value, str), value)))
