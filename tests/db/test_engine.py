from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Engine, text

from attention_tuner.db import Store
from attention_tuner.db import engine as module
from attention_tuner.db.engine import WRITES, default_path, make_engine, shown_name, sqlite_path, translated
from attention_tuner.db.models import Base
from attention_tuner.kernel_templates.errors import StoreError
from attention_tuner.kernel_templates.outcome import BestConfig


def test_the_default_is_in_the_users_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("ATTENTION_TUNER_DB", raising=False)
    assert Path(default_path()).name == "tuner.db"
    assert "attention-tuner" in default_path()
    monkeypatch.setenv("ATTENTION_TUNER_DB", str(tmp_path / "mine.db"))
    assert default_path() == str(tmp_path / "mine.db")


def test_paths_and_sqlite_urls_name_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sqlite_path("~/a.db") == tmp_path / "a.db"
    assert sqlite_path(tmp_path / "b.db") == tmp_path / "b.db"
    assert sqlite_path(f"sqlite:///{tmp_path}/c.db") == tmp_path / "c.db"
    assert sqlite_path("postgresql+psycopg://user@host/name") is None


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:"])
def test_a_database_in_memory_is_refused(url: str):
    with pytest.raises(StoreError, match="path of a file"):
        sqlite_path(url)


@pytest.mark.parametrize("url", ["nothing://host/name", "oracle+missing://host/name", "postgresql://host:port/name"])
def test_an_unusable_url_is_refused(url: str):
    with pytest.raises(StoreError, match="expected a path"):
        make_engine(url, read_only=False, timeout_s=1)


def test_a_password_is_not_shown():
    with pytest.raises(StoreError) as caught:
        make_engine("oracle+missing://user:secret@host/name", read_only=False, timeout_s=1)
    assert "secret" not in str(caught.value)


def test_a_name_is_shown_as_given_but_without_a_password(tmp_path: Path):
    assert shown_name("~/a.db") == "~/a.db"
    assert shown_name(f"sqlite:///{tmp_path}/a.db") == f"{tmp_path}/a.db"
    assert shown_name("postgresql+psycopg://user:secret@host/name") == "postgresql+psycopg://user:***@host/name"
    assert "secret" not in shown_name("postgresql+psycopg://user@host/name?password=secret&sslmode=require")


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_refused(name: str):
    with pytest.raises(StoreError, match="name of a database is empty"):
        sqlite_path(name)


@pytest.mark.parametrize("name", ["plain.db", "a b?mode=rwc#%41.db"])
def test_read_only_engines_do_not_write(tmp_path: Path, name: str):
    engine = make_engine(tmp_path / name, read_only=False, timeout_s=1)
    with engine.execution_options(**WRITES).begin() as connection:
        connection.execute(text("CREATE TABLE t (x INTEGER)"))
    engine.dispose()
    assert [path.name for path in tmp_path.iterdir()] == [name]
    reader = make_engine(tmp_path / name, read_only=True, timeout_s=1)
    with reader.begin() as connection:
        assert connection.scalar(text("SELECT count(*) FROM t")) == 0
        with pytest.raises(StoreError, match="cannot be written"), translated(name):
            connection.execute(text("INSERT INTO t VALUES (1)"))
    reader.dispose()


def test_sqlite_is_set_up(tmp_path: Path):
    engine = make_engine(tmp_path / "a.db", read_only=False, timeout_s=2.5)
    with engine.begin() as connection:
        assert connection.scalar(text("PRAGMA foreign_keys")) == 1
        assert connection.scalar(text("PRAGMA busy_timeout")) == 2500
    engine.dispose()


def make_one_table_and_fail(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE t (x INTEGER)"))
        connection.execute(text("SELECT * FROM other"))


def test_schema_changes_are_rolled_back(tmp_path: Path):
    engine = make_engine(tmp_path / "a.db", read_only=False, timeout_s=1)
    with pytest.raises(StoreError, match="no such table"), translated("a"):
        make_one_table_and_fail(engine)
    with engine.begin() as connection:
        assert connection.scalar(text("SELECT count(*) FROM sqlite_master")) == 0
    engine.dispose()


NEXT = """
import sqlalchemy as sa
from alembic import op
revision = "0090"
down_revision = "0003"
def upgrade():
    op.add_column("runs", sa.Column("note", sa.Text))
    {more}
"""


@pytest.fixture
def add_migration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Add a migration to a copy of the project's own, in a folder whose name needs escaping."""

    def add(more: str = "") -> None:
        folder = tmp_path / "50%s of migrations"
        shutil.copytree(module.MIGRATIONS, folder, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "versions" / "0090_next.py").write_text(NEXT.format(more=more))
        monkeypatch.setattr(module, "MIGRATIONS", folder)

    return add


def test_migrations_make_the_tables_of_the_models(tmp_path: Path):
    Store.open(tmp_path / "a.db").close()
    engine = make_engine(tmp_path / "a.db", read_only=True, timeout_s=1)
    with engine.begin() as connection:
        context = MigrationContext.configure(connection, opts={
            "version_table": module.VERSION_TABLE, "compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, Base.metadata) == []
    engine.dispose()


def test_two_threads_make_two_databases_at_once(tmp_path: Path):
    def make(number: int) -> None:
        Store.open(tmp_path / f"{number}.db").close()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(make, range(8)))
    assert len(list(tmp_path.glob("*.db"))) == 8


def test_an_older_database_is_migrated_and_keeps_its_rows(tmp_path: Path, add_migration: Callable[[str], None],
                                                          make_config: Callable[..., BestConfig]):
    path = tmp_path / "a.db"
    with Store.open(path) as store:
        store.put_best(make_config())
    add_migration("")
    with pytest.raises(StoreError, match="older version"):
        Store.open(path, create=False)
    with Store.open(path) as store:
        assert store.best_configs() == [make_config()]
    Store.open(path, create=False).close()
    connection = sqlite3.connect(path)
    assert "note" in [row[1] for row in connection.execute("PRAGMA table_info(runs)")]
    connection.close()


def test_a_migration_that_fails_changes_nothing(tmp_path: Path, add_migration: Callable[[str], None]):
    path = tmp_path / "a.db"
    Store.open(path).close()
    before = path.read_bytes()
    add_migration("op.drop_table('no_such_table')")
    with pytest.raises(StoreError, match="no_such_table"):
        Store.open(path)
    assert path.read_bytes() == before


def test_a_newer_database_is_refused_unchanged(tmp_path: Path):
    path = tmp_path / "a.db"
    Store.open(path).close()
    connection = sqlite3.connect(path)
    connection.execute(f"UPDATE {module.VERSION_TABLE} SET version_num = '0099'")
    connection.commit()
    connection.execute("PRAGMA journal_mode = DELETE").fetchall()
    connection.close()
    before = path.read_bytes()
    for create in (True, False):
        with pytest.raises(StoreError, match=r"'0099'.*newer.*at most '0003'"):
            Store.open(path, create=create)
    assert path.read_bytes() == before


def test_a_foreign_database_is_refused_unchanged(tmp_path: Path):
    path = tmp_path / "a.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE alembic_version (version_num TEXT)")
    connection.execute("CREATE TABLE people (name TEXT)")
    connection.close()
    before = path.read_bytes()
    for create in (True, False):
        with pytest.raises(StoreError, match="another program"):
            Store.open(path, create=create)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.db"]
