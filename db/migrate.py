"""The schema: whether a database has ours, and bringing it up to date with the migrations in `migrations`."""

from __future__ import annotations

import functools
import threading
from pathlib import Path

from sqlalchemy import Connection, inspect, text

from ..kernel_templates.errors import StoreError

MIGRATIONS = Path(__file__).parent / "migrations"

# Not Alembic's usual name: this table tells our databases from another program's.
VERSION_TABLE = "attention_tuner_version"

# Alembic keeps what it is migrating in the module that migrations import: one at a time in each process.
_ALEMBIC = threading.Lock()


def upgrade(connection: Connection, name: str) -> None:
    """Brings the schema up to date, making it in an empty database, within the transaction of `connection`.

    Raises `StoreError` for a database that is not ours, or whose schema is newer than this version knows.
    """
    from alembic import command
    from alembic.config import Config

    if _is_current(connection, name):
        return
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes.update(connection=connection, version_table=VERSION_TABLE)
    with _ALEMBIC:
        command.upgrade(config, "head")


def require_current(connection: Connection, name: str) -> None:
    """Raises `StoreError` unless the database is ours, with the schema of this version."""
    if not _is_current(connection, name):
        raise StoreError(f"database {name!r} is empty or of an older version; `attention-tuner tune` with this path "
                         "makes it current")


def _is_current(connection: Connection, name: str) -> bool:
    tables = inspect(connection).get_table_names()
    if tables and VERSION_TABLE not in tables:
        raise StoreError(f"database {name!r} belongs to another program (it has a table {sorted(tables)[0]!r}); "
                         "expected one made by attention-tuner, or a path where nothing is yet")
    revision = connection.scalar(text(f"SELECT version_num FROM {VERSION_TABLE}")) if tables else None
    *_, head = known = revisions(MIGRATIONS)
    if revision is not None and revision not in known:
        raise StoreError(f"database {name!r} has schema {revision!r}, which is newer than this version of "
                         f"attention-tuner; expected at most {head!r}")
    return revision == head


@functools.cache
def revisions(folder: Path) -> tuple[str, ...]:
    """The revisions in a folder of migrations, the latest last: with them the names of its files begin.

    Alembic says the same, but importing it takes longer than loading a table.
    """
    return tuple(sorted(path.name.partition("_")[0] for path in (folder / "versions").glob("[0-9]*_*.py")))
