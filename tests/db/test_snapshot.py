from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from attention_tuner.db import ConfigTable, Store, load_table
from attention_tuner.db.checks import StoredChecks
from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.outcome import BestConfig, CaseResult, FullCheck

Make = Callable[..., BestConfig]


def poison(store: Store, statement: str) -> None:
    connection = sqlite3.connect(store.name)
    connection.execute(statement)
    connection.commit()
    connection.close()


def test_a_snapshot_holds_what_was_there(store: Store, make_config: Make):
    configs = [make_config(), make_config("64x1@4096")]
    store.put_best(*configs)
    snapshot = store.snapshot()
    store.put_best(make_config("32x1@4096"))
    rows = snapshot.rows(StoredChecks().judge)
    assert set(rows.configs([])) == set(configs)
    assert snapshot.name == store.name
    again = replace(snapshot, best=snapshot.best[::-1])
    assert ConfigTable([rows]).id == ConfigTable([again.rows(StoredChecks().judge)]).id
    assert ConfigTable([rows]).id != ConfigTable([store.snapshot().rows(StoredChecks().judge)]).id


def test_the_numbers_of_rows_are_no_content(store: Store, make_config: Make, tmp_path: Path):
    one, two = make_config(), make_config("64x1@4096")
    store.put_best(one, two)
    with Store.open(tmp_path / "other.db") as other:
        other.put_best(two)
        other.put_best(one)
        ids = {ConfigTable([each.snapshot().rows(StoredChecks().judge)]).id for each in (store, other)}
    assert len(ids) == 1


def test_a_full_check_changes_the_content(store: Store, make_config: Make):
    config = make_config()
    store.put_best(config)
    before = load_table(store.name).id
    cases = (CaseResult("decode", "failed", None, "wrong"),)
    store.put_full_check(FullCheck(config.shape.spec, config.variant, config.gpu.name, config.environment, cases,
                                   "2026-12-01T00:00:00+00:00"))
    assert load_table(store.name).id != before


@pytest.mark.parametrize(("column", "value"), [("gpu_num_sms", "poison"), ("page_size", "x16")])
def test_a_number_that_is_none_is_named(store: Store, make_config: Make, column: str, value: str):
    store.put_best(make_config())
    poison(store, f"UPDATE best_configs SET {column} = '{value}'")
    table = ConfigTable([store.snapshot().rows(StoredChecks().judge)])
    message = f"row 1 of table best_configs in database .* cannot be read: {column} '{value}' is no whole number"
    with pytest.warns(UserWarning, match=message):
        assert table.configs == ()


def test_a_text_that_is_none_does_not_spoil_the_others(store: Store, make_config: Make):
    store.put_best(make_config(), make_config("64x1@4096"))
    poison(store, "UPDATE best_configs SET variant = CAST(x'ff' AS TEXT) WHERE batch = '64x1@4096'")
    table = ConfigTable([store.snapshot().rows(StoredChecks().judge)])
    with pytest.warns(UserWarning, match="row 2 of table best_configs in database"):
        assert table.configs == (make_config(),)
    # What the connection is used for next reads texts as it did before.
    with pytest.warns(UserWarning, match="row 2 of table best_configs in database"):
        assert store.best_configs() == [make_config()]


@pytest.mark.parametrize("column", ["spec", "bucket", "batch", "variant", "samples_ms", "default_samples_ms", "regime",
                                    "default_regime", "verdict", "plan_ms", "gpu_l2_bytes", "gpu_driver"])
@pytest.mark.parametrize("value", ["'poison'", "x'00ff'", "''", "-1", "'[]'"])
def test_a_poisoned_row_never_ends_a_lookup(store: Store, make_config: Make, column: str, value: str):
    good, bad = make_config(), make_config("64x1@4096")
    store.put_best(good, bad)
    poison(store, f"UPDATE best_configs SET {column} = {value} WHERE batch = '64x1@4096'")
    table = ConfigTable([store.snapshot().rows(StoredChecks().judge)])
    with pytest.MonkeyPatch.context() as patch:
        warned: list[str] = []
        patch.setattr("warnings.warn", lambda message, **_: warned.append(message))
        answers = [
            table.lookup(good.shape.spec, Batch.parse(batch), 16, good.gpu) for batch in (good.batch, bad.batch) * 2
        ]
    assert answers[0].config == good
    assert len(warned) <= 1
    assert all("row 2" in message for message in warned)
