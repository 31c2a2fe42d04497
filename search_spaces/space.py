"""Search space of one shape: the valid variants, and the reasons against the others.

Templates have hundreds of thousands of variants, but a rule reads few of their values. So a rule is not evaluated for
each variant. It is first called with a variant without values. If it reads a value, it is called again for each choice
of that value, and so on. Its answer then holds for all variants that share the values it has read.
"""

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
    """Variants of a shape, divided into valid and rejected ones."""

    # Distinct valid variants, in the templates' order.
    valid: tuple[Variant, ...]
    # Number of rejected variants by reason.
    rejected: Counter[str]


def survey(
    spec: AttentionSpec, bucket: BatchBucket, page_size: int, gpu: Gpu, names: Iterable[str] | None = None
) -> Survey:
    """List all distinct variants for batches in `bucket`, divided into valid and rejected ones.

    `names` selects templates; None means all installed ones. Raises `VariantError` for an unknown template.
    """
    chosen = tuple(templates()) if names is None else tuple(dict.fromkeys(names))
    unknown = [name for name in chosen if name not in templates()]
    if unknown:
        raise VariantError(f"unknown template {unknown[0]!r}; installed are {', '.join(templates())}")
    # Variants depend on the parts of a batch but not on their sizes, so a suite needs few surveys.
    parts = BatchBucket(*(min(size, 1) for size in astuple(bucket)))
    valid, rejected = _survey(spec, parts, page_size, gpu, chosen)
    return Survey(valid, Counter(dict(rejected)))


# Batches are of three kinds: short, long or both. A survey takes up to 40 MB.
@functools.lru_cache(maxsize=3)
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
    """Find the reason of the first rule that each variant of the template breaks; None for valid variants."""
    # Imported here, so that commands that list no variants start without numpy.
    import numpy as np

    grid = template.grid(bucket, gpu)
    # The axis of the grid that gives a dimension its value: its own axis or its counterpart's.
    axes = {name: name for name in grid} | {d.name: d.counterpart for d in template.absent(bucket) if d.counterpart}
    reasons = np.full([len(choices) for choices in grid.values()], None, object)

    def judge(rule: Constraint, chosen: dict[str, int]) -> None:
        """Record the rule's answer for all variants with the `chosen` indices; other axes are free."""
        known = {name: grid[axis][chosen[axis]] for name, axis in axes.items() if axis in chosen}
        try:
            holds = rule.holds(_PartialVariant(template.name, page_size, axes.keys(), known), spec, gpu)
        except _NotChosen as error:
            axis = axes[error.dimension]
            for index in range(len(grid[axis])):
                judge(rule, chosen | {axis: index})
        else:
            if not holds:
                reasons[tuple(chosen.get(axis, slice(None)) for axis in grid)] = rule.reason

    # Reversed, so that the reason of the first broken rule is recorded last.
    for rule in reversed(template.rules):
        judge(rule, {})
    return reasons.ravel().tolist()


class _NotChosen(BaseException):
    """A rule read a dimension without a chosen value. A BaseException, so that no rule catches it."""

    def __init__(self, dimension: str) -> None:
        super().__init__(dimension)
        self.dimension = dimension


class _PartialVariant(Variant):
    """Variant with `known` values for some of its dimensions `names`. Reading another raises `_NotChosen`."""

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
        """See `Variant.values`."""
        return tuple((name, value) for name in self.names if (value := self.get(name)) is not None)

    def get(self, name: str) -> Value | None:
        """See `Variant.get`."""
        if name in self.names and name not in self.known:
            raise _NotChosen(name)
        return self.known.get(name)
