"""The lookup: which variant to run, answered from a snapshot of the best configs."""

from __future__ import annotations

import functools
import hashlib
import logging
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...kernel_templates.batch import Batch, BatchBucket
from ...kernel_templates.errors import NotTunedError, TunerError
from ...kernel_templates.gpu import Gpu
from ...kernel_templates.outcome import BestConfig, Environment
from ...kernel_templates.registry import template_of, why_invalid
from ...kernel_templates.spec import AttentionSpec
from ...kernel_templates.template import leaves_keys_whole
from ..answer import Answer, Chain, Origin, Source
from ..losses import Losses
from ..models import UNREADABLE
from ..records import EnvironmentOf
from ..rows import Row, Rows, Slot, made, set_aside
from .coverage import Asked, Coverage, Question, require_question
from .merge import merit

__all__ = ["Answer", "Chain", "ConfigTable", "Origin", "Source"]

_PARTS = ("short", "long")

_log = logging.getLogger(__name__)

_Tuned = Mapping[BatchBucket, Sequence["_Held"]]


class _Held:
    """A row that is valid for a layer, page size and GPU, and the place of its origin in the stated order."""

    __slots__ = ("judged", "origin", "rank", "row")

    def __init__(self, row: Row, origin: Origin, rank: int) -> None:
        self.row = row
        self.origin: Origin = origin
        self.rank = rank
        self.judged: tuple[_Judged, ...] | None = None


@dataclass(frozen=True, slots=True)
class _Judged:
    """A config that may be served."""

    config: BestConfig
    stale: bool
    origin: Origin
    rank: int


class ConfigTable:
    """A frozen snapshot of best configs, whose `id` ranks can agree on.

    It is merged from places in a stated order, such as the user's database, files and what ships: of configs that are
    alike in all that counts more, that of the earlier place answers. What is invalid is set aside with one warning for
    each layer, page size and GPU asked about, which names what no earlier one did.
    """

    def __init__(self, places: Iterable[Rows[Any]], environment_of: EnvironmentOf | None = None,
                 chain: Chain | None = None, losses: Losses | None = None) -> None:
        self._places = tuple(places)
        self._environment_of = environment_of
        self.chain = chain or Chain()
        self._losses = losses or Losses()
        self._present = functools.cache(self._environment)
        self._tuned = functools.cache(self._valid)
        # An engine asks with every step: what depends on less than the batch is found out once.
        self._asked: dict[Question, Asked] = {}
        self._coverage = Coverage()
        self._told: set[tuple[object, ...]] = set()

    @classmethod
    def of(cls, configs: Iterable[BestConfig], environment_of: EnvironmentOf | None = None,
           shipped: Iterable[BestConfig] = (), chain: Chain | None = None) -> ConfigTable:
        """The table of the user's `configs` and of `shipped` ones; without `environment_of` none counts as stale."""
        return cls((made(configs, "database"), made(shipped, "shipped")), environment_of, chain)

    def __len__(self) -> int:
        return sum(map(len, self._places))

    @property
    def configs(self) -> tuple[BestConfig, ...]:
        """All configs that can be read, place by place, read anew; what cannot is set aside with a warning."""
        bad: list[str] = []
        found = tuple(config for place in self._places for config in place.configs(bad))
        self._set_aside(bad)
        return found

    @functools.cached_property
    def id(self) -> str:
        """Sixteen hexadecimal digits that stand for the places in their order, what each holds, and the chain.

        Tables of the same id that are asked the same answer with the same variant where the same kernel source, Triton
        and driver are present. What is present is not in it, nor are the losses to expect.
        """
        digest = hashlib.sha256(repr(self.chain).encode())
        for place in self._places:
            if lines := sorted(place.content()):
                digest.update("\n".join(("", place.origin, *lines)).encode())
        return digest.hexdigest()[:16]

    def lookup(self, spec: AttentionSpec, asked: Batch | BatchBucket, page_size: int, gpu: Gpu) -> Answer:
        """The variant to run for `asked`, always one that is valid here.

        The nearest bucket's config comes first, where it is within reach, has all parts that are asked and the same
        skew, and cuts keys. One of this very bucket that leaves keys whole answers for its own batch, and for others
        only where the count of their tiles is no matter (`heuristic.depends_on_rounds`), or where the chain accepts
        nothing else. Within a bucket a fresh one comes before a stale one, then one for this very batch, then one of
        the earlier place (the user's own before a shipped one), then one that passed the full check. Only configs of a
        GPU of this name and size are considered, unless the chain names others. Raises `VariantError` when no variant
        can run at all, as with a page size that is no multiple of 16, `NotTunedError` when the answer would come from
        further down than the chain accepts, and `InputError` for what is no question.
        """
        try:
            bucket = asked if isinstance(asked, BatchBucket) else BatchBucket.of(asked)
            question = (spec, bucket, page_size, gpu)
            known = self._asked.get(question)
        except (AttributeError, TypeError):
            require_question(spec, asked, page_size, gpu)
            raise
        if known is None:
            require_question(spec, asked, page_size, gpu)
            known = self._ask(question)
        if known.exact and asked is not bucket and asked in known.exact:
            known.exact_count += 1
            return known.exact[asked]
        known.count += 1
        if known.refusal is not None:
            raise NotTunedError(known.refusal)
        return known.answer

    def coverage(self) -> Coverage:
        """How many lookups were answered from each source so far, and what was asked that nothing was tuned for."""
        return self._coverage.plus(self._asked)

    def take_over(self, previous: ConfigTable) -> None:
        """Count on from where `previous` is, and do not tell again what it has told."""
        self._coverage = previous.coverage()
        self._told = previous._told

    def _ask(self, question: Question) -> Asked:
        if len(self._asked) >= Coverage.QUESTIONS:
            # Far more than the buckets that an engine meets: what was asked is counted, and asked anew.
            self._coverage, self._asked = self.coverage(), {}
        spec, bucket, page_size, gpu = question
        tuned = self._tuned(spec, page_size, gpu, None)
        of_bucket = list(self._served(tuned.get(bucket, ()), bucket, gpu, 0.0))
        answer = self._answer(question, of_bucket)
        if of_bucket and not self.chain.accepts(answer.source):
            answer = self._valued(of_bucket[0], gpu, None)
        known = self._asked[question] = Asked(answer, _exact(of_bucket), self._refusal(question, answer))
        self._tell(question, answer, is_tuned=bool(of_bucket))
        return known

    def _refusal(self, question: Question, answer: Answer) -> str | None:
        if self.chain.accepts(answer.source):
            return None
        spec, bucket, page_size, gpu = question
        return (f"nothing is tuned on {gpu.name} for bucket {bucket.key()} of layer {spec.key()} with pages of "
                f"{page_size}: the answer would be of source {answer.source!r}, and accepted are {self.chain}")

    def _tell(self, question: Question, answer: Answer, *, is_tuned: bool) -> None:
        """Log, once for each layer, page size, GPU and kind, that an answer is not of what was tuned, or is stale."""
        spec, bucket, page_size, gpu = question
        slot = Slot.of(spec, page_size, gpu)
        where = f"{gpu.name}, layer {spec.key()}, pages of {page_size}"
        if answer.stale and self._is_new(slot, "stale"):
            _log.warning("%s: what was tuned was measured with another kernel source, Triton or driver, and is served "
                         "until it is tuned again", where)
        if answer.source not in ("neighbour", "heuristic"):
            return
        if is_tuned:
            if self._is_new(slot, "whole"):
                _log.info("%s: what was tuned for bucket %s never cuts keys, and answers for the batch that it was "
                          "tuned on; for the others %s does; others answered so are not told of", where, bucket.key(),
                          answer.source)
        elif self._is_new(slot, answer.source, answer.lender):
            others = self._elsewhere(slot)
            level = logging.WARNING if answer.source == "heuristic" else logging.INFO
            _log.log(level, "%s: nothing is tuned for bucket %s%s, which %s answers%s; the order is %s, and others "
                     "answered so are not told of", where, bucket.key(), others, answer.source,
                     f" by what was tuned on {answer.lender}" if answer.lender else "", self.chain)

    def _elsewhere(self, own: Slot) -> str:
        """What a message says of the GPUs that the layer is tuned on where it is not on that of `own`."""
        slots = {slot for place in self._places for slot in place.slots
                 if (slot.spec, slot.page_size) == (own.spec, own.page_size)}
        if not slots or own in slots:
            return ""
        names = {
            slot.gpu_name if slot.gpu_name != own.gpu_name else
            f"{slot.gpu_name} of {slot.num_sms} multiprocessors, where this one has {own.num_sms}"
            for slot in slots
        }  # fmt: skip
        return f" (it is on {', '.join(sorted(names))})"

    def _is_new(self, *kind: object) -> bool:
        known = len(self._told)
        self._told.add(kind)
        return len(self._told) > known

    def _answer(self, question: Question, of_bucket: Sequence[Answer]) -> Answer:
        """The answer for all batches of a bucket: the best one of the first link of the chain that has any."""
        spec, bucket, page_size, gpu = question
        from ...kernel_templates.heuristic import depends_on_rounds, heuristic_variant

        for lender in (None, *self.chain.like):
            tuned = self._tuned(spec, page_size, gpu, lender)
            for distance, near in _by_distance(tuned, bucket, self.chain.reach):
                is_own_bucket = lender is None and not distance
                # Of a neighbour `_serve` has sorted out all that leaves keys whole.
                for answer in of_bucket if is_own_bucket else self._served(near, bucket, gpu, distance):
                    if not depends_on_rounds(answer.variant, spec, bucket, gpu):
                        return self._valued(answer, gpu, lender)
        nearest = min(map(bucket.distance, self._tuned(spec, page_size, gpu, None)), default=None)
        answer = Answer(heuristic_variant(spec, bucket, page_size, gpu), "heuristic", distance=nearest)
        return self._valued(answer, gpu, None)

    def _served(self, near: Sequence[_Held], bucket: BatchBucket, gpu: Gpu, distance: float) -> Iterator[Answer]:
        """The answers that rows at a distance from `bucket` give, the best first."""
        judged = sorted((each for held in near for each in self._judge(held, gpu)), key=_preference)
        return (answer for each in judged if (answer := _serve(each, bucket, gpu, distance)))

    def _valued(self, answer: Answer, gpu: Gpu, lender: str | None) -> Answer:
        """`answer` with the loss to expect, of which nothing is known where another GPU lends."""
        if lender is not None:
            return replace(answer, source="neighbour", lender=lender)
        return replace(answer, loss=self._losses.expect(gpu.name, answer.source, answer.distance))

    def _valid(self, spec: AttentionSpec, page_size: int, gpu: Gpu, lender: str | None) -> _Tuned:
        """The rows that are valid here, of `gpu` or of the GPU that lends, by the bucket that they were tuned for."""
        found: dict[BatchBucket, list[_Held]] = defaultdict(list)
        bad: list[str] = []
        own = Slot.of(spec, page_size, gpu)
        for rank, place in enumerate(self._places):
            bad += place.unreadable
            for slot in [own] if lender is None else place.lent(own, lender):
                for row in place.read(slot, bad):
                    reason = why_invalid(row.variant, spec, gpu)
                    if reason is None:
                        found[row.bucket].append(_Held(row, place.origin, rank))
                    else:
                        bad.append(f"{row.label()}: {reason}")
        self._set_aside(bad)
        return dict(found)

    def _set_aside(self, bad: Iterable[str]) -> None:
        """Warn of labels and reasons that neither this table nor one that it took over from has named."""
        set_aside([each for each in bad if self._is_new("set aside", each)])

    def _judge(self, held: _Held, gpu: Gpu) -> tuple[_Judged, ...]:
        """The config of a row where it may be served, read once."""
        if held.judged is None:
            held.judged = tuple(self._readable(held, gpu))
        return held.judged

    def _readable(self, held: _Held, gpu: Gpu) -> Iterator[_Judged]:
        try:
            config = held.row.config()
        except UNREADABLE as error:
            self._set_aside([f"{held.row.label()} cannot be read: {error}"])
            return
        # Times from the interpreter under a GPU's name, or the reverse, are no evidence about either.
        if config is None or config.gpu.is_interpreter != (config.timing.regime.capture == "interpreter"):
            return
        if self._environment_of is None:
            yield _Judged(config, False, held.origin, held.rank)
            return
        present = self._present(config.variant.template, gpu)
        if present is not None:
            yield _Judged(config, _is_stale(config.environment, present), held.origin, held.rank)

    def _environment(self, template: str, gpu: Gpu) -> Environment | None:
        """The environment of `template` here, None when its modules are not."""
        assert self._environment_of is not None
        try:
            return self._environment_of(template, gpu)
        except TunerError as error:
            # An installed template that is broken must not end an engine that can do without.
            warnings.warn(f"the configs of template {template!r} are set aside: {error}", stacklevel=2)
            return None


def _is_stale(measured: Environment, present: Environment) -> bool:
    # A Triton whose version is unknown may be any.
    if not present.triton:
        return True
    return (present.kernel_hash, present.triton, present.driver) != (
        measured.kernel_hash, measured.triton, measured.driver)


def _by_distance(tuned: _Tuned, bucket: BatchBucket, reach: float) -> Iterator[tuple[float, Sequence[_Held]]]:
    """The rows for `bucket`, then those at each distance up to `reach`, nearest first.

    Left out are rows tuned without a part that is asked, and with short sequences of another skew: lengths that differ
    are cut otherwise.
    """
    if bucket in tuned:
        yield 0.0, tuned[bucket]
    distances: dict[float, list[_Held]] = defaultdict(list)
    for other, held in tuned.items():
        if other != bucket and _is_alike(other, bucket) and (distance := bucket.distance(other)) <= reach:
            distances[distance] += held
    for distance in sorted(distances):
        yield distance, distances[distance]


def _is_alike(other: BatchBucket, bucket: BatchBucket) -> bool:
    """Whether a config of `other` has all parts of `bucket`, and short sequences of its skew if it has any."""
    has_parts = all(other.has_part(part) for part in _PARTS if bucket.has_part(part))
    return has_parts and (not bucket.has_part("short") or other.short_skew == bucket.short_skew)


def _serve(judged: _Judged, bucket: BatchBucket, gpu: Gpu, distance: float) -> Answer | None:
    """The answer that a config gives, None where its variant as it would run for `bucket` is invalid.

    A neighbour whose variant leaves keys whole gives none either.
    """
    config = judged.config
    variant = template_of(config.variant).settle(config.variant, bucket)
    if why_invalid(variant, config.shape.spec, gpu) or (distance and leaves_keys_whole(variant)):
        return None
    return Answer(variant, "neighbour" if distance else "bucket", config, judged.stale, distance, judged.origin)


def _exact(answers: Sequence[Answer]) -> dict[Batch | BatchBucket, Answer]:
    """The first answer for each batch that was tuned itself; a stale one where the bucket has none but stale ones."""
    found: dict[Batch | BatchBucket, Answer] = {}
    for answer in answers:
        if answer.config is not None and answer.stale == answers[0].stale:
            found.setdefault(Batch.parse(answer.config.batch), replace(answer, source="exact", loss=0.0))
    return found


def _preference(judged: _Judged) -> tuple[object, ...]:
    """Sorts what answers first to the front."""
    return (judged.stale, judged.rank, *merit(judged.config))
