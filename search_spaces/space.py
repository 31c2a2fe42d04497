"""The search space of one shape: which variants can run, and why the others cannot."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import astuple, dataclass

from ..kernel_templates.batch import BatchBucket
from ..kernel_templates.errors import VariantError
from ..kernel_templates.gpu import Gpu
from ..kernel_templates.registry import templates
from ..kernel_templates.spec import AttentionSpec
from ..kernel_templates.template import Constraint, Template
from ..kernel_templates.variant import Value, Variant


@dataclass(frozen=True, slots=True)
class Survey:
    """The distinct valid variants in the templates' order, and how many were rejected for each reason."""

    valid: tuple[Variant, ...]
    rejected: Counter[str]


def survey(
    spec: AttentionSpec, bucket: BatchBucket, page_size: int, gpu: Gpu, names: Iterable[str] | None = None
) -> Survey:
    """Every variant that can differ for batches in `bucket`, sorted into valid and rejected.

    `names` limits the templates; None means all that are installed. Raises `VariantError` when one is unknown.
    """
    chosen = tuple(templates()) if names is None else tuple(dict.fromkeys(names))
    unknown = [name for name in chosen if name not in templates()]
    if unknown:
        raise VariantError(f"unknown template {unknown[0]!r}; installed are {', '.join(templates())}")
    # A template's variants depend on which parts a batch has, not on their sizes: few surveys serve a whole suite.
    parts = BatchBucket(*(min(size, 1) for size in astuple(bucket)))
    valid, rejected = _survey(spec, parts, page_size, gpu, chosen)
    return Survey(valid, Counter(dict(rejected)))


@functools.lru_cache(maxsize=8)
def _survey(
    spec: AttentionSpec, bucket: BatchBucket, page_size: int, gpu: Gpu, names: tuple[str, ...]
) -> tuple[tuple[Variant, ...], tuple[tuple[str, int], ...]]:
    valid: list[Variant] = []
    rejected: Counter[str] = Counter()
    for template in map(templates().__getitem__, names):
        reasons = _reasons(template, bucket, page_size, spec, gpu)
        rejected.update(reason for reason in reasons if reason is not None)
        valid += template.variants(bucket, gpu, page_size, (reason is None for reason in reasons))
    return tuple(valid), tuple(rejected.items())


def _reasons(
    template: Template, bucket: BatchBucket, page_size: int, spec: AttentionSpec, gpu: Gpu
) -> list[str | None]:
    """For each of the template's variants the first rule that it breaks, or None.

    A rule looks at few of the values, and is asked once for all variants that share them: about a variant of which no
    value is known and then, where it looks at one, about those with each choice there is for it.
    """
    # The commands that survey nothing load no numpy.
    import numpy as np

    grid = template.grid(bucket, gpu)
    # By the dimension a rule looks at, the one whose choice it is.
    axes = {name: name for name in grid} | {d.name: d.counterpart for d in template.absent(bucket) if d.counterpart}
    reasons = np.full([len(choices) for choices in grid.values()], None, object)

    def judge(rule: Constraint, at: dict[str, int]) -> None:
        known = {name: grid[axis][at[axis]] for name, axis in axes.items() if axis in at}
        try:
            holds = rule.holds(_Partial(template.name, page_size, axes.keys(), known), spec, gpu)
        except _Unknown as unknown:
            axis = axes[unknown.args[0]]
        else:
            if not holds:
                reasons[tuple(at.get(axis, slice(None)) for axis in grid)] = rule.reason
            return
        for index in range(len(grid[axis])):
            judge(rule, at | {axis: index})

    for rule in reversed(template.rules):
        # The first rule has the last word.
        judge(rule, {})
    return reasons.ravel().tolist()


class _Unknown(BaseException):
    """The value of the dimension of this name was asked for, and is not known. No rule should catch it."""


class _Partial(Variant):
    """A variant with dimensions `names`, of which some have `known` values. Asked for another, it raises `_Unknown`."""

    __slots__ = ("known", "names")
    known: Mapping[str, Value]
    names: Collection[str]

    def __init__(self, template: str, page_size: int, names: Collection[str], known: Mapping[str, Value]) -> None:
        for field, value in (("template", template), ("page_size", page_size), ("names", names), ("known", known)):
            object.__setattr__(self, field, value)

    def __eq__(self, other: object) -> bool:
        return Variant(self.template, self.page_size, self.values) == other

    __hash__ = Variant.__hash__

    @property
    def values(self) -> tuple[tuple[str, Value], ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return tuple((name, value) for name in self.names if (value := self._value(name)) is not None)

    def _value(self, name: str) -> Value | None:
        if name in self.names and name not in self.known:
            raise _Unknown(name)
        return self.known.get(name)
