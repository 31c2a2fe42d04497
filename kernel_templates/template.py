"""Declaration of a template: its dimensions, its constraints, its traits and the class that launches it.

A template is declared once, in its own module. Another package adds a template by listing its `Template` object in the
entry point group `attention_tuner.templates`, which `registry` reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from .batch import BatchBucket
from .errors import TunerError
from .gpu import Gpu
from .spec import AttentionSpec
from .variant import Value, Variant

# The kernels load this many tokens at once, within one page.
PAGE_MULTIPLE = 16
_ALL = itertools.repeat(True)


@dataclass(frozen=True, slots=True)
class Dimension:
    """One axis of a template's variants."""

    name: str
    # In ascending order, if they have one.
    choices: tuple[Value, ...]
    # False if all choices compile to the same kernel.
    changes_code: bool = True
    # Choices that compile to the same kernel, if only some do.
    same_code: tuple[Value, ...] = ()
    # False if all choices run the same program in the interpreter.
    interpreted: bool = True
    # The part of a batch that it applies to: "short", "long", "both" for their balance, "" for any batch. A batch
    # without this part needs one body only, and the dimension then follows its counterpart.
    part: str = ""
    # The dimension whose value it takes for batches without its part; "" if it then takes its first choice.
    counterpart: str = ""
    # The choices tried for batches of both parts, where two bodies multiply the variants; empty for all. The other
    # choices stay valid there.
    hybrid: tuple[Value, ...] = ()

    def code_value(self, value: Value) -> Value:
        """The choice that stands for `value` in a kernel's key: the first with the same compiled kernel."""
        if not self.changes_code:
            return self.choices[0]
        return self.same_code[0] if value in self.same_code else value


@dataclass(frozen=True, slots=True)
class Constraint:
    """A rule that the variants of a template keep."""

    # The reason shown for a variant that breaks it.
    reason: str
    # True for a variant that keeps it. Must answer for every combination of choices, even one that breaks another rule.
    # May read only the variant's values; each value that it reads makes listing a search space slower.
    holds: Callable[[Variant, AttentionSpec, Gpu], bool]


@dataclass(frozen=True, slots=True)
class Body:
    """The tile shape of one body of a kernel: query rows and keys."""

    block_m: int
    block_n: int


SMALLEST = Body(16, 16)


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties that all templates share, for comparing variants of different templates."""

    # The tile shapes of its bodies.
    bodies: tuple[Body, ...] = (SMALLEST,)
    # The most warps of a program.
    num_warps: int = 0
    # True if K and V come through TMA.
    has_tma: bool = False
    # Kernels launched for one batch, the merging of partial results included.
    launches: int = 1
    # A rank that grows with the number of segments per sequence; 1 if KV is never split.
    segments: int = 1
    # Segments of every sequence if their number is fixed; 1 if it is limited by the number of SMs or KV is not split.
    fixed_segments: int = 1
    # A weighted count of departures from the plain kernel; 0 for the plain kernel.
    departures: int = 0


_PAGES = Constraint(f"the page size is no multiple of {PAGE_MULTIPLE}",
                    lambda variant, spec, gpu: variant.page_size % PAGE_MULTIPLE == 0)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Template:
    """One structure of the kernel.

    Raises `TunerError` if a dimension could get a value that is not among its choices, or lists a choice twice.
    """

    name: str
    # Its `Launcher` class as `module:class`, imported only to run it. The kernel hash covers all code that this class
    # uses, directly or indirectly.
    launcher: str
    dimensions: tuple[Dimension, ...]
    constraints: tuple[Constraint, ...] = ()
    traits: Callable[[Variant], Traits] = lambda variant: Traits()
    # False if it cannot write the log-sum-exp.
    writes_lse: bool = True
    # False if it runs on one architecture only.
    is_portable: bool = True

    def __post_init__(self) -> None:
        choices = {d.name: d.choices for d in self.dimensions}
        for d in self.dimensions:
            lacking = {*d.hybrid, *d.same_code, *choices.get(d.counterpart, ())}.difference(d.choices)
            if lacking:
                raise TunerError(f"dimension {d.name!r} of template {self.name!r} lacks the choice {lacking.pop()!r}, "
                                 "which it names elsewhere or its counterpart has")
            if any(len(set(values)) < len(values) for values in (d.choices, d.hybrid)):
                raise TunerError(f"dimension {d.name!r} of template {self.name!r} lists a choice twice")

    @property
    def rules(self) -> tuple[Constraint, ...]:
        """The rules for a variant whose values are all choices; the first broken rule gives the reason."""
        return (_PAGES, *self.constraints)

    def grid(self, bucket: BatchBucket, gpu: Gpu) -> dict[str, tuple[Value, ...]]:
        """The choices to try for batches of `bucket` on `gpu`, by dimension in sorted order.

        A dimension has one choice if the batches lack its part or the interpreter ignores it.
        """
        is_hybrid = _has_part(bucket, "both")
        return {
            d.name: (is_hybrid and d.hybrid) or d.choices if self._is_free(d, bucket, gpu) else d.choices[:1]
            for d in sorted(self.dimensions, key=lambda d: d.name)
        }

    def variants(
        self, bucket: BatchBucket, gpu: Gpu, page_size: int, kept: Iterable[bool] = _ALL
    ) -> Iterator[Variant]:
        """The variants of `grid` in product order, settled for `bucket`; `kept` selects some of them."""
        # The variants share these pairs, so that a hundred thousand variants need little memory.
        pairs = ([(name, value) for value in choices] for name, choices in self.grid(bucket, gpu).items())
        absent = self.absent(bucket)
        for values in itertools.compress(itertools.product(*pairs), kept):
            yield Variant(self.name, page_size, _settled(values, absent) if absent else values)

    def settle(self, variant: Variant, bucket: BatchBucket) -> Variant:
        """`variant` with each dimension whose part `bucket` lacks set to its counterpart's value."""
        return Variant(variant.template, variant.page_size, _settled(variant.values, self.absent(bucket)))

    def absent(self, bucket: BatchBucket) -> list[Dimension]:
        """The dimensions whose part `bucket` lacks."""
        return [d for d in self.dimensions if not _has_part(bucket, d.part)]

    def code_key(self, variant: Variant) -> str:
        """The key of the compiled kernels; equal for variants that share them on one spec and GPU."""
        dimensions = {d.name: d for d in self.dimensions}
        return variant.replace(**{name: dimensions[name].code_value(value) for name, value in variant.values}).key()

    def never_splits_kv(self, variant: Variant) -> bool:
        """True if `variant` never splits the keys of a tile into segments for several programs.

        Such a variant may win one batch and lose the next. It balances no sequences of different lengths, and leaves
        SMs idle when there are fewer tiles than SMs.
        """
        return self.traits(variant).segments == 1

    def _is_free(self, dimension: Dimension, bucket: BatchBucket, gpu: Gpu) -> bool:
        if gpu.is_interpreter and not dimension.interpreted:
            return False
        return _has_part(bucket, dimension.part)


def _settled(pairs: tuple[tuple[str, Value], ...], absent: list[Dimension]) -> tuple[tuple[str, Value], ...]:
    values = dict(pairs)
    settled = {d.name: values[d.counterpart] if d.counterpart else d.choices[0] for d in absent}
    return tuple((values | settled).items())


def _has_part(bucket: BatchBucket, part: str) -> bool:
    parts = ("short", "long") if part == "both" else (part,) if part else ()
    return all(map(bucket.has_part, parts))
