from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from attention_tuner.db import Store, migrate
from attention_tuner.db.engine import make_engine
from attention_tuner.db.models import Base
from attention_tuner.kernel_templates.errors import StoreError
from attention_tuner.kernel_templates.outcome import BestConfig

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
    """Adds a migration to a copy of the project's own, whose folder has a name that needs escaping."""

    def add(more: str = "") -> None:
        folder = tmp_path / "50%s of migrations"
        shutil.copytree(migrate.MIGRATIONS, folder, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "versions" / "0090_next.py").write_text(NEXT.format(more=more))
        monkeypatch.setattr(migrate, "MIGRATIONS", folder)

    return add


def test_migrations_make_what_the_models_say(tmp_path: Path):
    Store.open(tmp_path / "a.db").close()
    engine = make_engine(tmp_path / "a.db", read_only=True, timeout_s=1)
    with engine.begin() as connection:
        context = MigrationContext.configure(connection, opts={
            "version_table": migrate.VERSION_TABLE, "compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, Base.metadata) == []
    engine.dispose()


def test_the_files_of_migrations_begin_with_their_revisions_in_order():
    walked = ScriptDirectory(str(migrate.MIGRATIONS)).walk_revisions()
    assert migrate.revisions(migrate.MIGRATIONS) == tuple(entry.revision for entry in walked)[::-1]


def test_two_threads_make_two_databases_at_once(tmp_path: Path):
    def make(number: int) -> None:
        Store.open(tmp_path / f"{number}.db").close()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(make, range(24)))
    assert len(list(tmp_path.glob("*.db"))) == 24


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
    connection.execute(f"UPDATE {migrate.VERSION_TABLE} SET version_num = '0099'")
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
