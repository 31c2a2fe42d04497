"""Database connections, schema migrations, and error messages for database failures."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import platformdirs
from sqlalchemy import Connection, Engine, create_engine, event, inspect, make_url
from sqlalchemy import text as sql
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from ..kernel_templates.errors import StoreError

PATH_VARIABLE = "ATTENTION_TUNER_DB"

MIGRATIONS = Path(__file__).parent / "migrations"

# Not Alembic's default name, so that this table identifies our databases.
VERSION_TABLE = "attention_tuner_version"

# Execution option of transactions that write: they take SQLite's write lock at the start. If a transaction read first
# and another process wrote in between, SQLite would refuse its write without waiting.
WRITES = {"writes": True}

_CAUSES = {
    "is locked": "is locked by another process; try again when that has finished",
    "not a database": "is no SQLite database; expected one made by attention-tuner, or a path where nothing is yet",
    "unable to open": "cannot be opened; expected the path of a file in a folder that exists and can be written",
    "readonly database": "cannot be written to; expected a file that you may write, in a folder that you may write",
    "is full": "cannot be written: the disk is full",
    "disk I/O error": "cannot be written: the disk is full, a limit on the file's size is reached, or the disk fails",
}

# Alembic keeps the running migration in a module global, so a process runs one at a time.
_ALEMBIC = threading.Lock()


def default_path() -> str:
    """The path or URL of the user's database: `ATTENTION_TUNER_DB`, by default a file in the user's data folder."""
    return os.environ.get(PATH_VARIABLE) or str(platformdirs.user_data_path("attention-tuner") / "tuner.db")


def sqlite_path(where: str | PathLike[str]) -> Path | None:
    """The file of the database `where` (a path or SQLAlchemy URL); None for a database that is no file.

    Raises `StoreError` for an empty name, an unreadable URL, and an SQLite database in memory.
    """
    text = str(where)
    if not text.strip():
        raise StoreError("the name of a database is empty; expected a path, or a URL such as "
                         "postgresql+psycopg://user@host/name")
    if "://" not in text:
        try:
            return Path(text).expanduser().absolute()
        except RuntimeError as error:
            raise StoreError(f"the home folder in {text!r} cannot be found; expected the path of a database") from error
    try:
        url = make_url(text)
    except (ArgumentError, ValueError) as error:
        raise StoreError("a database URL cannot be read; expected a path, or a URL such as "
                         "postgresql+psycopg://user@host/name") from error
    if url.get_backend_name() != "sqlite":
        return None
    if url.database in (None, "", ":memory:"):
        raise StoreError(f"{text!r} is a database in memory; expected the path of a file")
    return Path(str(url.database)).expanduser().absolute()


def is_database(path: str) -> bool:
    """True if `path` is the URL of a database or an SQLite file."""
    if "://" in path:
        return True
    start = b"SQLite format 3\0"
    try:
        with Path(path).expanduser().open("rb") as file:
            return file.read(len(start)) == start
    except OSError:
        # The next reader reports the error.
        return False


def shown_name(where: str | PathLike[str]) -> str:
    """The path or SQLAlchemy URL `where` for display, without passwords. Raises as `sqlite_path` does."""
    path, text = sqlite_path(where), str(where)
    if path is not None:
        return text if "://" not in text else str(path)
    url = make_url(text)
    # Drivers also accept a password in the query.
    hidden = {name: "***" for name in url.query if "password" in name}
    return url.update_query_dict(hidden).render_as_string(hide_password=True)


def make_engine(where: str | PathLike[str], *, read_only: bool, timeout_s: float) -> Engine:
    """The engine for `where` (a path or SQLAlchemy URL), not yet connected.

    SQLite waits up to `timeout_s` seconds for another process's lock. Raises `StoreError` for an unusable URL.
    """
    path = sqlite_path(where)
    url = make_url(str(where)) if path is None else _sqlite_url(path, read_only)
    try:
        engine = create_engine(url)
    except (ArgumentError, ImportError) as error:
        raise StoreError(f"no driver is installed for {url.drivername!r}; expected a path, or a URL of a database "
                         "whose driver is installed, such as postgresql+psycopg://user@host/name") from error
    if path is not None:
        _prepare_sqlite(engine, read_only, timeout_s)
    return engine


@contextmanager
def translated(name: str) -> Generator[None]:
    """Turn an SQLAlchemy error into a `StoreError` with one sentence about the database `name`."""
    try:
        yield
    except SQLAlchemyError as error:
        detail = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        cause = next((text for part, text in _CAUSES.items() if part in detail), f"cannot be used: {detail}")
        raise StoreError(f"database {name!r} {cause}") from error


def _sqlite_url(path: Path, read_only: bool) -> URL:
    if not read_only:
        return URL.create("sqlite", database=str(path))
    # An open file in WAL mode has two extra files, which only a connection with write access removes.
    query = {"mode": "rw" if os.access(path, os.W_OK) and os.access(path.parent, os.W_OK) else "ro", "uri": "true"}
    # If SQLite cannot create them, it reads the file only when told that nobody writes to it.
    if not os.access(path.parent, os.W_OK) and not path.with_name(f"{path.name}-wal").exists():
        query["immutable"] = "1"
    return URL.create("sqlite", database=path.as_uri(), query=query)


def _prepare_sqlite(engine: Engine, read_only: bool, timeout_s: float) -> None:
    @event.listens_for(engine, "connect")
    def _on_connect(connection: Any, _record: object) -> None:  # pyright: ignore[reportUnusedFunction]
        # The sqlite3 module would begin transactions late, after schema changes, so `_on_begin` begins them.
        connection.isolation_level = None
        connection.text_factory = lambda text: text.decode(errors="replace")  # pyright: ignore
        connection.execute("PRAGMA foreign_keys = ON")
        # With a write-ahead log, a commit survives the death of its process and does not wait for the disk.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA busy_timeout = {round(timeout_s * 1000)}")
        connection.execute(f"PRAGMA query_only = {'ON' if read_only else 'OFF'}")

    @event.listens_for(engine, "begin")
    def _on_begin(connection: Connection) -> None:  # pyright: ignore[reportUnusedFunction]
        writes = connection.get_execution_options().get("writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def upgrade(connection: Connection, name: str) -> None:
    """Migrate the schema within the transaction of `connection`; an empty database gets all tables.

    Raises `StoreError` for another program's database and for a newer schema.
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
    """Raise `StoreError` unless the database is ours and has this version's schema."""
    if not _is_current(connection, name):
        raise StoreError(f"database {name!r} is empty or of an older version; `attention-tuner tune` with this path "
                         "makes it current")


def _is_current(connection: Connection, name: str) -> bool:
    tables = inspect(connection).get_table_names()
    if tables and VERSION_TABLE not in tables:
        raise StoreError(f"database {name!r} belongs to another program (it has a table {sorted(tables)[0]!r}); "
                         "expected one made by attention-tuner, or a path where nothing is yet")
    revision = connection.scalar(sql(f"SELECT version_num FROM {VERSION_TABLE}")) if tables else None
    *_, head = known = revisions(MIGRATIONS)
    if revision is not None and revision not in known:
        raise StoreError(f"database {name!r} has schema {revision!r}, which is newer than this version of "
                         f"attention-tuner; expected at most {head!r}")
    return revision == head


@functools.cache
def revisions(folder: Path) -> tuple[str, ...]:
    """The revisions in a folder of migrations, the latest last, read from the file names.

    Alembic is not asked, because importing it takes longer than loading a table.
    """
    return tuple(sorted(path.name.partition("_")[0] for path in (folder / "versions").glob("[0-9]*_*.py")))
