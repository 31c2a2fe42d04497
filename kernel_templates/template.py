"""Declaration of a template: its dimensions, its constraints and the class that launches it.

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

# Tokens that the kernels load at once stay within a page.
PAGE_MULTIPLE = 16
_ALL = itertools.repeat(True)


@dataclass(frozen=True, slots=True)
class Dimension:
    """One axis of a template's variants, its choices from small to large where they have an order.

    `changes_code` is false when the values share one compiled kernel; `interpreted` is false when the interpreter
    runs the same for all values. A dimension of one `part` of a batch ("short", "long", or "both" where it weighs one
    against the other) follows its `counterpart` (or, with none, has its first choice) for batches without that part:
    such batches then need one body only. `hybrid`, where it is not empty, are the choices to try for batches of both
    parts, in which two bodies multiply the variants; all of `choices` are valid there too.
    """

    name: str
    choices: tuple[Value, ...]
    changes_code: bool = True
    interpreted: bool = True
    part: str = ""
    counterpart: str = ""
    hybrid: tuple[Value, ...] = ()


@dataclass(frozen=True, slots=True)
class Constraint:
    """A rule that a template's variants keep, and the reason given for one that breaks it.

    `holds` answers for every combination of the template's choices, also for one that breaks another rule. It looks at
    values of the variant, and neither at its type nor at a copy; the fewer, the faster a search space is listed.
    """

    reason: str
    holds: Callable[[Variant, AttentionSpec, Gpu], bool]


_PAGES = Constraint(f"the page size is no multiple of {PAGE_MULTIPLE}",
                    lambda variant, spec, gpu: variant.page_size % PAGE_MULTIPLE == 0)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Template:
    """One structure of the kernel. `launcher` names its `Launcher` class as `module:class`, imported only to run it.

    `sources` are the modules whose text affects a variant's result or time, beside the one of `launcher`. Without
    `writes_lse` it cannot be asked for the log-sum-exp; without `is_portable` it runs on one architecture only.
    `traits` are what all its variants share and therefore do not say, by which they compare with those of others:
    values of dimensions that others have, `partials_per_item`, and `launches` for batches of both parts. Raises
    `TunerError` when a dimension could come by a value that is not among its choices, or has one twice.
    """

    name: str
    launcher: str
    dimensions: tuple[Dimension, ...]
    constraints: tuple[Constraint, ...] = ()
    sources: tuple[str, ...] = ()
    writes_lse: bool = True
    is_portable: bool = True
    traits: tuple[tuple[str, Value], ...] = ()

    def __post_init__(self) -> None:
        choices = {d.name: d.choices for d in self.dimensions}
        for d in self.dimensions:
            lacking = {*d.hybrid, *choices.get(d.counterpart, ())}.difference(d.choices)
            if lacking:
                raise TunerError(f"dimension {d.name!r} of template {self.name!r} lacks the choice {lacking.pop()!r}, "
                                 "which hybrid batches or its counterpart have")
            if any(len(set(values)) < len(values) for values in (d.choices, d.hybrid)):
                raise TunerError(f"dimension {d.name!r} of template {self.name!r} lists a choice twice")

    @property
    def rules(self) -> tuple[Constraint, ...]:
        """What every variant keeps whose values are among the choices, in the order in which a reason is looked for."""
        return (_PAGES, *self.constraints)

    def grid(self, bucket: BatchBucket, gpu: Gpu) -> dict[str, tuple[Value, ...]]:
        """The choices by dimension, sorted, that can differ for batches in `bucket` on `gpu`, the others cut to one.

        Cut are dimensions of a part that the batches do not have, those that the interpreter cannot tell apart, and
        what is not worth trying for hybrid batches.
        """
        is_hybrid = _has_part(bucket, "both")
        return {
            d.name: (is_hybrid and d.hybrid) or d.choices if self._is_free(d, bucket, gpu) else d.choices[:1]
            for d in sorted(self.dimensions, key=lambda d: d.name)
        }

    def variants(
        self, bucket: BatchBucket, gpu: Gpu, page_size: int, kept: Iterable[bool] = _ALL
    ) -> Iterator[Variant]:
        """The combinations of the choices in `grid` that are `kept`, in their product's order, settled for `bucket`."""
        # The variants share these pairs, which keeps a hundred thousand of them small.
        pairs = ([(name, value) for value in choices] for name, choices in self.grid(bucket, gpu).items())
        absent = self.absent(bucket)
        for values in itertools.compress(itertools.product(*pairs), kept):
            yield Variant(self.name, page_size, _settled(values, absent) if absent else values)

    def settle(self, variant: Variant, bucket: BatchBucket) -> Variant:
        """`variant` with the dimensions of a part that `bucket` does not have as that part's absence makes them."""
        return Variant(variant.template, variant.page_size, _settled(variant.values, self.absent(bucket)))

    def absent(self, bucket: BatchBucket) -> list[Dimension]:
        """The dimensions of a part that `bucket` does not have."""
        return [d for d in self.dimensions if not _has_part(bucket, d.part)]

    def code_key(self, variant: Variant) -> str:
        """What variants that compile to the same kernels have in common, given one spec and GPU."""
        pinned = {d.name: d.choices[0] for d in self.dimensions if not d.changes_code}
        return variant.replace(**pinned).key()

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


def leaves_keys_whole(variant: Variant) -> bool:
    """Whether `variant` never cuts the keys of a tile into ranges for several programs.

    Then nothing evens out sequences of different lengths, nor occupies a GPU that the tiles alone do not fill: that it
    won one batch says little of others.
    """
    values = variant.as_dict()
    return values.get("waves") == 0 or values.get("num_segments") == 1
