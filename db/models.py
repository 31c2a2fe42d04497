"""The tables, and how a record becomes a row and is read back.

Whatever a row holds can be fetched: lists and times are kept as text and are only understood in `record()`, so that a
row nobody can read does not spoil the others of its query.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import ClassVar, TypeVar

from sqlalchemy import ForeignKey, Index, MetaData, Text, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from ..kernel_templates.batch import Batch, BatchBucket, Shape
from ..kernel_templates.errors import TunerError
from ..kernel_templates.gpu import Gpu
from ..kernel_templates.outcome import (
    BestConfig,
    Check,
    Environment,
    Failed,
    Outcome,
    Regime,
    Skipped,
    StaticFacts,
    Timed,
    Timing,
    Verdict,
    Wrong,
)
from ..kernel_templates.spec import AttentionSpec
from ..kernel_templates.variant import Variant
from .records import Setting, TrialRecord, spec_text

T = TypeVar("T")

UNREADABLE = (TunerError, ValueError, TypeError, KeyError, AttributeError)
"""What reading a poisoned row can raise."""


class Base(DeclarativeBase):
    """Base of all tables; constraints have names, which migrations need."""

    type_annotation_map = {str: Text}  # noqa: RUF012 - SQLAlchemy reads it as a plain attribute
    metadata = MetaData(naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    })


class RunRow(Base):
    """One run of the tuner; `settings` is JSON."""

    __tablename__ = "runs"

    id: Mapped[int] = mapped_column(primary_key=True)
    started_at: Mapped[str]
    settings: Mapped[str]


class Measured:
    """The columns that say what was measured, where and with what. Texts are the records' keys."""

    __tablename__: ClassVar[str]

    id: Mapped[int] = mapped_column(primary_key=True)
    spec: Mapped[str]
    bucket: Mapped[str]
    batch: Mapped[str]
    page_size: Mapped[int]
    template: Mapped[str]
    variant: Mapped[str]
    regime: Mapped[str]
    gpu_name: Mapped[str]
    gpu_capability: Mapped[str]
    gpu_num_sms: Mapped[int]
    gpu_shared_memory_bytes: Mapped[int]
    gpu_l2_bytes: Mapped[int]
    gpu_driver: Mapped[str]
    kernel_hash: Mapped[str]
    triton: Mapped[str]
    torch: Mapped[str]
    driver: Mapped[str]
    measured_at: Mapped[str]

    @property
    def label(self) -> str:
        """What a message calls the row."""
        return f"row {self.id} of table {self.__tablename__}"

    @property
    def gpu(self) -> Gpu:
        """The GPU of the row."""
        major, minor = map(int, self.gpu_capability.split("."))
        return Gpu(self.gpu_name, (major, minor), self.gpu_num_sms, self.gpu_shared_memory_bytes, self.gpu_l2_bytes,
                   self.gpu_driver)

    @property
    def environment(self) -> Environment:
        """The environment of the row."""
        return Environment(self.kernel_hash, self.triton, self.torch, self.driver)


class TrialRow(Measured, Base):
    """One trial. `outcome` is timed, wrong, failed or skipped; what an outcome does not have is null.

    The ratio of a check is null for NaN as well, which SQLite cannot hold.
    """

    __tablename__ = "trials"
    __table_args__ = (Index(None, "spec", "bucket", "page_size", "gpu_name"),)

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    outcome: Mapped[str]
    stage: Mapped[str | None]
    reason: Mapped[str | None]
    check_ratio: Mapped[float | None]
    check_level: Mapped[str | None]
    check_detail: Mapped[str | None]
    samples_ms: Mapped[str | None]
    plan_ms: Mapped[float | None]
    timing_regime: Mapped[str | None]
    shared_bytes: Mapped[int | None]
    registers: Mapped[int | None]
    stack_bytes: Mapped[int | None]
    tensor_core: Mapped[str | None]
    code_hash: Mapped[str | None]

    @classmethod
    def of(cls, record: TrialRecord) -> TrialRow:
        """The row of `record`."""
        setting = record.setting
        return cls(
            run_id=record.run_id,
            spec=spec_text(setting.spec),
            bucket=BatchBucket.of(setting.batch).key(),
            batch=str(setting.batch),
            regime=str(setting.regime),
            measured_at=record.measured_at,
            **_variant_columns(record.outcome.variant),
            **_gpu_columns(setting.gpu),
            **asdict(record.environment),
            **_outcome_columns(record.outcome),
            **(asdict(record.facts) if record.facts else {}),
        )

    def record(self) -> TrialRecord:
        """The record that `of` was given. Raises one of `UNREADABLE` for a row that no record has made."""
        setting = Setting(AttentionSpec.parse(self.spec), Batch.parse(self.batch), self.page_size, self.gpu,
                          Regime.parse(self.regime))
        return TrialRecord(self.run_id, setting, self.environment, self._outcome(), self._facts(), self.measured_at)

    def _outcome(self) -> Outcome:
        variant = Variant.parse(self.variant)
        match self.outcome:
            case "timed":
                regime = Regime.parse(_present(self.timing_regime))
                timing = Timing(_samples(_present(self.samples_ms)), regime, float(_present(self.plan_ms)))
                return Timed(variant, self._check(), timing)
            case "wrong":
                return Wrong(variant, self._check())
            case "failed":
                return Failed(variant, _present(self.stage), _present(self.reason))
            case "skipped":
                return Skipped(variant, _present(self.reason))
            case other:
                raise ValueError(f"{other!r} is no outcome")

    def _check(self) -> Check:
        ratio = math.nan if self.check_ratio is None else float(self.check_ratio)
        return Check(ratio, _present(self.check_level), _present(self.check_detail))

    def _facts(self) -> StaticFacts | None:
        if self.shared_bytes is None:
            return None
        return StaticFacts(self.shared_bytes, self.registers, self.stack_bytes, _present(self.tensor_core),
                           _present(self.code_hash))


class BestRow(Measured, Base):
    """The best config of a layer, batch, page size, GPU and regime; `check_level` is quick or full."""

    __tablename__ = "best_configs"
    __table_args__ = (UniqueConstraint(
        "spec", "bucket", "batch", "page_size", "gpu_name", "gpu_num_sms", "regime"),)

    samples_ms: Mapped[str]
    plan_ms: Mapped[float]
    default_samples_ms: Mapped[str]
    default_plan_ms: Mapped[float]
    default_regime: Mapped[str]
    verdict: Mapped[str]
    check_level: Mapped[str]

    @classmethod
    def of(cls, config: BestConfig) -> BestRow:
        """The row of `config`."""
        return cls(
            spec=spec_text(config.shape.spec),
            bucket=config.shape.bucket.key(),
            batch=config.batch,
            regime=str(config.timing.regime),
            samples_ms=json.dumps(config.timing.samples_ms),
            plan_ms=config.timing.plan_ms,
            default_samples_ms=json.dumps(config.default_timing.samples_ms),
            default_plan_ms=config.default_timing.plan_ms,
            default_regime=str(config.default_timing.regime),
            verdict=config.verdict.value,
            check_level="full" if config.full_check else "quick",
            measured_at=config.measured_at,
            **_variant_columns(config.variant),
            **_gpu_columns(config.gpu),
            **asdict(config.environment),
        )

    def record(self) -> BestConfig:
        """The config that `of` was given. Raises one of `UNREADABLE` for a row that no config has made."""
        variant = Variant.parse(self.variant)
        if variant.page_size != self.page_size:
            raise ValueError(f"variant {self.variant!r} is stored for page size {self.page_size}")
        return BestConfig(
            shape=Shape(AttentionSpec.parse(self.spec), BatchBucket.parse(self.bucket)),
            gpu=self.gpu,
            variant=variant,
            timing=Timing(_samples(self.samples_ms), Regime.parse(self.regime), float(self.plan_ms)),
            default_timing=Timing(_samples(self.default_samples_ms), Regime.parse(self.default_regime),
                                  float(self.default_plan_ms)),
            verdict=Verdict(self.verdict),
            full_check=self.check_level == "full",
            environment=self.environment,
            batch=self.batch,
            measured_at=self.measured_at,
        )


def _variant_columns(variant: Variant) -> dict[str, object]:
    return {"page_size": variant.page_size, "template": variant.template, "variant": variant.key()}


def _gpu_columns(gpu: Gpu) -> dict[str, object]:
    columns: dict[str, object] = {f"gpu_{name}": value for name, value in asdict(gpu).items()}
    columns["gpu_capability"] = "{}.{}".format(*gpu.capability)
    return columns


def _outcome_columns(outcome: Outcome) -> dict[str, object]:
    match outcome:
        case Timed(_, check, timing):
            return {"outcome": "timed", "samples_ms": json.dumps(timing.samples_ms), "plan_ms": timing.plan_ms,
                    "timing_regime": str(timing.regime), **_check_columns(check)}
        case Wrong(_, check):
            return {"outcome": "wrong", "reason": outcome.reason, **_check_columns(check)}
        case Failed(_, stage, reason):
            return {"outcome": "failed", "stage": stage, "reason": storable(reason)}
        case Skipped(_, reason):
            return {"outcome": "skipped", "reason": storable(reason)}


def _check_columns(check: Check) -> dict[str, object]:
    ratio = None if math.isnan(check.worst_ratio) else check.worst_ratio
    return {"check_ratio": ratio, "check_level": check.level, "check_detail": storable(check.detail)}


def storable(text: str) -> str:
    """`text` without what a database refuses: a compiler's message may hold stray bytes, and must not end the run."""
    return text.replace("\0", "?").encode("utf-8", "replace").decode()


def _samples(text: str) -> tuple[float, ...]:
    return tuple(map(float, json.loads(text)))


def _present(value: T | None) -> T:
    if value is None:
        raise ValueError("a value is missing")
    return value
