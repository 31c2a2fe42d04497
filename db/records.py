"""The record of a stored trial, and helpers to name records in messages."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from ..kernel_templates.batch import Batch
from ..kernel_templates.errors import TunerError
from ..kernel_templates.gpu import Gpu
from ..kernel_templates.outcome import BestConfig, Environment, Outcome, Regime, StaticFacts
from ..kernel_templates.spec import AttentionSpec

EnvironmentOf = Callable[[str, Gpu], Environment]
"""Gives the present environment of a template (by name) on a GPU."""

# The most rows that one warning names.
_MOST_NAMED = 20


@functools.lru_cache(maxsize=256)
def spec_text(spec: AttentionSpec) -> str:
    """The text that a layer is stored under. Equal layers give the same text (soft caps 50 and 50.0, for example)."""
    return AttentionSpec.parse(spec.key()).key()


def utc_now() -> str:
    """The present time, ISO 8601 in UTC."""
    return datetime.now(UTC).isoformat()


def label_of(config: BestConfig) -> str:
    """Text that names `config` in a message."""
    return (f"the config {config.variant.key()!r} for {config.batch} of {config.shape.spec.key()!r} on "
            f"{config.gpu.name}")


def warn_unusable(unusable: Sequence[str], stacklevel: int = 3) -> None:
    """Warn once about all `unusable` results, each given with the reason; do nothing if there are none."""
    if unusable:
        more = f"; and {len(unusable) - _MOST_NAMED} more" if len(unusable) > _MOST_NAMED else ""
        warnings.warn("stored results that cannot be used are set aside: " + "; ".join(unusable[:_MOST_NAMED]) + more,
                      stacklevel=stacklevel)


@dataclass(frozen=True, slots=True)
class Setting:
    """A task on a GPU, timed in one regime. Compare times of one setting only."""

    spec: AttentionSpec
    batch: Batch
    page_size: int
    gpu: Gpu
    # The requested regime. A timing states the actual one, for example eager if no graph can be captured.
    regime: Regime


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """One finished trial. Raises `TunerError` if its variant has another page size than its setting."""

    run_id: int
    setting: Setting
    environment: Environment
    outcome: Outcome
    facts: StaticFacts | None = None
    # ISO 8601 in UTC.
    measured_at: str = field(default_factory=utc_now)

    def __post_init__(self) -> None:
        if self.outcome.variant.page_size != self.setting.page_size:
            raise TunerError(f"variant {self.outcome.variant.key()!r} was tried in a setting of page size "
                             f"{self.setting.page_size}")
