"""The table of full checks, and the rule that applies them to stored configs and trials."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any, cast

from sqlalchemy import UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from ..kernel_templates.gpu import Gpu
from ..kernel_templates.outcome import BestConfig, CaseResult, Check, Environment, FullCheck, Timed, Wrong
from ..kernel_templates.spec import AttentionSpec
from ..kernel_templates.variant import Variant
from .models import Base, parse_spec, parse_variant, storable
from .records import TrialRecord, label_of, spec_text

# The columns that identify a full check.
_KEY = ("spec", "variant", "gpu_name", "kernel_hash", "triton", "torch", "driver")


class FullCheckRow(Base):
    """The full check of a variant."""

    __tablename__ = "full_checks"
    __table_args__ = (UniqueConstraint(*_KEY),)

    id: Mapped[int] = mapped_column(primary_key=True)
    spec: Mapped[str]
    page_size: Mapped[int]
    template: Mapped[str]
    variant: Mapped[str]
    gpu_name: Mapped[str]
    kernel_hash: Mapped[str]
    triton: Mapped[str]
    torch: Mapped[str]
    driver: Mapped[str]
    # "passed" or "failed".
    result: Mapped[str]
    # The first case that failed, and its reason.
    failed_case: Mapped[str | None]
    reason: Mapped[str | None]
    # JSON: name, state, ratio and reason of each case.
    cases: Mapped[str]
    # ISO 8601 in UTC.
    checked_at: Mapped[str]

    @classmethod
    def of(cls, check: FullCheck) -> FullCheckRow:
        """The row of `check`."""
        failure = check.failure
        return cls(
            spec=spec_text(check.spec),
            page_size=check.variant.page_size,
            template=check.variant.template,
            variant=check.variant.key(),
            gpu_name=check.gpu_name,
            **asdict(check.environment),
            result="passed" if failure is None else "failed",
            failed_case=failure and failure.name,
            reason=failure and storable(failure.reason),
            cases=json.dumps([[c.name, c.state, c.worst_ratio, storable(c.reason)] for c in check.cases]),
            checked_at=check.checked_at,
        )

    def key(self) -> dict[str, str]:
        """The columns that identify the check."""
        return {name: getattr(self, name) for name in _KEY}


def check_of(row: FullCheckRow) -> FullCheck:
    """The full check in `row`. Raises one of `models.UNREADABLE` for an invalid row."""
    cases = cast(list[list[Any]], json.loads(row.cases))
    check = FullCheck(
        parse_spec(row.spec),
        parse_variant(row.variant),
        row.gpu_name,
        Environment(row.kernel_hash, row.triton, row.torch, row.driver),
        tuple(CaseResult(*case) for case in cases),
        row.checked_at,
    )
    if check.passed != (row.result == "passed"):
        raise ValueError(f"its result is {row.result!r}, which its cases contradict")
    return check


class FullChecks:
    """The rule that decides which configs and trials failed a full check.

    A config failed if its latest relevant check failed. Two kinds of checks are relevant: those in the config's own
    environment, and those made in any environment after the config was measured, because a served config is compiled
    with the versions then installed. Older failures in other environments do not count, because the kernel may have
    been repaired since. Only a passed check in its own environment makes a config final.
    """

    def __init__(self, checks: Iterable[FullCheck] = ()) -> None:
        self._checks: dict[tuple[AttentionSpec, Variant, str], list[FullCheck]] = defaultdict(list)
        for check in sorted(checks, key=lambda check: check.checked_at):
            self._checks[check.spec, check.variant, check.gpu_name].append(check)

    def of(self, spec: AttentionSpec, variant: Variant, gpu: Gpu, environment: Environment) -> FullCheck | None:
        """The check in exactly this environment."""
        checks = self._checks.get((spec, variant, gpu.name), ())
        return next((check for check in checks if check.environment == environment), None)

    def served(self, configs: Iterable[BestConfig], unusable: list[str]) -> list[BestConfig]:
        """The configs that did not fail, marked final if their check passed. Failed ones are added to `unusable`."""
        found: list[BestConfig] = []
        for config in configs:
            failure = self._failure(config)
            if failure is None:
                own = self.of(config.shape.spec, config.variant, config.gpu, config.environment)
                found.append(replace(config, full_check=True) if own is not None and own.passed else config)
            else:
                unusable.append(f"{label_of(config)} failed the full check's case {failure.name!r}: {failure.reason}")
        return found

    def trial(self, record: TrialRecord) -> TrialRecord:
        """`record`, with outcome `Wrong` if it was timed and its variant failed the full check in its environment."""
        setting, outcome = record.setting, record.outcome
        own = self.of(setting.spec, outcome.variant, setting.gpu, record.environment)
        failure = own and own.failure
        if failure is None or not isinstance(outcome, Timed):
            return record
        ratio = float("nan") if failure.worst_ratio is None else failure.worst_ratio
        check = Check(ratio, "full", f"case {failure.name!r} of the full check: {failure.reason}")
        return replace(record, outcome=Wrong(outcome.variant, check))

    def _failure(self, config: BestConfig) -> CaseResult | None:
        """The failed case that forbids serving `config`; None if there is none."""
        checks = self._checks.get((config.shape.spec, config.variant, config.gpu.name), ())
        relevant = [
            check for check in checks
            if check.environment == config.environment or check.checked_at > config.measured_at
        ]  # fmt: skip
        return relevant[-1].failure if relevant else None
