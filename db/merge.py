"""One best config for each question, of several that were found at different times."""

from __future__ import annotations

from collections.abc import Iterable

from ..kernel_templates.outcome import BestConfig
from ..kernel_templates.sources import kernel_hash
from ..kernel_templates.template import why_invalid


def merged(*sources: Iterable[BestConfig]) -> list[BestConfig]:
    """The better config for each layer, batch, page size, GPU and regime that any of `sources` has.

    That is one of the present kernel source before one of another, then one that passed the full check, then the one
    with the lower median; of two that are equal in this, the one of the earlier source. What cannot run any more is
    left out. Raises `TunerError` when the source of an installed template cannot be found.
    """
    best: dict[tuple[object, ...], BestConfig] = {}
    for config in (config for source in sources for config in source):
        if why_invalid(config.variant, config.shape.spec, config.gpu):
            continue
        known = best.setdefault(_question(config), config)
        if _rank(config) < _rank(known):
            best[_question(config)] = config
    return list(best.values())


def _question(config: BestConfig) -> tuple[object, ...]:
    # As the database has it: a driver or a version of Triton asks no question of its own.
    return (config.shape.spec, config.batch, config.variant.page_size, config.gpu.name, config.gpu.num_sms,
            config.timing.regime)


def _rank(config: BestConfig) -> tuple[object, ...]:
    is_outdated = config.environment.kernel_hash != kernel_hash(config.variant.template)
    return is_outdated, not config.full_check, config.timing.median_ms
