"""Leave-one-out losses of lookups: each tuned shape is left out in turn, and the others answer."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...kernel_templates.batch import Batch
from ...kernel_templates.outcome import BestConfig
from ...kernel_templates.variant import Variant
from ..answer import Answer, Chain, Source
from ..losses import Loss, band
from ..store import Store
from .table import ConfigTable

# Each left-out shape needs a new table of all others, which takes milliseconds.
_MOST_SHAPES = 256

TimesOf = Callable[[BestConfig], Mapping[Variant, float]]
"""Gives the median milliseconds of the variants timed in the setting of a config."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The answer of the other configs for the batch of `config`, and the times on that batch."""

    config: BestConfig
    answer: Answer
    # The time of the answered variant on that batch; None if it was never timed there.
    served_ms: float | None
    # The time of the best variant.
    best_ms: float

    @property
    def loss(self) -> float | None:
        """The loss of `answer`; None if it was never timed."""
        return None if self.served_ms is None else self.served_ms / self.best_ms - 1


def leave_one_out(configs: Sequence[BestConfig], times_of: TimesOf, chain: Chain | None = None) -> list[LeftOut]:
    """Leave out each config that has times, with all others of its batch, and look up its batch without them."""
    slots: dict[object, list[BestConfig]] = defaultdict(list)
    for config in configs:
        slots[config.shape.spec, config.variant.page_size, config.gpu.name, config.gpu.num_sms].append(config)
    found: list[LeftOut] = []
    for members in slots.values():
        for config in members:
            times = times_of(config)
            if not times:
                continue
            table = ConfigTable.of((other for other in members if other.batch != config.batch), chain=chain)
            answer = table.lookup(config.shape.spec, Batch.parse(config.batch), config.variant.page_size, config.gpu)
            found.append(LeftOut(config, answer, times.get(answer.variant), min(times.values())))
    return found


def pooled(left_out: Iterable[LeftOut]) -> list[Loss]:
    """The medians of the known losses, by GPU model, source and distance band."""
    groups: dict[tuple[str, Source, float], list[float]] = defaultdict(list)
    for each in left_out:
        answer = each.answer
        if each.loss is not None and answer.distance is not None:
            groups[each.config.gpu.name, answer.source, band(answer.distance)].append(each.loss)
    return [Loss(*group, len(losses), statistics.median(losses)) for group, losses in sorted(groups.items())]


def measure_losses(store: Store, gpu_name: str) -> list[Loss]:
    """Measure and store the leave-one-out losses of the latest shapes tuned on a GPU model."""
    configs = sorted(store.best_configs(gpu_name=gpu_name), key=lambda config: config.measured_at)
    losses = pooled(leave_one_out(configs[-_MOST_SHAPES:], store.times))
    store.put_losses(gpu_name, losses)
    return losses
