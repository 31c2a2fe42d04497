"""Declaration of a template: its dimensions, its constraints, its traits and the class that launches it.

A template is declared once, in a module of its own. Another package adds one by naming its `Template` object under the
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

# The kernels load this many tokens at once, and never across a page's end.
PAGE_MULTIPLE = 16
_ALL = itertools.repeat(True)


@dataclass(frozen=True, slots=True)
class Dimension:
    """One axis of a template's variants."""

    name: str
    # From small to large, where they have an order.
    choices: tuple[Value, ...]
    # False if all choices share one compiled kernel.
    changes_code: bool = True
    # Choices that share one compiled kernel, where not all do.
    same_code: tuple[Value, ...] = ()
    # False if the interpreter runs the same program for all choices.
    interpreted: bool = True
    # The part of a batch that it is for: "short", "long", "both" if it weighs one against the other, "" for any batch.
    # A batch without the part needs one body only: the dimension then follows its counterpart.
    part: str = ""
    # The dimension whose value it takes in batches without its part; "" if it takes its first choice there.
    counterpart: str = ""
    # The choices tried for batches of both parts, in which two bodies multiply the variants; empty for all. The others
    # are valid there too.
    hybrid: tuple[Value, ...] = ()

    def code_value(self, value: Value) -> Value:
        """The choice that stands for `value` in a kernel's key: the first with the same compiled kernel."""
        if not self.changes_code:
            return self.choices[0]
        return self.same_code[0] if value in self.same_code else value


@dataclass(frozen=True, slots=True)
class Constraint:
    """A rule that the variants of a template keep."""

    # The reason given for a variant that breaks it.
    reason: str
    # True for a variant that keeps it. It must answer for every combination of the choices, also for one that breaks
    # another rule, and may read values of the variant only: each that it reads makes listing a search space slower.
    holds: Callable[[Variant, AttentionSpec, Gpu], bool]


@dataclass(frozen=True, slots=True)
class Body:
    """The tile shape of one body of a kernel: query rows and keys."""

    block_m: int
    block_n: int


SMALLEST = Body(16, 16)


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties of a variant in terms that all templates share, by which variants of different templates compare."""

    # The tile shapes of its bodies.
    bodies: tuple[Body, ...] = (SMALLEST,)
    # The most warps of a program.
    num_warps: int = 0
    # True if K and V come through TMA.
    has_tma: bool = False
    # Kernels launched for one batch, the merging of partial results included.
    launches: int = 1
    # A rank of how finely the keys of a sequence are cut into ranges for several programs; 1 if they never are.
    segments: int = 1
    # The ranges that every sequence's keys are cut into, however many there are; 1 if their number is bounded by the
    # GPU's size, or keys are not cut.
    fixed_segments: int = 1
    # The departures from what is plain, weighed so that a larger sum is the less plain: 0 for none.
    departures: int = 0


_PAGES = Constraint(f"the page size is no multiple of {PAGE_MULTIPLE}",
                    lambda variant, spec, gpu: variant.page_size % PAGE_MULTIPLE == 0)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Template:
    """One structure of the kernel.

    Raises `TunerError` when a dimension could get a value that is not among its choices, or has one twice.
    """

    name: str
    # Its `Launcher` class as `module:class`, imported only to run it. The kernel hash covers what this class names, and
    # what that names in turn.
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
        """The rules for a variant of valid values, in the order in which the first broken one gives the reason."""
        return (_PAGES, *self.constraints)

    def grid(self, bucket: BatchBucket, gpu: Gpu) -> dict[str, tuple[Value, ...]]:
        """The choices to try for batches of `bucket` on `gpu`, by dimension in sorted order.

        A dimension of a part that the batches do not have has one choice, as has one that the interpreter ignores.
        """
        is_hybrid = _has_part(bucket, "both")
        return {
            d.name: (is_hybrid and d.hybrid) or d.choices if self._is_free(d, bucket, gpu) else d.choices[:1]
            for d in sorted(self.dimensions, key=lambda d: d.name)
        }

    def variants(
        self, bucket: BatchBucket, gpu: Gpu, page_size: int, kept: Iterable[bool] = _ALL
    ) -> Iterator[Variant]:
        """The variants of `grid`, in the order of the product and settled for `bucket`; only those `kept`, if given."""
        # The variants share these pairs, which keeps a hundred thousand of them small.
        pairs = ([(name, value) for value in choices] for name, choices in self.grid(bucket, gpu).items())
        absent = self.absent(bucket)
        for values in itertools.compress(itertools.product(*pairs), kept):
            yield Variant(self.name, page_size, _settled(values, absent) if absent else values)

    def settle(self, variant: Variant, bucket: BatchBucket) -> Variant:
        """`variant` with the dimensions of parts that `bucket` does not have set to their counterparts."""
        return Variant(variant.template, variant.page_size, _settled(variant.values, self.absent(bucket)))

    def absent(self, bucket: BatchBucket) -> list[Dimension]:
        """The dimensions of a part that `bucket` does not have."""
        return [d for d in self.dimensions if not _has_part(bucket, d.part)]

    def code_key(self, variant: Variant) -> str:
        """The key of the compiled kernels: equal for variants that share them, for one spec and GPU."""
        dimensions = {d.name: d for d in self.dimensions}
        return variant.replace(**{name: dimensions[name].code_value(value) for name, value in variant.values}).key()

    def never_splits_kv(self, variant: Variant) -> bool:
        """True if `variant` never cuts the keys of a tile into ranges for several programs.

        Then nothing evens out sequences of different lengths, or fills a GPU that has more SMs than there are tiles:
        such a variant may win one batch and lose the next.
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
