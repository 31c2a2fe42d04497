"""What a database held at one moment, as it is stored there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import ColumnElement, Connection, select

from ..kernel_templates.outcome import BestConfig
from .answer import Origin
from .checks import FullCheckRow
from .losses import Loss, LossRow
from .models import UNREADABLE, BestRow
from .rows import COLUMNS, Rows, set_aside, stored

Values = Sequence[Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The best configs, full checks and losses of database `name`: rows of values in the order of their columns.

    Texts of the best configs may be bytes.
    """

    name: str
    best: Values
    checks: Values
    lost: Values

    @classmethod
    def read(cls, connection: Connection, name: str) -> Snapshot:
        """The snapshot within the transaction of `connection`."""
        best = [BestRow.__table__.columns[column] for column in ("id", *COLUMNS)]
        with _undecoded(connection):
            rows = _values(connection, best)
        return cls(name, rows, *(_values(connection, model.__table__.columns) for model in (FullCheckRow, LossRow)))

    def rows(self, judge: Callable[[BestConfig], BestConfig | None],
             origin: Origin = "database") -> Rows[Sequence[Any]]:
        """The best configs for a table; `judge` says which of them are served, as the checks here have it."""
        rows = stored(self.best, f"table {BestRow.__tablename__} in database {self.name!r}", origin, judge)
        # What the checks say decides as well; as with a config, the number of a row says nothing.
        return replace(rows, content=lambda: itertools.chain(rows.content(), (repr(row[1:]) for row in self.checks)))

    def losses(self) -> list[Loss]:
        """The losses; one that cannot be read is left out, with a warning."""
        names = [column.name for column in LossRow.__table__.columns]
        losses: list[Loss] = []
        bad: list[str] = []
        for values in self.lost:
            row = LossRow(**dict(zip(names, values, strict=True)))
            try:
                losses.append(row.record())
            except UNREADABLE as error:
                bad.append(f"{row.label} in database {self.name!r} cannot be read: {error}")
        set_aside(bad)
        return losses


def _values(connection: Connection, columns: Iterable[ColumnElement[Any]]) -> Values:
    result = connection.execute(select(*columns))
    # The driver's own tuples, for nothing has to be converted: half the time that the others take.
    return result.cursor.fetchall() if result.cursor is not None else []


@contextmanager
def _undecoded(connection: Connection) -> Generator[None]:
    """SQLite's texts as bytes, which are decoded when a row is read: most never are."""
    raw: Any = connection.connection.dbapi_connection
    decoded = getattr(raw, "text_factory", None)
    if decoded is None:
        yield
        return
    raw.text_factory = bytes
    try:
        yield
    finally:
        raw.text_factory = decoded
