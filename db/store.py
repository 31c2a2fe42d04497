"""The database of trials and best configs."""

from __future__ import annotations

import contextlib
import functools
import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from sqlalchemy import Connection, Engine, delete, func, select
from sqlalchemy.orm import Session

from ..kernel_templates.batch import Batch, BatchBucket
from ..kernel_templates.errors import StoreError
from ..kernel_templates.gpu import Gpu
from ..kernel_templates.outcome import BestConfig, Environment, FullCheck, Regime, Timed
from ..kernel_templates.registry import templates
from ..kernel_templates.spec import AttentionSpec
from ..kernel_templates.variant import Variant
from .checks import FullCheckRow, FullChecks, check_of
from .engine import WRITES, make_engine, require_current, shown_name, sqlite_path, translated, upgrade
from .losses import Loss, LossRow, loss_of
from .models import UNREADABLE, Base, BestRow, RunRow, TrialRow, config_of, trial_of
from .records import EnvironmentOf, Setting, TrialRecord, spec_text, utc_now, warn_unusable

R = TypeVar("R")

# Reasons that a trial cannot be reused, by part of its environment. The first part that differs gives the reason.
_OUTDATED = {
    "kernel_hash": "measured with another kernel source",
    "triton": "measured with another triton",
    "torch": "measured with another torch",
    "driver": "measured with another driver",
}

# Columns that give best configs a fixed order.
_CONFIG_ORDER = ("gpu_name", "gpu_num_sms", "spec", "page_size", "bucket", "batch", "regime")


@dataclass(frozen=True, slots=True)
class KnownTrials:
    """The stored trials of a setting."""

    # The latest reusable trial of each variant, oldest first.
    reusable: list[TrialRecord]
    # The number of other trials, by the first reason against reusing them.
    outdated: Counter[str]


@dataclass(frozen=True, slots=True)
class Contents:
    """All data in a database that lookups use, read in one transaction."""

    # The best configs that may be served.
    configs: list[BestConfig] = field(default_factory=list[BestConfig])
    checks: FullChecks = field(default_factory=FullChecks)
    losses: list[Loss] = field(default_factory=list[Loss])
    # Unreadable rows, and configs that failed a full check, each with the reason.
    unusable: list[str] = field(default_factory=list[str])


class Store:
    """An open database. Each method is one transaction; if it fails, it is undone and raises `StoreError`.

    Unreadable rows are skipped with a warning that names them. Several threads may use one store, and several processes
    may open the same database.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        self.name = name
        self._engine = engine

    @classmethod
    def open(cls, where: str | PathLike[str], *, create: bool = True, timeout_s: float = 30.0) -> Store:
        """Open `where` (a path or SQLAlchemy URL); create the file and migrate its schema if needed.

        With `create` false the database is only read and never changed. A transaction waits up to `timeout_s` seconds
        for another process's transaction. Raises `StoreError` and leaves the file unchanged if it is missing (with
        `create` false), cannot be opened or written, is locked, belongs to another program or has a newer schema.
        """
        path = sqlite_path(where)
        if path is not None:
            _require_place(path, create)
        engine = make_engine(where, read_only=not create, timeout_s=timeout_s)
        store = cls(engine, str(path or shown_name(where)))
        try:
            store._prepare(create)
        except BaseException:
            store.close()
            raise
        return store

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def start_run(self, settings: Mapping[str, object]) -> int:
        """Store the start of a run with its `settings` (JSON values), and return its id."""
        row = RunRow(started_at=utc_now(), settings=json.dumps(dict(settings)))
        with self._writing() as session:
            session.add(row)
            session.flush()
            return row.id

    def finish_run(self, run_id: int, notes: Mapping[str, object]) -> None:
        """Add `notes` (JSON values) to the settings of a run."""
        with self._writing() as session:
            row = session.get_one(RunRow, run_id)
            row.settings = json.dumps({**json.loads(row.settings), **notes})

    def run_settings(self) -> dict[int, dict[str, Any]]:
        """The settings of every run by its id, with its notes."""
        with self._reading() as connection:
            rows = connection.execute(select(RunRow.id, RunRow.settings).order_by(RunRow.id))
            return {run_id: json.loads(settings) for run_id, settings in rows}

    def add_trial(self, record: TrialRecord) -> None:
        """Store a finished trial."""
        with self._writing() as session:
            session.add(TrialRow.of(record))

    def known_trials(self, setting: Setting, environment_of: EnvironmentOf) -> KnownTrials:
        """The trials of `setting`, on GPUs with the same name and number of SMs.

        A trial is reusable if its environment equals the present one of its template. A timed variant that failed the
        full check in that environment is `Wrong`.
        """
        @functools.cache
        def _why_outdated(template: str, measured: Environment) -> str | None:
            if template not in templates():
                return "of a template that is not installed"
            present = environment_of(template, setting.gpu)
            return next((reason for part, reason in _OUTDATED.items()
                         if getattr(present, part) != getattr(measured, part)), None)

        latest: dict[Variant, TrialRecord] = {}
        outdated: Counter[str] = Counter()
        for trial in self._trials(_wanted_trials(setting)):
            reason = _why_outdated(trial.outcome.variant.template, trial.environment)
            if reason is None:
                latest.pop(trial.outcome.variant, None)
                latest[trial.outcome.variant] = trial
            else:
                outdated[reason] += 1
        return KnownTrials(list(latest.values()), outdated)

    def trials(self, spec: AttentionSpec, page_size: int, gpu: Gpu, batch: str | None = None) -> list[TrialRecord]:
        """The trials of a layer and page size, oldest first, on GPUs with the same name and number of SMs.

        `batch` selects one batch. A timed variant that failed the full check in its environment is `Wrong`.
        """
        return self._trials({"spec": spec_text(spec), "page_size": page_size, "gpu_name": gpu.name,
                             "gpu_num_sms": gpu.num_sms, "batch": batch})

    def trial_counts(self) -> Counter[str]:
        """The number of trials by outcome: timed, wrong, failed or skipped."""
        with self._reading() as connection:
            query = select(TrialRow.outcome, func.count()).group_by(TrialRow.outcome)
            return Counter({outcome: count for outcome, count in connection.execute(query)})  # noqa: C416 - typed rows

    def failure_counts(self) -> Counter[tuple[str, str, str]]:
        """The number of trials that were not timed, by outcome, stage ("" if it has none) and reason."""
        with self._reading() as connection:
            kind = (TrialRow.outcome, func.coalesce(TrialRow.stage, ""), func.coalesce(TrialRow.reason, ""))
            query = select(*kind, func.count()).where(TrialRow.outcome != "timed").group_by(*kind)
            rows = connection.execute(query)
            return Counter({(outcome, stage, reason): count for outcome, stage, reason, count in rows})

    def put_best(self, *configs: BestConfig) -> None:
        """Store configs; each replaces the stored one of its layer, batch, page size, GPU and regime."""
        with self._writing() as session:
            for config in configs:
                row = BestRow.of(config)
                session.execute(delete(BestRow).filter_by(
                    spec=row.spec, bucket=row.bucket, batch=row.batch, page_size=row.page_size,
                    gpu_name=row.gpu_name, gpu_num_sms=row.gpu_num_sms, regime=row.regime))
                session.add(row)
                session.flush()

    def best_configs(self, *, spec: AttentionSpec | None = None, bucket: BatchBucket | None = None,
                     page_size: int | None = None, gpu_name: str | None = None,
                     regime: Regime | None = None) -> list[BestConfig]:
        """The best configs with these properties (None: any) in a fixed order, filtered as by `checked`."""
        wanted = {"spec": spec and spec_text(spec), "bucket": bucket and bucket.key(), "page_size": page_size,
                  "gpu_name": gpu_name, "regime": regime and str(regime)}
        unusable: list[str] = []
        with self._reading() as connection:
            configs = self._records(connection, BestRow, config_of, unusable, wanted, _CONFIG_ORDER)
            # A run reads before its first result, when there is nothing to judge.
            if configs:
                of_layer = {name: wanted[name] for name in ("spec", "gpu_name")}
                configs = self._checks(connection, unusable, of_layer).served(configs, unusable)
        warn_unusable(unusable)
        return configs

    def put_full_check(self, *checks: FullCheck) -> None:
        """Store full checks; each replaces the stored one of its variant, layer, GPU and environment."""
        with self._writing() as session:
            for check in checks:
                row = FullCheckRow.of(check)
                session.execute(delete(FullCheckRow).filter_by(**row.key()))
                session.add(row)
                session.flush()

    def full_checks(self, *, spec: AttentionSpec | None = None, variant: Variant | None = None,
                    gpu_name: str | None = None) -> list[FullCheck]:
        """The full checks with these properties (None: any), earliest first."""
        wanted = {"spec": spec and spec_text(spec), "variant": variant and variant.key(), "gpu_name": gpu_name}
        unusable: list[str] = []
        with self._reading() as connection:
            checks = self._records(connection, FullCheckRow, check_of, unusable, wanted, ("checked_at", "id"))
        warn_unusable(unusable)
        return checks

    def checked(self, configs: Iterable[BestConfig]) -> list[BestConfig]:
        """`configs` without those that failed a full check, which are named in a warning; passed ones are final.

        `FullChecks` states the rule.
        """
        unusable: list[str] = []
        with self._reading() as connection:
            found = self._checks(connection, unusable).served(configs, unusable)
        warn_unusable(unusable)
        return found

    def contents(self) -> Contents:
        """All data that lookups need, read in one transaction, without warnings."""
        unusable: list[str] = []
        with self._reading() as connection:
            configs = self._records(connection, BestRow, config_of, unusable)
            checks = self._checks(connection, unusable)
            losses = self._records(connection, LossRow, loss_of, unusable)
        return Contents(checks.served(configs, unusable), checks, losses, unusable)

    def losses(self) -> list[Loss]:
        """The measured losses of lookups."""
        unusable: list[str] = []
        with self._reading() as connection:
            losses = self._records(connection, LossRow, loss_of, unusable)
        warn_unusable(unusable)
        return losses

    def put_losses(self, gpu_name: str, losses: Iterable[Loss]) -> None:
        """Replace all losses of the GPU by these."""
        with self._writing() as session:
            session.execute(delete(LossRow).filter_by(gpu_name=gpu_name))
            session.add_all(LossRow.of(loss) for loss in losses)

    def times(self, config: BestConfig) -> dict[Variant, float]:
        """The median milliseconds of all variants timed in the setting of `config`."""
        regime = config.timing.regime
        setting = Setting(config.shape.spec, Batch.parse(config.batch), config.variant.page_size, config.gpu, regime)
        unusable: list[str] = []
        with self._reading() as connection:
            trials = self._records(connection, TrialRow, trial_of, unusable, _wanted_trials(setting))
        warn_unusable(unusable)
        outcomes = (trial.outcome for trial in trials)
        return {timed.variant: timed.timing.median_ms for timed in outcomes
                if isinstance(timed, Timed) and timed.timing.regime == regime}

    def _trials(self, wanted: Mapping[str, object]) -> list[TrialRecord]:
        """The trials with these column values (layer and GPU among them), oldest first, after full checks."""
        unusable: list[str] = []
        of_layer = {name: wanted[name] for name in ("spec", "gpu_name")}
        with self._reading() as connection:
            trials = self._records(connection, TrialRow, trial_of, unusable, wanted)
            checks = self._checks(connection, unusable, of_layer) if trials else FullChecks()
        warn_unusable(unusable, stacklevel=4)
        return [checks.trial(trial) for trial in trials]

    def _checks(self, connection: Connection, unusable: list[str], wanted: Mapping[str, object] | None = None,
                ) -> FullChecks:
        return FullChecks(self._records(connection, FullCheckRow, check_of, unusable, wanted or {}))

    def _records(self, connection: Connection, model: type[Base], record_of: Callable[[Any], R], unusable: list[str],
                 wanted: Mapping[str, object] | None = None, order: Iterable[str] = ("id",)) -> list[R]:
        """The records of a table with these column values (None: any).

        Unreadable rows are added to `unusable`. Plain rows are read, because ORM objects take several times as long.
        """
        table = model.__table__
        known = {name: value for name, value in (wanted or {}).items() if value is not None}
        query = select(table).filter_by(**known).order_by(*(table.columns[name] for name in order))
        records: list[R] = []
        for row in connection.execute(query).all():
            try:
                records.append(record_of(row))
            except UNREADABLE as error:
                unusable.append(f"row {row.id} of table {model.__tablename__} in database {self.name!r} cannot be "
                                f"read: {error}")
        return records

    def _prepare(self, create: bool) -> None:
        if not create:
            with translated(self.name), self._engine.begin() as connection:
                require_current(connection, self.name)
            return
        with translated(self.name), self._engine.execution_options(**WRITES).begin() as connection:
            upgrade(connection, self.name)
        if self._engine.dialect.name == "sqlite":
            _use_write_ahead_log(self._engine)

    @contextlib.contextmanager
    def _reading(self) -> Generator[Connection]:
        with translated(self.name), self._engine.begin() as connection:
            yield connection

    @contextlib.contextmanager
    def _writing(self) -> Generator[Session]:
        with translated(self.name), Session(self._engine.execution_options(**WRITES)) as session, session.begin():
            yield session


def _wanted_trials(setting: Setting) -> dict[str, object]:
    """The columns of the trials of `setting`."""
    return {"spec": spec_text(setting.spec), "bucket": BatchBucket.of(setting.batch).key(), "batch": str(setting.batch),
            "page_size": setting.page_size, "gpu_name": setting.gpu.name, "gpu_num_sms": setting.gpu.num_sms,
            "regime": str(setting.regime)}


def _require_place(path: Path, create: bool) -> None:
    """Create the folder of `path`. With `create` false, raise `StoreError` if the file is missing instead."""
    if not create:
        if not path.is_file():
            raise StoreError(f"there is no database {str(path)!r}; `attention-tuner tune` with this path makes one")
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"the folder of database {str(path)!r} cannot be made: {error.strerror}; expected a path "
                         "where you may write") from error


def _use_write_ahead_log(engine: Engine) -> None:
    """Switch the file to WAL mode, in which readers do not wait for a writer. The file keeps the mode."""
    connection = engine.raw_connection()
    try:
        # SQLite refuses while another process has the file open in the old mode. The next `open` tries again.
        with contextlib.suppress(sqlite3.OperationalError):
            connection.cursor().execute("PRAGMA journal_mode = WAL").fetchall()
    finally:
        connection.close()
