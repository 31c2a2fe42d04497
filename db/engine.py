"""Connections to a database, and what goes wrong with one, in a sentence each."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import platformdirs
from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from ..kernel_templates.errors import StoreError

PATH_VARIABLE = "ATTENTION_TUNER_DB"

# An execution option: a transaction that is going to write takes SQLite's write lock as it begins. One that read first
# would be refused without waiting when another process had written in between.
WRITES = {"writes": True}

_CAUSES = {
    "is locked": "is locked by another process; try again when that has finished",
    "not a database": "is no SQLite database; expected one made by attention-tuner, or a path where nothing is yet",
    "unable to open": "cannot be opened; expected the path of a file in a folder that exists and can be written",
    "readonly database": "cannot be written to; expected a file that you may write, in a folder that you may write",
    "is full": "cannot be written: the disk is full",
    "disk I/O error": "cannot be written: the disk is full, a limit on the file's size is reached, or the disk fails",
}


def default_path() -> str:
    """The path or URL of the user's database: the environment variable, or a file in the user's data folder."""
    return os.environ.get(PATH_VARIABLE) or str(platformdirs.user_data_path("attention-tuner") / "tuner.db")


def sqlite_path(where: str | PathLike[str]) -> Path | None:
    """The file that `where`, a path or an SQLAlchemy URL, names; None for another kind of database.

    Raises `StoreError` for an empty name, a URL that cannot be read, and an SQLite database in memory.
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


def shown_name(where: str | PathLike[str]) -> str:
    """`where`, a path or an SQLAlchemy URL, as it may be shown: without a password. Raises as `sqlite_path` does."""
    path, text = sqlite_path(where), str(where)
    if path is not None:
        return text if "://" not in text else str(path)
    url = make_url(text)
    # Drivers take it from the query as well.
    hidden = {name: "***" for name in url.query if "password" in name}
    return url.update_query_dict(hidden).render_as_string(hide_password=True)


def make_engine(where: str | PathLike[str], *, read_only: bool, timeout_s: float) -> Engine:
    """The engine for `where`, a path or an SQLAlchemy URL. Nothing is opened yet.

    `timeout_s` is how long SQLite waits for another process's lock. Raises `StoreError` for a URL that cannot be used.
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
    """Turns an SQLAlchemy error into a `StoreError`: one sentence about the database called `name`."""
    try:
        yield
    except SQLAlchemyError as error:
        detail = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        cause = next((text for part, text in _CAUSES.items() if part in detail), f"cannot be used: {detail}")
        raise StoreError(f"database {name!r} {cause}") from error


def _sqlite_url(path: Path, read_only: bool) -> URL:
    if not read_only:
        return URL.create("sqlite", database=str(path))
    # A file in WAL mode has two more beside it while it is open. Only a connection that might write removes them.
    query = {"mode": "rw" if os.access(path, os.W_OK) and os.access(path.parent, os.W_OK) else "ro", "uri": "true"}
    # Where none can be made, the file must be declared to be at rest.
    if not os.access(path.parent, os.W_OK) and not path.with_name(f"{path.name}-wal").exists():
        query["immutable"] = "1"
    return URL.create("sqlite", database=path.as_uri(), query=query)


def _prepare_sqlite(engine: Engine, read_only: bool, timeout_s: float) -> None:
    @event.listens_for(engine, "connect")
    def on_connect(connection: Any, _record: object) -> None:  # pyright: ignore[reportUnusedFunction]
        # The module's own way of beginning transactions is late and leaves out schema changes; ours is in on_begin.
        connection.isolation_level = None
        connection.text_factory = lambda text: text.decode(errors="replace")  # pyright: ignore
        connection.execute("PRAGMA foreign_keys = ON")
        # With a write-ahead log, what is committed outlives its process all the same, and a commit waits for no disk.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA busy_timeout = {round(timeout_s * 1000)}")
        connection.execute(f"PRAGMA query_only = {'ON' if read_only else 'OFF'}")

    @event.listens_for(engine, "begin")
    def on_begin(connection: Connection) -> None:  # pyright: ignore[reportUnusedFunction]
        writes = connection.get_execution_options().get("writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
