"""Merging of configs from several sources: the better one for each question is kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from ...kernel_templates.outcome import BestConfig
from ...kernel_templates.registry import why_invalid
from ...kernel_templates.sources import kernel_hash
from ..losses import Loss
from ..store import Store

# Parts of a regime; those nearest to serving come first.
_REGIMES = ("graph", "eager", "interpreter", "cold", "warm", "burst", "sustained")


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice between two configs for one question, or a config that cannot run."""

    # None if the dropped config cannot run any more.
    kept: BestConfig | None
    dropped: BestConfig
    # Reason that it was dropped.
    reason: str


@dataclass(frozen=True, slots=True)
class Merge:
    """The result of merging configs."""

    # The best config for each question.
    configs: list[BestConfig]
    # One for each config that was dropped.
    choices: list[Choice]


def merge_configs(*sources: Iterable[BestConfig]) -> Merge:
    """The best of `sources` for each layer, batch, page size, GPU and regime, and the dropped configs.

    The order: measured with the present kernel source, passed the full check, lower median, earlier source. Configs
    that cannot run any more are dropped. Raises `TunerError` if the source of an installed template cannot be found.
    """
    best: dict[tuple[object, ...], BestConfig] = {}
    choices: list[Choice] = []
    for config in (config for source in sources for config in source):
        invalid = why_invalid(config.variant, config.shape.spec, config.gpu)
        if invalid:
            choices.append(Choice(None, config, f"it cannot run any more: {invalid}"))
            continue
        known = best.setdefault(_question(config), config)
        if known is config or known == config:
            continue
        kept, dropped = (config, known) if _rank(config) < _rank(known) else (known, config)
        best[_question(config)] = kept
        choices.append(Choice(kept, dropped, _reason(kept, dropped)))
    return Merge(list(best.values()), choices)


def merged(*sources: Iterable[BestConfig]) -> list[BestConfig]:
    """The configs of `merge_configs`."""
    return merge_configs(*sources).configs


def import_configs(store: Store, configs: Iterable[BestConfig], losses: Iterable[Loss] = (), *,
                   keep_better: bool = False) -> Merge:
    """Store `configs`, and the `losses` of GPUs for which `store` has none.

    A config replaces the stored one of its question; with `keep_better`, only if it is better. Returns the stored and
    the dropped configs.
    """
    merge = Merge(list(configs), [])
    if keep_better:
        held = store.best_configs()
        known = set(held)
        merge = merge_configs(held, merge.configs)
        merge = Merge([config for config in merge.configs if config not in known], merge.choices)
    store.put_best(*merge.configs)
    by_gpu: dict[str, list[Loss]] = defaultdict(list)
    for loss in losses:
        by_gpu[loss.gpu_name].append(loss)
    for gpu_name in by_gpu.keys() - {loss.gpu_name for loss in store.losses()}:
        store.put_losses(gpu_name, by_gpu[gpu_name])
    return merge


def _question(config: BestConfig) -> tuple[object, ...]:
    # The key of the table of best configs. Driver and Triton version are not part of it.
    return (config.shape.spec, config.batch, config.variant.page_size, config.gpu.name, config.gpu.num_sms,
            config.timing.regime)


def _rank(config: BestConfig) -> tuple[bool, bool, float]:
    is_outdated = config.environment.kernel_hash != kernel_hash(config.variant.template)
    return is_outdated, not config.full_check, config.timing.median_ms


def _reason(kept: BestConfig, dropped: BestConfig) -> str:
    """The reason: the first part of the rank in which the two differ."""
    (kept_outdated, kept_quick, kept_ms), (outdated, quick, ms) = _rank(kept), _rank(dropped)
    if kept_outdated != outdated:
        return "it was measured with another kernel source"
    if kept_quick != quick:
        return "it has passed the quick check only"
    if kept_ms != ms:
        return f"it takes {ms:.4g} ms, {ms / kept_ms - 1:.1%} more than the {kept_ms:.4g} ms of the one kept"
    return "it is equally good and came later"


def merit(config: BestConfig) -> tuple[object, ...]:
    """A sort key that puts the better of two configs for one bucket first.

    The last two parts make the order the same on all ranks.
    """
    regime = config.timing.regime
    return (
        not config.full_check,
        *(_REGIMES.index(part) for part in (regime.capture, regime.l2, regime.load)),
        config.timing.median_ms,
        config.variant.key(),
        config.batch,
    )
