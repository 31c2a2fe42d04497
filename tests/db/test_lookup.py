from __future__ import annotations

import importlib
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from attention_tuner.db import Store, export_json, load_table, lookup, shipped_configs
from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.errors import StoreError
from attention_tuner.kernel_templates.outcome import BestConfig
from attention_tuner.kernel_templates.sources import environment

# By its full name: the folder's attribute `lookup` is the function.
module = importlib.import_module("attention_tuner.db.lookup")

Make = Callable[..., BestConfig]
BATCH = Batch.parse("1x512@16384,63x1@32768")


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user's database would be; nothing is there, and nothing ships."""
    monkeypatch.setenv("ATTENTION_TUNER_DB", str(tmp_path / "user.db"))
    (tmp_path / "configs").mkdir()
    monkeypatch.setattr(module, "SHIPPED", tmp_path / "configs")
    return tmp_path / "user.db"


def test_without_a_database_the_heuristic_answers(database: Path, make_config: Make):
    config = make_config()
    assert lookup(config.shape.spec, BATCH, 16, config.gpu).source == "heuristic"
    assert not database.exists()
    assert len(load_table()) == 0


def test_the_users_database_answers_and_is_read_once(database: Path, make_config: Make):
    config = make_config()
    with Store.open(database) as store:
        store.put_best(config)
    asked = (config.shape.spec, BATCH, 16, config.gpu)
    answer = lookup(*asked)
    assert (answer.source, answer.config, answer.stale) == ("exact", config, True)
    with Store.open(database) as store:
        store.put_best(replace(config, variant=config.variant.replace(waves=4)))
    assert lookup(*asked).variant == config.variant
    assert load_table().lookup(*asked).variant == config.variant.replace(waves=4)


def test_a_config_measured_with_what_is_here_is_fresh(database: Path, make_config: Make):
    config = make_config()
    fresh = replace(config, environment=environment("fused", config.gpu))
    with Store.open(database) as store:
        store.put_best(fresh)
    assert not lookup(config.shape.spec, BATCH, 16, config.gpu).stale


def test_configs_that_ship_are_merged(database: Path, make_config: Make):
    own, shipped = make_config(), make_config("64x1@4096")
    export_json([shipped], module.SHIPPED / "h200.json")
    with Store.open(database) as store:
        store.put_best(own)
    assert shipped_configs() == [shipped]
    assert load_table().configs == (own, shipped)
    assert lookup(own.shape.spec, Batch.parse("64x1@4096"), 16, own.gpu).config == shipped


def test_another_database_can_be_named(database: Path, tmp_path: Path, make_config: Make):
    with Store.open(tmp_path / "other.db") as store:
        store.put_best(make_config())
    assert len(load_table(str(tmp_path / "other.db"))) == 1
    assert len(load_table()) == 0


def test_a_poisoned_row_does_not_raise(database: Path, make_config: Make):
    config = make_config()
    with Store.open(database) as store:
        store.put_best(config)
    connection = sqlite3.connect(database)
    connection.execute("UPDATE best_configs SET variant = 'fused:page_size=16,block_m=sixteen,'")
    connection.commit()
    connection.close()
    with pytest.warns(UserWarning, match="row 1 of table best_configs"):
        answer = lookup(config.shape.spec, BATCH, 16, config.gpu)
    assert answer.source == "heuristic"


def test_a_foreign_database_is_an_error(database: Path, make_config: Make):
    database.write_text("some other file, long enough to be read as a header of a database" * 10)
    config = make_config()
    with pytest.raises(StoreError, match="no SQLite database"):
        lookup(config.shape.spec, BATCH, 16, config.gpu)


def test_what_ships_can_be_read():
    assert all(config.full_check for config in shipped_configs())
