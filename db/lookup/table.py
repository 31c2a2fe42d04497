"""The lookup table: finds the variant to run for a batch in a snapshot of the best configs."""

from __future__ import annotations

import functools
import hashlib
import logging
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...kernel_templates.batch import Batch, BatchBucket
from ...kernel_templates.errors import NotTunedError, TunerError
from ...kernel_templates.gpu import Gpu
from ...kernel_templates.outcome import BestConfig, Environment
from ...kernel_templates.registry import template_of, why_invalid
from ...kernel_templates.spec import AttentionSpec
from ..answer import Answer, Chain, Origin
from ..losses import Losses
from ..records import EnvironmentOf, label_of, warn_unusable
from .coverage import CachedAnswer, Coverage, Question, require_question
from .merge import merit

_PARTS = ("short", "long")

_log = logging.getLogger(__name__)


class Place(NamedTuple):
    """The configs of one origin, such as the user's database or a file."""

    origin: Origin
    configs: Sequence[BestConfig]


class Slot(NamedTuple):
    """Layer, page size and GPU. A config answers only questions of its own slot."""

    spec: AttentionSpec
    page_size: int
    gpu_name: str
    num_sms: int
    capability: tuple[int, int]

    @classmethod
    def of(cls, spec: AttentionSpec, page_size: int, gpu: Gpu) -> Slot:
        """The slot of a question."""
        return cls(spec, page_size, gpu.name, gpu.num_sms, gpu.capability)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A config that is valid for a layer, page size and GPU."""

    config: BestConfig
    origin: Origin
    # Index of its place.
    rank: int
    stale: bool


_Tuned = Mapping[BatchBucket, Sequence[_Candidate]]


class ConfigTable:
    """A frozen snapshot of best configs, whose `id` the ranks of an engine can compare.

    It merges places in order: the user's database, files, shipped configs. Of equally good configs, the one of the
    earlier place answers. Invalid configs are skipped, with one warning per layer, page size and GPU that names each
    config once.
    """

    def __init__(self, places: Iterable[Place], environment_of: EnvironmentOf | None = None,
                 chain: Chain | None = None, losses: Losses | None = None) -> None:
        self._places = tuple(places)
        self._environment_of = environment_of
        self.chain = chain or Chain()
        self._losses = losses or Losses()
        self._slots: dict[Slot, list[tuple[int, BestConfig]]] = defaultdict(list)
        for rank, place in enumerate(self._places):
            for config in place.configs:
                slot = Slot.of(config.shape.spec, config.variant.page_size, config.gpu)
                self._slots[slot].append((rank, config))
        self._present = functools.cache(self._environment)
        self._tuned = functools.cache(self._valid)
        # Cached, because an engine asks in every step.
        self._cached: dict[Question, CachedAnswer] = {}
        self._coverage = Coverage()
        self._reported: set[tuple[object, ...]] = set()

    @classmethod
    def of(cls, configs: Iterable[BestConfig], environment_of: EnvironmentOf | None = None,
           shipped: Iterable[BestConfig] = (), chain: Chain | None = None) -> ConfigTable:
        """The table of the user's `configs` and `shipped` ones. Without `environment_of` no config is stale."""
        return cls((Place("database", tuple(configs)), Place("shipped", tuple(shipped))), environment_of, chain)

    def __len__(self) -> int:
        return sum(len(place.configs) for place in self._places)

    @property
    def configs(self) -> tuple[BestConfig, ...]:
        """All configs, place by place."""
        return tuple(config for place in self._places for config in place.configs)

    @functools.cached_property
    def id(self) -> str:
        """A hash of the chain and of each place's configs, as 16 hexadecimal digits.

        Tables with the same id give the same variants if the same kernel source, Triton and driver are installed. The
        id covers neither these nor the expected losses.
        """
        digest = hashlib.sha256(repr(self.chain).encode())
        for place in self._places:
            if lines := sorted(map(repr, place.configs)):
                digest.update("\n".join(("", place.origin, *lines)).encode())
        return digest.hexdigest()[:16]

    def lookup(self, spec: AttentionSpec, asked: Batch | BatchBucket, page_size: int, gpu: Gpu) -> Answer:
        """The variant to run for `asked`, valid for `spec` on `gpu`.

        The config of the nearest bucket answers first. It must be within reach, have all parts of the asked bucket and
        the same skew, and split KV. A config of the asked bucket that never splits KV answers for its own batch. It
        answers for other batches only if the number of their tiles does not matter (`heuristic.may_depend_on_waves`) or
        the chain accepts no other source. The order within a bucket: fresh before stale, then the config of the asked
        batch, then the earlier place (the user's before the shipped one), then one that passed the full check. Configs
        of other GPUs (another name or number of SMs) count only if the chain names them.

        Raises `VariantError` if no variant can run (for example a page size that is no multiple of 16), `NotTunedError`
        if only a source that the chain does not accept could answer, and `InputError` for arguments of other types.
        """
        try:
            bucket = asked if isinstance(asked, BatchBucket) else BatchBucket.of(asked)
            question = (spec, bucket, page_size, gpu)
            known = self._cached.get(question)
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
        """Counts of lookups by source so far, and the misses."""
        return self._coverage.plus(self._cached)

    def take_over(self, previous: ConfigTable) -> None:
        """Continue the counts of `previous`, and repeat none of its messages."""
        self._coverage = previous.coverage()
        self._reported = previous._reported

    def _ask(self, question: Question) -> CachedAnswer:
        if len(self._cached) >= Coverage.QUESTIONS:
            # An engine meets far fewer buckets. Counts are kept; answers are computed again.
            self._coverage, self._cached = self.coverage(), {}
        spec, bucket, page_size, gpu = question
        tuned = self._tuned(spec, page_size, gpu, None)
        of_bucket = list(_answers_of(tuned.get(bucket, ()), bucket, gpu, 0.0))
        answer = self._answer(question, of_bucket)
        if of_bucket and not self.chain.accepts(answer.source):
            answer = self._with_loss(of_bucket[0], gpu, None)
        known = self._cached[question] = CachedAnswer(answer, _exact(of_bucket), self._refusal(question, answer))
        self._report(question, answer, is_tuned=bool(of_bucket))
        return known

    def _refusal(self, question: Question, answer: Answer) -> str | None:
        if self.chain.accepts(answer.source):
            return None
        spec, bucket, page_size, gpu = question
        return (f"nothing is tuned on {gpu.name} for bucket {bucket.key()} of layer {spec.key()} with pages of "
                f"{page_size}: the answer would be of source {answer.source!r}, and accepted are {self.chain}")

    def _report(self, question: Question, answer: Answer, *, is_tuned: bool) -> None:
        """Log stale and untuned answers, once for each layer, page size, GPU and kind."""
        spec, bucket, page_size, gpu = question
        slot = Slot.of(spec, page_size, gpu)
        where = f"{gpu.name}, layer {spec.key()}, pages of {page_size}"
        if answer.stale and self._is_new(slot, "stale"):
            _log.warning("%s: the tuned configs were measured with another kernel source, Triton or driver; they "
                         "answer until the layer is tuned again", where)
        if answer.source not in ("neighbour", "heuristic"):
            return
        if is_tuned:
            if self._is_new(slot, "unsplit"):
                _log.info("%s: the config tuned for bucket %s never splits KV and answers for its own batch only; the "
                          "%s answers for the others; further cases are not logged", where, bucket.key(), answer.source)
        elif self._is_new(slot, answer.source, answer.lender):
            level = logging.WARNING if answer.source == "heuristic" else logging.INFO
            _log.log(level, "%s: nothing is tuned for bucket %s%s, so the %s answers%s; the order is %s; further cases "
                     "are not logged", where, bucket.key(), self._tuned_elsewhere(slot), answer.source,
                     f" with a config tuned on {answer.lender}" if answer.lender else "", self.chain)

    def _tuned_elsewhere(self, own: Slot) -> str:
        """Text that lists the GPUs that a layer is tuned on, if the GPU of `own` is not among them."""
        slots = {slot for slot in self._slots if (slot.spec, slot.page_size) == (own.spec, own.page_size)}
        if not slots or own in slots:
            return ""
        names = {
            slot.gpu_name if slot.gpu_name != own.gpu_name else
            f"{slot.gpu_name} with {slot.num_sms} SMs, where this one has {own.num_sms}"
            for slot in slots
        }  # fmt: skip
        return f" (it is on {', '.join(sorted(names))})"

    def _is_new(self, *kind: object) -> bool:
        known = len(self._reported)
        self._reported.add(kind)
        return len(self._reported) > known

    def _answer(self, question: Question, of_bucket: Sequence[Answer]) -> Answer:
        """The answer for all batches of a bucket: the best one of the chain's first source that has any."""
        spec, bucket, page_size, gpu = question
        from ...kernel_templates.heuristic import heuristic_variant, may_depend_on_waves

        for lender in (None, *self.chain.like):
            tuned = self._tuned(spec, page_size, gpu, lender)
            for distance, near in _by_distance(tuned, bucket, self.chain.reach):
                is_own_bucket = lender is None and not distance
                # `_answers_of` skips neighbours that never split KV.
                for answer in of_bucket if is_own_bucket else _answers_of(near, bucket, gpu, distance):
                    if not may_depend_on_waves(answer.variant, spec, bucket, gpu):
                        return self._with_loss(answer, gpu, lender)
        nearest = min(map(bucket.distance, self._tuned(spec, page_size, gpu, None)), default=None)
        answer = Answer(heuristic_variant(spec, bucket, page_size, gpu), "heuristic", distance=nearest)
        return self._with_loss(answer, gpu, None)

    def _with_loss(self, answer: Answer, gpu: Gpu, lender: str | None) -> Answer:
        """`answer` with its expected loss, which is unknown for a config of another GPU."""
        if lender is not None:
            return replace(answer, source="neighbour", lender=lender)
        return replace(answer, loss=self._losses.expect(gpu.name, answer.source, answer.distance))

    def _valid(self, spec: AttentionSpec, page_size: int, gpu: Gpu, lender: str | None) -> _Tuned:
        """The configs of `gpu`, or of the `lender`, that are valid on `gpu`, by tuned bucket."""
        own = Slot.of(spec, page_size, gpu)
        slots = [own] if lender is None else self._lender_slots(own, lender)
        found: dict[BatchBucket, list[_Candidate]] = defaultdict(list)
        unusable: list[str] = []
        for rank, config in (entry for slot in slots for entry in self._slots.get(slot, ())):
            reason = why_invalid(config.variant, spec, gpu)
            if reason is not None:
                unusable.append(f"{label_of(config)}: {reason}")
            # Skip times from the interpreter under a GPU's name and the reverse: they are meaningless.
            elif config.gpu.is_interpreter == (config.timing.regime.capture == "interpreter"):
                is_stale = self._is_stale(config, gpu)
                if is_stale is not None:
                    candidate = _Candidate(config, self._places[rank].origin, rank, is_stale)
                    found[config.shape.bucket].append(candidate)
        warn_unusable([each for each in unusable if self._is_new("unusable", each)])
        return dict(found)

    def _lender_slots(self, own: Slot, lender: str) -> list[Slot]:
        """The slots of the GPU `lender`, with any number of SMs, that otherwise equal `own`."""
        return [slot for slot in self._slots if slot._replace(gpu_name=own.gpu_name, num_sms=own.num_sms) == own
                and slot.gpu_name == lender != own.gpu_name]

    def _is_stale(self, config: BestConfig, gpu: Gpu) -> bool | None:
        """True if `config` was measured with other software than installed; None if its template is broken."""
        if self._environment_of is None:
            return False
        present = self._present(config.variant.template, gpu)
        if present is None:
            return None
        measured = config.environment
        # An unknown Triton version may be another one.
        return not present.triton or (present.kernel_hash, present.triton, present.driver) != (
            measured.kernel_hash, measured.triton, measured.driver)

    def _environment(self, template: str, gpu: Gpu) -> Environment | None:
        """The present environment of `template`; None if its modules are missing."""
        assert self._environment_of is not None
        try:
            return self._environment_of(template, gpu)
        except TunerError as error:
            # An engine that can run other templates must not end.
            warnings.warn(f"the configs of template {template!r} are set aside: {error}", stacklevel=2)
            return None


def _by_distance(tuned: _Tuned, bucket: BatchBucket, reach: float) -> Iterator[tuple[float, Sequence[_Candidate]]]:
    """The candidates for `bucket`, then those at each distance up to `reach`, nearest first.

    Candidates that were tuned without a part of `bucket` are left out. So are those whose short sequences have another
    skew, because unequal lengths need other splits.
    """
    if bucket in tuned:
        yield 0.0, tuned[bucket]
    distances: dict[float, list[_Candidate]] = defaultdict(list)
    for other, candidates in tuned.items():
        if other != bucket and _is_alike(other, bucket) and (distance := bucket.distance(other)) <= reach:
            distances[distance] += candidates
    for distance in sorted(distances):
        yield distance, distances[distance]


def _is_alike(other: BatchBucket, bucket: BatchBucket) -> bool:
    """True if `other` has all parts of `bucket`, and short sequences of the same skew."""
    has_parts = all(other.has_part(part) for part in _PARTS if bucket.has_part(part))
    return has_parts and (not bucket.has_part("short") or other.short_skew == bucket.short_skew)


def _answers_of(near: Sequence[_Candidate], bucket: BatchBucket, gpu: Gpu, distance: float) -> Iterator[Answer]:
    """The answers of candidates at a distance from `bucket`, the best first."""
    for candidate in sorted(near, key=lambda each: (each.stale, each.rank, *merit(each.config))):
        answer = _answer_of(candidate, bucket, gpu, distance)
        if answer is not None:
            yield answer


def _answer_of(candidate: _Candidate, bucket: BatchBucket, gpu: Gpu, distance: float) -> Answer | None:
    """The answer of a candidate; None if its variant is invalid for `bucket`, or never splits KV as a neighbour."""
    config = candidate.config
    variant = template_of(config.variant).settle(config.variant, bucket)
    if why_invalid(variant, config.shape.spec, gpu) or (distance and template_of(variant).never_splits_kv(variant)):
        return None
    return Answer(variant, "neighbour" if distance else "bucket", config, candidate.stale, distance, candidate.origin)


def _exact(answers: Sequence[Answer]) -> dict[Batch | BatchBucket, Answer]:
    """The first answer for each tuned batch; a stale one only if all answers of the bucket are stale."""
    found: dict[Batch | BatchBucket, Answer] = {}
    for answer in answers:
        if answer.config is not None and answer.stale == answers[0].stale:
            found.setdefault(Batch.parse(answer.config.batch), replace(answer, source="exact", loss=0.0))
    return found
