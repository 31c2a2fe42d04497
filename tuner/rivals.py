"""What a stored winner is raced against to see whether it still is one."""

from __future__ import annotations

from collections.abc import Iterator

from ..db.store import Store
from ..kernel_templates.batch import Batch
from ..kernel_templates.gpu import Gpu
from ..kernel_templates.heuristic import default_variant
from ..kernel_templates.outcome import BestConfig, Timed
from ..kernel_templates.registry import template_of, why_invalid
from ..kernel_templates.variant import Variant
from .sampling.points import beside

# Of the variants that a winner was tried with, the fastest others.
RUNNERS_UP = 2


def rivals(config: BestConfig, store: Store, gpu: Gpu, most: int) -> list[Variant]:
    """The default, the winner, those that came next to it, and its neighbours: at most `most`, all valid on `gpu`.

    Times are those of the latest stored trials, whatever they were measured with. Neighbours that were timed then come
    first, the fastest before the others; of the rest those come first that need no other kernel than the winner's.
    """
    winner, times = config.variant, _times(config, store)
    default = default_variant(config.shape.spec, Batch.parse(config.batch), winner.page_size)
    ranked = sorted((v for v in times if v not in (winner, default)), key=times.__getitem__)
    near = sorted(one_step(winner, config, gpu), key=lambda v: (times.get(v, float("inf")), not _shares(v, winner)))
    found = dict.fromkeys([default, winner, *ranked[:RUNNERS_UP], *near])
    return [variant for variant in found if not why_invalid(variant, config.shape.spec, gpu)][:most]


def one_step(variant: Variant, config: BestConfig, gpu: Gpu) -> Iterator[Variant]:
    """The valid variants that differ from `variant` in one dimension: by one step where its choices have an order."""
    template, bucket = template_of(variant), config.shape.bucket
    for name, choices in template.grid(bucket, gpu).items():
        value = variant.as_dict()[name]
        for choice in beside(value, choices) if value in choices else ():
            other = template.settle(variant.replace(**{name: choice}), bucket)
            if other != variant and not why_invalid(other, config.shape.spec, gpu):
                yield other


def _shares(variant: Variant, other: Variant) -> bool:
    return template_of(variant).code_key(variant) == template_of(other).code_key(other)


def _times(config: BestConfig, store: Store) -> dict[Variant, float]:
    """By variant that can still be installed, its latest median time in the setting of `config`, in milliseconds."""
    found: dict[Variant, float] = {}
    for trial in store.trials(config.shape.spec, config.variant.page_size, config.gpu, config.batch):
        outcome = trial.outcome
        if trial.setting.regime == config.timing.regime:
            found.pop(outcome.variant, None)
            if isinstance(outcome, Timed):
                found[outcome.variant] = outcome.timing.median_ms
    return found
