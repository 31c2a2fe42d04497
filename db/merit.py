"""Which of configs that were tuned alike is the better one."""

from __future__ import annotations

from ..kernel_templates.outcome import BestConfig

# Of configs for one bucket, that of the regime nearest to serving comes first.
_REGIMES = ("graph", "eager", "interpreter", "cold", "warm", "burst", "sustained")


def merit(config: BestConfig) -> tuple[object, ...]:
    """Sorts the better of configs that are tuned alike first; the last parts only make the choice the same on all
    ranks."""
    regime = config.timing.regime
    return (
        not config.full_check,
        *(_REGIMES.index(part) for part in (regime.capture, regime.l2, regime.load)),
        config.timing.median_ms,
        config.variant.key(),
        config.batch,
    )
