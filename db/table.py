"""The lookup: which variant to run, answered from a snapshot of the best configs."""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..kernel_templates.batch import Batch, BatchBucket
from ..kernel_templates.errors import TunerError
from ..kernel_templates.gpu import Gpu
from ..kernel_templates.outcome import BestConfig, Environment
from ..kernel_templates.spec import AttentionSpec
from ..kernel_templates.template import template_of, why_invalid
from ..kernel_templates.variant import Variant
from .records import EnvironmentOf

Source = Literal["exact", "bucket", "neighbour", "heuristic"]
"""Where an answer comes from: a config tuned on this very batch, on another one of its bucket, on the nearest bucket
that has one, or none."""

Origin = Literal["database", "shipped"]
"""Who measured it: the user, in whose database it is, or who made the package, with which it ships."""

# Of configs for one bucket, that of the regime nearest to serving comes first.
_REGIMES = ("graph", "eager", "interpreter", "cold", "warm", "burst", "sustained")

_PARTS = ("short", "long")

# Far more than the buckets that an engine meets, which are powers of two.
_REMEMBERED = 65536


@dataclass(frozen=True, slots=True)
class Answer:
    """The variant to run, valid for what was asked.

    `config` is what was tuned, None for the heuristic; `variant` may differ from its variant where the batch lacks a
    part that the tuned one had. `stale` says that it was measured with another kernel source, Triton or driver, or
    that the Triton here is unknown. `distance` is that of the asked bucket from the tuned one
    (`BatchBucket.distance`), and `origin` says whose the config is; both are None for the heuristic.
    """

    variant: Variant
    source: Source
    config: BestConfig | None = None
    stale: bool = False
    distance: float | None = None
    origin: Origin | None = None


@dataclass(frozen=True, slots=True)
class _Judged:
    """A config that is valid for a layer, page size and GPU."""

    config: BestConfig
    stale: bool
    origin: Origin


@dataclass(frozen=True, slots=True)
class _Answers:
    """What a bucket is answered, and what batches of it are that were tuned themselves."""

    bucket: Answer
    exact: Mapping[Batch, Answer]


class ConfigTable:
    """A frozen snapshot of best configs; `id` is the same for the same configs, so that ranks can agree on it."""

    def __init__(self, configs: Iterable[BestConfig], environment_of: EnvironmentOf | None,
                 shipped: Iterable[BestConfig] = ()) -> None:
        self._by_origin: dict[Origin, tuple[BestConfig, ...]] = {"database": tuple(configs), "shipped": tuple(shipped)}
        self.configs = tuple(config for members in self._by_origin.values() for config in members)
        self._environment_of = environment_of
        slots: dict[tuple[object, ...], list[tuple[BestConfig, Origin]]] = defaultdict(list)
        for origin, members in self._by_origin.items():
            for config in members:
                # Times from the interpreter under a GPU's name, or the reverse, are no evidence about either.
                if config.gpu.is_interpreter == (config.timing.regime.capture == "interpreter"):
                    slots[_slot(config.shape.spec, config.variant.page_size, config.gpu)].append((config, origin))
        self._slots = dict(slots)
        # An engine asks with every step: what depends on less than the batch is found out once.
        self._judged = functools.cache(self._judge)
        self._remembered = functools.lru_cache(maxsize=_REMEMBERED)(self._answers)

    @classmethod
    def of(cls, configs: Iterable[BestConfig], environment_of: EnvironmentOf | None = None,
           shipped: Iterable[BestConfig] = ()) -> ConfigTable:
        """The table of the user's `configs` and of `shipped` ones; without `environment_of` none counts as stale."""
        return cls(configs, environment_of, shipped)

    def __len__(self) -> int:
        return len(self.configs)

    @functools.cached_property
    def id(self) -> str:
        """Sixteen hexadecimal digits that stand for the content, whatever its order."""
        lines = [f"{origin} {config!r}" for origin, members in self._by_origin.items() for config in members]
        return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]

    def lookup(self, spec: AttentionSpec, asked: Batch | BatchBucket, page_size: int, gpu: Gpu) -> Answer:
        """The variant to run for `asked`, always one that is valid here.

        The nearest bucket's config comes first; within a bucket a fresh one before a stale one, then one for this very
        batch, then one of the user's own before a shipped one, then one that passed the full check. Only configs of a
        GPU of this name and size are considered. Raises `VariantError` when no variant can run at all, as with a page
        size that is no multiple of 16.
        """
        if isinstance(asked, BatchBucket):
            return self._remembered(spec, asked, page_size, gpu).bucket
        answers = self._remembered(spec, BatchBucket.of(asked), page_size, gpu)
        return answers.exact.get(asked, answers.bucket) if answers.exact else answers.bucket

    def _answers(self, spec: AttentionSpec, bucket: BatchBucket, page_size: int, gpu: Gpu) -> _Answers:
        for distance, near in _by_distance(self._judged(spec, page_size, gpu), bucket):
            answers = [answer for each in near if (answer := _serve(each, bucket, gpu, distance))]
            if answers:
                return _Answers(answers[0], {} if distance else _exact(answers))
        from ..kernel_templates.heuristic import heuristic_variant

        return _Answers(Answer(heuristic_variant(spec, bucket, page_size, gpu), "heuristic"), {})

    def _judge(self, spec: AttentionSpec, page_size: int, gpu: Gpu) -> dict[BatchBucket, list[_Judged]]:
        """The configs that are valid here, by the bucket that they were tuned for."""
        @functools.cache
        def now(template: str) -> Environment | None:
            return self._present(template, gpu)

        found: dict[BatchBucket, list[_Judged]] = defaultdict(list)
        for config, origin in self._slots.get(_slot(spec, page_size, gpu), ()):
            if why_invalid(config.variant, spec, gpu):
                continue
            stale = False
            if self._environment_of is not None:
                present = now(config.variant.template)
                if present is None:
                    continue
                stale = _is_stale(config.environment, present)
            found[config.shape.bucket].append(_Judged(config, stale, origin))
        return dict(found)

    def _present(self, template: str, gpu: Gpu) -> Environment | None:
        """The environment of `template` here, None when its modules are not."""
        assert self._environment_of is not None
        try:
            return self._environment_of(template, gpu)
        except TunerError as error:
            # An installed template that is broken must not end an engine that can do without.
            warnings.warn(f"the configs of template {template!r} are set aside: {error}", stacklevel=2)
            return None


def _slot(spec: AttentionSpec, page_size: int, gpu: Gpu) -> tuple[object, ...]:
    return spec, page_size, gpu.name, gpu.num_sms, gpu.capability


def _is_stale(measured: Environment, present: Environment) -> bool:
    # A Triton whose version is unknown may be any.
    if not present.triton:
        return True
    return (present.kernel_hash, present.triton, present.driver) != (
        measured.kernel_hash, measured.triton, measured.driver)


def _by_distance(tuned: Mapping[BatchBucket, list[_Judged]],
                 bucket: BatchBucket) -> Iterator[tuple[float, list[_Judged]]]:
    """The configs for `bucket`, then those at each distance, nearest first; at one distance the best come first.

    Left out are configs tuned without a part that is asked.
    """
    if bucket in tuned:
        yield 0.0, sorted(tuned[bucket], key=_preference)
    needed = [part for part in _PARTS if bucket.has_part(part)]
    distances: dict[float, list[_Judged]] = defaultdict(list)
    for other, judged in tuned.items():
        if other != bucket and all(map(other.has_part, needed)):
            distances[bucket.distance(other)] += judged
    for distance in sorted(distances):
        yield distance, sorted(distances[distance], key=_preference)


def _serve(judged: _Judged, bucket: BatchBucket, gpu: Gpu, distance: float) -> Answer | None:
    """The answer that a config gives, None where its variant as it would run for `bucket` is invalid."""
    config = judged.config
    variant = template_of(config.variant).settle(config.variant, bucket)
    if why_invalid(variant, config.shape.spec, gpu):
        return None
    return Answer(variant, "neighbour" if distance else "bucket", config, judged.stale, distance, judged.origin)


def _exact(answers: Sequence[Answer]) -> dict[Batch, Answer]:
    """The first answer for each batch that was tuned itself; a stale one where the bucket has none but stale ones."""
    found: dict[Batch, Answer] = {}
    for answer in answers:
        if answer.config is not None and answer.stale == answers[0].stale:
            found.setdefault(Batch.parse(answer.config.batch), replace(answer, source="exact"))
    return found


def _preference(judged: _Judged) -> tuple[object, ...]:
    """Sorts the better config first; the last parts only make the choice the same on every rank."""
    config = judged.config
    regime = config.timing.regime
    return (
        judged.stale,
        judged.origin == "shipped",
        not config.full_check,
        *(_REGIMES.index(part) for part in (regime.capture, regime.l2, regime.load)),
        config.timing.median_ms,
        config.variant.key(),
        config.batch,
    )
