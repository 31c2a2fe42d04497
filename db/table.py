"""The lookup: which variant to run, answered from a snapshot of the best configs."""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ..kernel_templates.batch import Batch, BatchBucket
from ..kernel_templates.gpu import Gpu
from ..kernel_templates.outcome import BestConfig
from ..kernel_templates.spec import AttentionSpec
from ..kernel_templates.template import template_of, why_invalid
from ..kernel_templates.variant import Variant
from .records import EnvironmentOf
from .store import Store

Source = Literal["exact", "bucket", "neighbour", "heuristic"]
"""Where an answer comes from: a config tuned on this very batch, on another one of its bucket, on the nearest bucket
that has one, or none."""

# Of configs for one bucket, that of the regime nearest to serving comes first.
_REGIMES = ("graph", "eager", "interpreter", "cold", "warm", "burst", "sustained")

_REMEMBERED = 65536


@dataclass(frozen=True, slots=True)
class Answer:
    """The variant to run, valid for what was asked.

    `config` is what was tuned, None for the heuristic; `variant` may differ from its variant where the batch lacks a
    part that the tuned one had. `stale` says that it was measured with another kernel source, Triton or driver.
    `distance` is that of the asked bucket from the tuned one (`BatchBucket.distance`), None for the heuristic.
    """

    variant: Variant
    source: Source
    config: BestConfig | None = None
    stale: bool = False
    distance: float | None = None


class ConfigTable:
    """A frozen snapshot of best configs; `id` is the same for the same configs, so that ranks can agree on it."""

    def __init__(self, configs: Iterable[BestConfig], environment_of: EnvironmentOf | None) -> None:
        self.configs = tuple(configs)
        self._environment_of = environment_of
        slots: dict[tuple[object, ...], list[BestConfig]] = defaultdict(list)
        for config in self.configs:
            # Times from the interpreter under a GPU's name, or the reverse, are no evidence about either.
            if config.gpu.is_interpreter == (config.timing.regime.capture == "interpreter"):
                slots[_slot(config.shape.spec, config.variant.page_size, config.gpu)].append(config)
        self._slots = dict(slots)
        self._remembered = functools.lru_cache(maxsize=_REMEMBERED)(self._answer)

    @classmethod
    def of(cls, configs: Iterable[BestConfig], environment_of: EnvironmentOf | None = None) -> ConfigTable:
        """The table of `configs`; without `environment_of` no config counts as stale."""
        return cls(configs, environment_of)

    @classmethod
    def from_store(cls, store: Store, environment_of: EnvironmentOf | None = None) -> ConfigTable:
        """The table of all configs that `store` holds now. Raises `StoreError` when it cannot be read."""
        return cls(store.best_configs(), environment_of)

    def __len__(self) -> int:
        return len(self.configs)

    @functools.cached_property
    def id(self) -> str:
        """Sixteen hexadecimal digits that stand for the content, whatever its order."""
        return hashlib.sha256("\n".join(sorted(map(repr, self.configs))).encode()).hexdigest()[:16]

    def lookup(self, spec: AttentionSpec, asked: Batch | BatchBucket, page_size: int, gpu: Gpu) -> Answer:
        """The variant to run for `asked`, always one that is valid here.

        The nearest bucket's config comes first; within a bucket a fresh one before a stale one, then one for this very
        batch, then one that passed the full check. Only configs of a GPU of this name and size are considered.
        """
        return self._remembered(spec, asked, page_size, gpu)

    def _answer(self, spec: AttentionSpec, asked: Batch | BatchBucket, page_size: int, gpu: Gpu) -> Answer:
        bucket = BatchBucket.of(asked) if isinstance(asked, Batch) else asked
        configs = self._slots.get(_slot(spec, page_size, gpu), [])
        answers = [answer for config in configs if (answer := self._judged(config, asked, bucket, gpu))]
        if answers:
            return min(answers, key=_preference)
        from ..kernel_templates.heuristic import heuristic_variant

        return Answer(heuristic_variant(spec, bucket, page_size, gpu), "heuristic")

    def _judged(self, config: BestConfig, asked: Batch | BatchBucket, bucket: BatchBucket, gpu: Gpu) -> Answer | None:
        """What `config` would answer, or None where it cannot: invalid here, or tuned without a part that is asked."""
        tuned = config.shape.bucket
        if any(bucket.has_part(part) and not tuned.has_part(part) for part in ("short", "long")):
            return None
        if why_invalid(config.variant, config.shape.spec, gpu):
            return None
        variant = template_of(config.variant).settle(config.variant, bucket)
        if why_invalid(variant, config.shape.spec, gpu):
            return None
        return Answer(variant, _source(config, asked, bucket), config, self._is_stale(config, gpu),
                      bucket.distance(tuned))

    def _is_stale(self, config: BestConfig, gpu: Gpu) -> bool:
        if self._environment_of is None:
            return False
        now, then = self._environment_of(config.variant.template, gpu), config.environment
        return (now.kernel_hash, now.triton, now.driver) != (then.kernel_hash, then.triton, then.driver)


def _slot(spec: AttentionSpec, page_size: int, gpu: Gpu) -> tuple[object, ...]:
    return spec, page_size, gpu.name, gpu.num_sms, gpu.capability


def _source(config: BestConfig, asked: Batch | BatchBucket, bucket: BatchBucket) -> Source:
    if config.shape.bucket != bucket:
        return "neighbour"
    return "exact" if isinstance(asked, Batch) and config.batch == str(asked) else "bucket"


def _preference(answer: Answer) -> tuple[object, ...]:
    """Sorts the better answer first; the last parts only make the choice the same on every rank."""
    config = answer.config
    assert config is not None
    regime = config.timing.regime
    return (
        answer.distance,
        answer.stale,
        answer.source != "exact",
        not config.full_check,
        *(_REGIMES.index(part) for part in (regime.capture, regime.l2, regime.load)),
        config.timing.median_ms,
        config.variant.key(),
    )
