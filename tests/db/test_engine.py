from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from attention_tuner.db.engine import WRITES, default_path, make_engine, shown_name, sqlite_path, translated
from attention_tuner.kernel_templates.errors import StoreError


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
def test_a_url_that_cannot_be_used_is_refused(url: str):
    with pytest.raises(StoreError, match="expected a path"):
        make_engine(url, read_only=False, timeout_s=1)


def test_a_password_is_not_shown():
    with pytest.raises(StoreError) as caught:
        make_engine("oracle+missing://user:secret@host/name", read_only=False, timeout_s=1)
    assert "secret" not in str(caught.value)


def test_a_name_is_shown_as_it_was_given_but_without_a_password(tmp_path: Path):
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
