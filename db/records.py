"""What one trial is, with everything that makes its number true."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from ..kernel_templates.batch import Batch
from ..kernel_templates.errors import TunerError
from ..kernel_templates.gpu import Gpu
from ..kernel_templates.outcome import Environment, Outcome, Regime, StaticFacts
from ..kernel_templates.spec import AttentionSpec

EnvironmentOf = Callable[[str, Gpu], Environment]
"""The present environment of a template, by its name, on a GPU."""


@functools.lru_cache(maxsize=256)
def spec_text(spec: AttentionSpec) -> str:
    """The text that a layer is stored under: the same for equal ones, as with a soft cap of 50 and of 50.0."""
    return AttentionSpec.parse(spec.key()).key()


def utc_now() -> str:
    """The present time, ISO 8601 in UTC."""
    return datetime.now(UTC).isoformat()


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured where, variant and environment aside: times are comparable within one setting only.

    `regime` is the one asked for; a timing says itself which it got, such as eager where a graph cannot be captured.
    """

    spec: AttentionSpec
    batch: Batch
    page_size: int
    gpu: Gpu
    regime: Regime


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """One finished trial of run `run_id`; `measured_at` is ISO 8601 in UTC. Raises `TunerError` on mixed page sizes."""

    run_id: int
    setting: Setting
    environment: Environment
    outcome: Outcome
    facts: StaticFacts | None = None
    measured_at: str = field(default_factory=utc_now)

    def __post_init__(self) -> None:
        if self.outcome.variant.page_size != self.setting.page_size:
            raise TunerError(f"variant {self.outcome.variant.key()!r} was tried in a setting of page size "
                             f"{self.setting.page_size}")
