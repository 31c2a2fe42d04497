"""Which questions a table was asked: how many were answered from each source, and which shapes are worth tuning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import ClassVar

from ...kernel_templates.batch import Batch, BatchBucket
from ...kernel_templates.errors import InputError
from ...kernel_templates.gpu import Gpu
from ...kernel_templates.spec import AttentionSpec
from ..answer import SOURCES, Answer, Source

Question = tuple[AttentionSpec, BatchBucket, int, Gpu]
"""What a table is asked: a layer, a bucket of batches, a page size and a GPU."""


def require_question(spec: object, asked: object, page_size: object, gpu: object) -> None:
    """Raises `InputError` for what no table can be asked, such as a batch or a GPU as a text."""
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


class Asked:
    """A question's answer, or why it is refused, those for batches that were tuned themselves, and how often each was
    given."""

    __slots__ = ("answer", "count", "exact", "exact_count", "refusal")

    def __init__(self, answer: Answer, exact: Mapping[Batch | BatchBucket, Answer], refusal: str | None) -> None:
        self.answer, self.exact, self.refusal = answer, exact, refusal
        # Counted without a lock: of lookups in several threads at once a few may be missed.
        self.count = self.exact_count = 0


@dataclass(frozen=True, slots=True)
class Miss:
    """A question that nothing was tuned for, `count` times asked, and where its answer came from."""

    question: Question
    source: Source
    count: int


@dataclass(frozen=True, slots=True)
class Coverage:
    """How many lookups each source answered, and the misses, the most frequent first and at most `MISSES`.

    A miss is answered by a neighbour or the heuristic, and nothing is tuned for its bucket; one that a strict chain
    refused counts as what it would have been answered by.
    """

    QUESTIONS: ClassVar[int] = 65536
    MISSES: ClassVar[int] = 1000

    counts: Mapping[Source, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    misses: tuple[Miss, ...] = ()

    def plus(self, asked: Mapping[Question, Asked]) -> Coverage:
        """This coverage and that of the questions `asked` since."""
        counts = dict(self.counts)
        missed = {miss.question: miss for miss in self.misses}
        for question, known in list(asked.items()):
            source = known.answer.source
            counts["exact"] += known.exact_count
            counts[source] += known.count
            # What was tuned for a bucket and answers for its own batch only would win it again.
            if source in ("neighbour", "heuristic") and known.count and not known.exact:
                before = missed[question].count if question in missed else 0
                missed[question] = Miss(question, source, before + known.count)
        order = sorted(missed.values(), key=lambda miss: -miss.count)
        return Coverage(counts, tuple(order[: self.MISSES]))
