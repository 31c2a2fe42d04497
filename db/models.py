"""The tables, and conversion between records and rows.

A query can fetch every row, whatever its values, because lists and times are stored as text and parsed only when the
row becomes a record. So one unreadable row does not break a query. ORM rows and plain rows both work, because both have
the columns as attributes.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from functools import lru_cache
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
"""The errors that reading an invalid row can raise."""

# Cached: thousands of rows share few layers, variants and buckets, and parsing them takes most of a row's time.
parse_spec = lru_cache(4096)(AttentionSpec.parse)
parse_variant = lru_cache(4096)(Variant.parse)
_parse_bucket = lru_cache(4096)(BatchBucket.parse)
_parse_regime = lru_cache(64)(Regime.parse)


class Base(DeclarativeBase):
    """Base of all tables. Constraints have names, because migrations need them."""

    type_annotation_map = {str: Text}  # noqa: RUF012 - SQLAlchemy reads it as a plain attribute
    metadata = MetaData(naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    })


class RunRow(Base):
    """One run of the tuner."""

    __tablename__ = "runs"

    id: Mapped[int] = mapped_column(primary_key=True)
    started_at: Mapped[str]
    # JSON: the settings, with the notes added at the end of the run.
    settings: Mapped[str]


class Measured:
    """The columns of a measurement: task, variant, regime, GPU and environment. Texts are the records' keys."""

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
    # ISO 8601 in UTC.
    measured_at: Mapped[str]


class TrialRow(Measured, Base):
    """One trial. Columns that do not apply to its outcome are null."""

    __tablename__ = "trials"
    __table_args__ = (Index(None, "spec", "bucket", "page_size", "gpu_name"),)

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    # "timed", "wrong", "failed" or "skipped".
    outcome: Mapped[str]
    stage: Mapped[str | None]
    reason: Mapped[str | None]
    # Null also for NaN, which SQLite cannot store.
    check_ratio: Mapped[float | None]
    check_level: Mapped[str | None]
    check_detail: Mapped[str | None]
    # JSON: a list of milliseconds.
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


class BestRow(Measured, Base):
    """The best config of a layer, batch, page size, GPU and regime."""

    __tablename__ = "best_configs"
    __table_args__ = (UniqueConstraint(
        "spec", "bucket", "batch", "page_size", "gpu_name", "gpu_num_sms", "regime"),)

    # JSON: a list of milliseconds.
    samples_ms: Mapped[str]
    plan_ms: Mapped[float]
    default_samples_ms: Mapped[str]
    default_plan_ms: Mapped[float]
    default_regime: Mapped[str]
    verdict: Mapped[str]
    # "quick" or "full".
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


def trial_of(row: TrialRow) -> TrialRecord:
    """The trial in `row`. Raises one of `UNREADABLE` for an invalid row."""
    setting = Setting(parse_spec(row.spec), Batch.parse(row.batch), row.page_size, _gpu(row), _parse_regime(row.regime))
    return TrialRecord(row.run_id, setting, _environment(row), _outcome(row), _facts(row), row.measured_at)


def config_of(row: BestRow) -> BestConfig:
    """The best config in `row`. Raises one of `UNREADABLE` for an invalid row."""
    variant = parse_variant(row.variant)
    if variant.page_size != row.page_size:
        raise ValueError(f"variant {row.variant!r} is stored for page size {row.page_size}")
    return BestConfig(
        shape=Shape(parse_spec(row.spec), _parse_bucket(row.bucket)),
        gpu=_gpu(row),
        variant=variant,
        timing=Timing(_samples(row.samples_ms), _parse_regime(row.regime), float(row.plan_ms)),
        default_timing=Timing(_samples(row.default_samples_ms), _parse_regime(row.default_regime),
                              float(row.default_plan_ms)),
        verdict=Verdict(row.verdict),
        full_check=row.check_level == "full",
        environment=_environment(row),
        batch=row.batch,
        measured_at=row.measured_at,
    )


def storable(text: str) -> str:
    """`text` with characters that a database refuses replaced; a compiler's message may hold any bytes."""
    return text.replace("\0", "?").encode("utf-8", "replace").decode()


def _gpu(row: Measured) -> Gpu:
    return _make_gpu(row.gpu_name, row.gpu_capability, row.gpu_num_sms, row.gpu_shared_memory_bytes, row.gpu_l2_bytes,
                     row.gpu_driver)


@lru_cache(256)
def _make_gpu(name: str, capability: str, *rest: int | str) -> Gpu:
    *sizes, driver = rest
    for size in sizes:
        if type(size) is not int:
            raise ValueError(f"a size of its GPU is {size!r}; expected a whole number")
    major, minor = map(int, capability.split("."))
    return Gpu(name, (major, minor), *map(int, sizes), driver=str(driver))


def _environment(row: Measured) -> Environment:
    return _make_environment(row.kernel_hash, row.triton, row.torch, row.driver)


_make_environment = lru_cache(1024)(Environment)


def _outcome(row: TrialRow) -> Outcome:
    variant = parse_variant(row.variant)
    match row.outcome:
        case "timed":
            regime = _parse_regime(_present(row.timing_regime))
            timing = Timing(_samples(_present(row.samples_ms)), regime, float(_present(row.plan_ms)))
            return Timed(variant, _check(row), timing)
        case "wrong":
            return Wrong(variant, _check(row))
        case "failed":
            return Failed(variant, _present(row.stage), _present(row.reason))
        case "skipped":
            return Skipped(variant, _present(row.reason))
        case other:
            raise ValueError(f"{other!r} is no outcome")


def _check(row: TrialRow) -> Check:
    ratio = math.nan if row.check_ratio is None else float(row.check_ratio)
    return Check(ratio, _present(row.check_level), _present(row.check_detail))


def _facts(row: TrialRow) -> StaticFacts | None:
    if row.shared_bytes is None:
        return None
    return StaticFacts(row.shared_bytes, row.registers, row.stack_bytes, _present(row.tensor_core),
                       _present(row.code_hash))


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


def _samples(text: str) -> tuple[float, ...]:
    return tuple(map(float, json.loads(text)))


def _present(value: T | None) -> T:
    if value is None:
        raise ValueError("a value is missing")
    return value
