"""Counts of lookups by source, and the file of untuned shapes that `tune --from-misses` reads."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import ClassVar

from ...kernel_templates.batch import Batch, BatchBucket
from ...kernel_templates.errors import InputError, StoreError
from ...kernel_templates.gpu import Gpu
from ...kernel_templates.spec import AttentionSpec
from ..answer import SOURCES, Answer, Source
from .fields import Field, read_document, replace_file

MISSES_VERSION = 1

_EXPECTED = f"expected a file of misses of version {MISSES_VERSION}, as `write_misses` writes it"

Question = tuple[AttentionSpec, BatchBucket, int, Gpu]
"""The question of a lookup: a layer, a bucket of batches, a page size and a GPU."""


def require_question(spec: object, asked: object, page_size: object, gpu: object) -> None:
    """Raise `InputError` for an argument of the wrong type, such as a batch or a GPU given as text."""
    wanted = (
        ("layer", spec, AttentionSpec, "an AttentionSpec"),
        ("batch", asked, (Batch, BatchBucket), "a Batch or a BatchBucket"),
        ("page size", page_size, Integral, "a whole number"),
        ("GPU", gpu, Gpu, "a Gpu"),
    )
    for name, value, kinds, expected in wanted:
        if not isinstance(value, kinds):
            raise InputError(f"cannot look up the {name} {value!r}, of type {type(value).__name__}; expected "
                             f"{expected}")


class CachedAnswer:
    """The cached answer to a question, with counts.

    `exact` holds the answers for the tuned batches of the bucket. `refusal` is the message of the `NotTunedError` that
    a strict chain raises instead of an answer; None if it answers.
    """

    __slots__ = ("answer", "count", "exact", "exact_count", "refusal")

    def __init__(self, answer: Answer, exact: Mapping[Batch | BatchBucket, Answer], refusal: str | None) -> None:
        self.answer, self.exact, self.refusal = answer, exact, refusal
        # Counted without a lock, so concurrent lookups of several threads may be missed.
        self.count = self.exact_count = 0


@dataclass(frozen=True, slots=True)
class Miss:
    """A question without a tuned config."""

    question: Question
    # The source that answered it.
    source: Source
    # Number of lookups.
    count: int


@dataclass(frozen=True, slots=True)
class Coverage:
    """Counts of lookups by source, and the misses.

    A miss is a question whose bucket has no tuned config, so that a neighbour or the heuristic answered. A question
    that a strict chain refused counts under the source that would have answered.
    """

    # The most questions that a table caches before it clears the cache.
    QUESTIONS: ClassVar[int] = 65536
    # The most misses kept.
    MISSES: ClassVar[int] = 1000

    counts: Mapping[Source, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    # The most frequent first.
    misses: tuple[Miss, ...] = ()

    def plus(self, asked: Mapping[Question, CachedAnswer]) -> Coverage:
        """This coverage with the questions `asked` added."""
        counts = dict(self.counts)
        missed = {miss.question: miss for miss in self.misses}
        for question, known in list(asked.items()):
            source = known.answer.source
            counts["exact"] += known.exact_count
            counts[source] += known.count
            # Not a miss if the bucket's config answers for its own batch only: tuning again would give the same config.
            if source in ("neighbour", "heuristic") and known.count and not known.exact:
                before = missed[question].count if question in missed else 0
                missed[question] = Miss(question, source, before + known.count)
        order = sorted(missed.values(), key=lambda miss: -miss.count)
        return Coverage(counts, tuple(order[: self.MISSES]))


@dataclass(frozen=True, slots=True)
class MissedShape:
    """A shape to tune, read from a file of misses."""

    gpu_name: str
    spec: AttentionSpec
    page_size: int
    # A batch of the asked bucket.
    batch: Batch
    source: Source
    # Number of lookups of the bucket.
    count: int


def write_misses(coverage: Coverage, path: str | os.PathLike[str]) -> int:
    """Write the misses of `coverage` to `path`, the most frequent first, and return their number.

    Each miss gets a sample batch of its bucket. If the file cannot be written, it stays unchanged and `StoreError` is
    raised.
    """
    misses = [
        {"gpu": gpu.name, "spec": spec.key(), "page_size": page_size, "batch": str(bucket.sample()),
         "bucket": bucket.key(), "source": miss.source, "count": miss.count}
        for miss in coverage.misses for spec, bucket, page_size, gpu in [miss.question]
    ]  # fmt: skip
    lines = ",\n".join(f"  {json.dumps(miss)}" for miss in misses)
    counts = json.dumps(dict(coverage.counts))
    replace_file(path, f'{{"misses_version": {MISSES_VERSION},\n "lookups": {counts},\n "misses": [\n{lines}\n ]}}\n')
    return len(misses)


def read_misses(path: str | os.PathLike[str]) -> list[MissedShape]:
    """The misses in a file that `write_misses` wrote.

    Raises `StoreError` for any other file; the message names the first unusable value.
    """
    document = read_document(path, _EXPECTED)
    try:
        parts = document.members(("misses_version", "lookups", "misses"))
        if parts["misses_version"].whole() != MISSES_VERSION:
            parts["misses_version"].refuse(str(MISSES_VERSION))
        return [_miss(entry) for entry in parts["misses"].items()]
    except StoreError as error:
        raise StoreError(f"{str(path)!r} cannot be used: {error}; {_EXPECTED}") from error


def _miss(entry: Field) -> MissedShape:
    parts = entry.members(("gpu", "spec", "page_size", "batch", "bucket", "source", "count"))
    spec, batch, source = parts["spec"].text(), parts["batch"].text(), parts["source"].text()
    if source not in SOURCES:
        parts["source"].refuse(f"one of {', '.join(SOURCES)}")
    return MissedShape(
        parts["gpu"].text(),
        parts["spec"].made(lambda: AttentionSpec.parse(spec)),
        parts["page_size"].whole(least=1),
        parts["batch"].made(lambda: Batch.parse(batch)),
        source,
        parts["count"].whole(least=1),
    )
