"""The database of trials and best configs."""

from __future__ import annotations

import contextlib
import functools
import json
import sqlite3
import warnings
from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from sqlalchemy import Engine, delete, func, select
from sqlalchemy.orm import Session

from ..kernel_templates.batch import Batch, BatchBucket
from ..kernel_templates.errors import StoreError
from ..kernel_templates.gpu import Gpu
from ..kernel_templates.outcome import BestConfig, Environment, FullCheck, Regime, Timed
from ..kernel_templates.registry import templates
from ..kernel_templates.spec import AttentionSpec
from ..kernel_templates.variant import Variant
from .checks import FullCheckRow, FullChecks
from .engine import WRITES, make_engine, require_current, shown_name, sqlite_path, translated, upgrade
from .losses import Loss, LossRow
from .models import UNREADABLE, BestRow, RunRow, TrialRow
from .records import EnvironmentOf, Setting, TrialRecord, spec_text, utc_now
from .snapshot import Snapshot

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

# The parts of an environment, in the order in which they are named as the reason why a trial cannot be reused.
_OUTDATED = {
    "kernel_hash": "measured with another kernel source",
    "triton": "measured with another triton",
    "torch": "measured with another torch",
    "driver": "measured with another driver",
}


class _Row(Protocol[R_co]):
    @property
    def label(self) -> str: ...

    def record(self) -> R_co: ...


class Store:
    """An open database. Every method is one transaction: all of it is kept, or a `StoreError` is raised and none is.

    A row that cannot be understood is set aside with a warning that names it. May be used from several threads, and
    several processes may each open the same database.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        self.name = name
        self._engine = engine

    @classmethod
    def open(cls, where: str | PathLike[str], *, create: bool = True, timeout_s: float = 30.0) -> Store:
        """Open `where`, a path or an SQLAlchemy URL, making the file and bringing its schema up to date.

        With `create` false the database is only read, and nothing is made or changed. `timeout_s` is how long a
        transaction waits for another process's. Raises `StoreError`, leaving the file as it was, when it is missing
        (`create` false), cannot be opened or written, is locked, belongs to another program or is of a newer version.
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
        """Note that a run begins, with `settings` that JSON can hold, and return its id."""
        row = RunRow(started_at=utc_now(), settings=json.dumps(dict(settings)))
        with self._writing() as session:
            session.add(row)
            session.flush()
            return row.id

    def finish_run(self, run_id: int, notes: Mapping[str, object]) -> None:
        """Add what is known of a run at its end, that JSON can hold, to its settings."""
        with self._writing() as session:
            row = session.get_one(RunRow, run_id)
            row.settings = json.dumps({**json.loads(row.settings), **notes})

    def run_settings(self) -> dict[int, dict[str, Any]]:
        """The settings of every run by its id, with the notes that were added to them."""
        with self._reading() as session:
            return {row.id: json.loads(row.settings) for row in session.scalars(select(RunRow).order_by(RunRow.id))}

    def add_trial(self, record: TrialRecord) -> None:
        """Keep a finished trial."""
        with self._writing() as session:
            session.add(TrialRow.of(record))

    def reusable_trials(self, setting: Setting, environment_of: EnvironmentOf) -> list[TrialRecord]:
        """The trials that need not be measured again: the latest of each variant, oldest first.

        They are those of `setting` (its GPU by name and number of SMs) in the present environment of their template.
        What was timed and has failed the full check there is `Wrong`.
        """
        latest: dict[Variant, TrialRecord] = {}
        for record, outdated in self._judged(setting, environment_of):
            if outdated is None:
                latest.pop(record.outcome.variant, None)
                latest[record.outcome.variant] = record
        checks = FullChecks(self.full_checks(spec=setting.spec, gpu_name=setting.gpu.name))
        return [checks.on_trial(record) for record in latest.values()]

    def trials(self, spec: AttentionSpec, page_size: int, gpu: Gpu, batch: str | None = None) -> list[TrialRecord]:
        """All trials of a layer, page size and, if given, batch on GPUs of this name and number of SMs, oldest first.

        What was timed and has failed the full check in its environment is `Wrong`.
        """
        wanted = {"spec": spec_text(spec), "page_size": page_size, "gpu_name": gpu.name, "gpu_num_sms": gpu.num_sms}
        query = select(TrialRow).filter_by(**wanted, **({} if batch is None else {"batch": batch}))
        with self._reading() as session:
            records = self._readable(session.scalars(query.order_by(TrialRow.id)))
        checks = FullChecks(self.full_checks(spec=spec, gpu_name=gpu.name))
        return [checks.on_trial(record) for record in records]

    def outdated_trials(self, setting: Setting, environment_of: EnvironmentOf) -> Counter[str]:
        """How many trials of `setting` cannot be reused, by the first reason."""
        return Counter(outdated for _, outdated in self._judged(setting, environment_of) if outdated is not None)

    def trial_counts(self) -> Counter[str]:
        """How many trials are kept, by outcome: timed, wrong, failed or skipped."""
        with self._reading() as session:
            query = select(TrialRow.outcome, func.count()).group_by(TrialRow.outcome)
            return Counter({outcome: count for outcome, count in session.execute(query)})  # noqa: C416 - rows are typed

    def failure_counts(self) -> Counter[tuple[str, str, str]]:
        """How many trials have no time, by outcome, stage ("" for an outcome without one) and reason."""
        with self._reading() as session:
            kind = (TrialRow.outcome, func.coalesce(TrialRow.stage, ""), func.coalesce(TrialRow.reason, ""))
            query = select(*kind, func.count()).where(TrialRow.outcome != "timed").group_by(*kind)
            rows = session.execute(query)
            return Counter({(outcome, stage, reason): count for outcome, stage, reason, count in rows})

    def put_best(self, *configs: BestConfig) -> None:
        """Keep these configs, each in the place of one for the same layer, batch, page size, GPU and regime."""
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
        """The best configs with these properties, None meaning any, in a fixed order.

        Whether one has passed the full check is answered by `checked`, which leaves out those that failed.
        """
        wanted = {"spec": spec and spec_text(spec), "bucket": bucket and bucket.key(), "page_size": page_size,
                  "gpu_name": gpu_name, "regime": regime and str(regime)}
        query = select(BestRow).filter_by(**{name: value for name, value in wanted.items() if value is not None})
        order = (BestRow.gpu_name, BestRow.gpu_num_sms, BestRow.spec, BestRow.page_size, BestRow.bucket, BestRow.batch,
                 BestRow.regime)
        with self._reading() as session:
            configs = self._readable(session.scalars(query.order_by(*order)))
        return self.checked(configs)

    def put_full_check(self, *checks: FullCheck) -> None:
        """Keep these full checks, each in the place of one of the same variant, layer, GPU and environment."""
        with self._writing() as session:
            for check in checks:
                row = FullCheckRow.of(check)
                session.execute(delete(FullCheckRow).filter_by(**row.key()))
                session.add(row)
                session.flush()

    def full_checks(self, *, spec: AttentionSpec | None = None, variant: Variant | None = None,
                    gpu_name: str | None = None) -> list[FullCheck]:
        """The full checks with these properties, None meaning any, the earliest first."""
        wanted = {"spec": spec and spec_text(spec), "variant": variant and variant.key(), "gpu_name": gpu_name}
        query = select(FullCheckRow).filter_by(**{name: value for name, value in wanted.items() if value is not None})
        with self._reading() as session:
            return self._readable(session.scalars(query.order_by(FullCheckRow.checked_at, FullCheckRow.id)))

    def checked(self, configs: Iterable[BestConfig]) -> list[BestConfig]:
        """`configs` with what the stored full checks say of them, as `FullChecks` has it.

        One that failed is left out with a warning that names the case.
        """
        checks = FullChecks(self.full_checks())
        return [served for config in configs if (served := checks.served(config, self.name)) is not None]

    def snapshot(self) -> Snapshot:
        """What a lookup needs of the database, all of one moment, as it is stored."""
        with self._reading() as session:
            return Snapshot.read(session.connection(), self.name)

    def losses(self) -> list[Loss]:
        """What lookups were seen to lose."""
        with self._reading() as session:
            return self._readable(session.scalars(select(LossRow).order_by(LossRow.id)))

    def put_losses(self, gpu_name: str, losses: Iterable[Loss]) -> None:
        """Keep these losses in the place of all others of the GPU."""
        with self._writing() as session:
            session.execute(delete(LossRow).filter_by(gpu_name=gpu_name))
            session.add_all(LossRow.of(loss) for loss in losses)

    def times(self, config: BestConfig) -> dict[Variant, float]:
        """The median times in milliseconds of all variants that were timed in the setting of `config`."""
        regime = config.timing.regime
        setting = Setting(config.shape.spec, Batch.parse(config.batch), config.variant.page_size, config.gpu, regime)
        outcomes = (trial.outcome for trial in self._trials(setting))
        return {timed.variant: timed.timing.median_ms for timed in outcomes
                if isinstance(timed, Timed) and timed.timing.regime == regime}

    def _judged(self, setting: Setting, environment_of: EnvironmentOf) -> list[tuple[TrialRecord, str | None]]:
        """The trials of `setting`, each with the reason why it is out of date."""
        @functools.cache
        def why(template: str, measured: Environment) -> str | None:
            if template not in templates():
                return "of a template that is not installed"
            present = environment_of(template, setting.gpu)
            return next((reason for part, reason in _OUTDATED.items()
                         if getattr(present, part) != getattr(measured, part)), None)

        return [(trial, why(trial.outcome.variant.template, trial.environment)) for trial in self._trials(setting)]

    def _trials(self, setting: Setting) -> list[TrialRecord]:
        query = select(TrialRow).filter_by(
            spec=spec_text(setting.spec), bucket=BatchBucket.of(setting.batch).key(), batch=str(setting.batch),
            page_size=setting.page_size, gpu_name=setting.gpu.name, gpu_num_sms=setting.gpu.num_sms,
            regime=str(setting.regime))
        with self._reading() as session:
            return self._readable(session.scalars(query.order_by(TrialRow.id)))

    def _readable(self, rows: Iterable[_Row[R]]) -> list[R]:
        records: list[R] = []
        for row in rows:
            try:
                records.append(row.record())
            except UNREADABLE as error:
                warnings.warn(f"{row.label} in database {self.name!r} cannot be read and is set aside: {error}",
                              stacklevel=3)
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
    def _reading(self) -> Generator[Session]:
        with translated(self.name), Session(self._engine) as session, session.begin():
            yield session

    @contextlib.contextmanager
    def _writing(self) -> Generator[Session]:
        with translated(self.name), Session(self._engine.execution_options(**WRITES)) as session, session.begin():
            yield session


def _require_place(path: Path, create: bool) -> None:
    """Makes the folder of `path`, or, unless `create`, makes sure that the file is there."""
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
    """Lets readers go on while one process writes. The file remembers it."""
    connection = engine.raw_connection()
    try:
        # Only refused while another process has the file open in the old mode; the next opening tries again.
        with contextlib.suppress(sqlite3.OperationalError):
            connection.cursor().execute("PRAGMA journal_mode = WAL").fetchall()
    finally:
        connection.close()
