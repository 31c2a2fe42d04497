"""The table of full checks, and the one rule of what they say about what is stored."""

from __future__ import annotations

import json
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any, cast

from sqlalchemy import UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from ..kernel_templates.gpu import Gpu
from ..kernel_templates.outcome import BestConfig, CaseResult, Check, Environment, FullCheck, Timed, Wrong
from ..kernel_templates.spec import AttentionSpec
from ..kernel_templates.variant import Variant
from .models import UNREADABLE, Base, storable
from .records import TrialRecord, spec_text

# What a full check belongs to.
_KEY = ("spec", "variant", "gpu_name", "kernel_hash", "triton", "torch", "driver")


class FullCheckRow(Base):
    """The full check of a variant; `result` is passed or failed, `cases` JSON: name, state, ratio and reason of each.

    `failed_case` and `reason` are those of the first case that failed.
    """

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
    result: Mapped[str]
    failed_case: Mapped[str | None]
    reason: Mapped[str | None]
    cases: Mapped[str]
    checked_at: Mapped[str]

    @property
    def label(self) -> str:
        """What a message calls the row."""
        return f"row {self.id} of table {self.__tablename__}"

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
        """The columns of which there is one row each."""
        return {name: getattr(self, name) for name in _KEY}

    def record(self) -> FullCheck:
        """The check that `of` was given. Raises one of `models.UNREADABLE` for a row that no check has made."""
        cases = cast(list[list[Any]], json.loads(self.cases))
        check = FullCheck(
            AttentionSpec.parse(self.spec),
            Variant.parse(self.variant),
            self.gpu_name,
            Environment(self.kernel_hash, self.triton, self.torch, self.driver),
            tuple(CaseResult(*case) for case in cases),
            self.checked_at,
        )
        if check.passed != (self.result == "passed"):
            raise ValueError(f"its result is {self.result!r}, which its cases do not say")
        return check


class FullChecks:
    """What `checks` say about configs and trials of their variants, layers and GPUs.

    Of the checks in a config's own environment, and of those in any other that were made after it was measured, the
    latest decides whether it failed: what is served is compiled anew, with what is there by then. A failure of before,
    which the variant was perhaps mended after, says nothing. Only a pass in its own environment makes a config final.
    """

    def __init__(self, checks: Iterable[FullCheck]) -> None:
        self._checks: dict[tuple[AttentionSpec, Variant, str], list[FullCheck]] = defaultdict(list)
        for check in sorted(checks, key=lambda check: check.checked_at):
            self._checks[check.spec, check.variant, check.gpu_name].append(check)

    def of(self, spec: AttentionSpec, variant: Variant, gpu: Gpu, environment: Environment) -> FullCheck | None:
        """The check in exactly this environment."""
        checks = self._checks.get((spec, variant, gpu.name), ())
        return next((check for check in checks if check.environment == environment), None)

    def failure(self, config: BestConfig) -> CaseResult | None:
        """The case because of which `config` must not be served, None where there is none."""
        checks = self._checks.get((config.shape.spec, config.variant, config.gpu.name), ())
        telling = [
            check for check in checks
            if check.environment == config.environment or check.checked_at > config.measured_at
        ]  # fmt: skip
        return telling[-1].failure if telling else None

    def served(self, config: BestConfig, name: str) -> BestConfig | None:
        """What may be served of `config`: `on_config`, or None, with a warning that names the case, where it failed.

        `name` is the database's that the checks are in.
        """
        failure = self.failure(config)
        if failure is None:
            return self.on_config(config)
        warnings.warn(f"the best config for {config.batch} of {config.shape.spec.key()!r} on {config.gpu.name} in "
                      f"database {name!r} is set aside: its variant {config.variant.key()!r} failed the full "
                      f"check's case {failure.name!r}: {failure.reason}", stacklevel=4)
        return None

    def on_config(self, config: BestConfig) -> BestConfig:
        """`config`, no longer provisional where its check passed."""
        own = self.of(config.shape.spec, config.variant, config.gpu, config.environment)
        return replace(config, full_check=True) if own is not None and own.passed else config

    def on_trial(self, record: TrialRecord) -> TrialRecord:
        """`record`, which is of a wrong variant where that was timed and its check failed."""
        setting, outcome = record.setting, record.outcome
        own = self.of(setting.spec, outcome.variant, setting.gpu, record.environment)
        failure = own and own.failure
        if failure is None or not isinstance(outcome, Timed):
            return record
        ratio = float("nan") if failure.worst_ratio is None else failure.worst_ratio
        check = Check(ratio, "full", f"case {failure.name!r} of the full check: {failure.reason}")
        return replace(record, outcome=Wrong(outcome.variant, check))


class StoredChecks:
    """Full checks as rows of the columns of their table, of which those about a config are read when it is served."""

    def __init__(self, rows: Iterable[Sequence[Any]] = (), name: str = "") -> None:
        self._name = name
        self._rows: dict[tuple[str, str, str], list[FullCheckRow]] = defaultdict(list)
        columns = [column.name for column in FullCheckRow.__table__.columns]
        for values in rows:
            row = FullCheckRow(**dict(zip(columns, values, strict=True)))
            self._rows[row.spec, row.variant, row.gpu_name].append(row)

    def judge(self, config: BestConfig) -> BestConfig | None:
        """What may be served of `config`, as `FullChecks.served` has it."""
        rows = self._rows.get((spec_text(config.shape.spec), config.variant.key(), config.gpu.name))
        return FullChecks(self._read(rows)).served(config, self._name) if rows else config

    def _read(self, rows: Iterable[FullCheckRow]) -> list[FullCheck]:
        checks: list[FullCheck] = []
        for row in rows:
            try:
                checks.append(row.record())
            except UNREADABLE as error:
                warnings.warn(f"{row.label} in database {self._name!r} cannot be read and is set aside: {error}",
                              stacklevel=5)
        return checks
