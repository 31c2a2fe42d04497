from __future__ import annotations

import sqlite3
from collections.abc import Callable

import pytest

from attention_tuner.db import ConfigTable, Store
from attention_tuner.db.full_checks import StoredChecks
from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.outcome import BestConfig

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
    rows = snapshot.rows(StoredChecks())
    assert set(rows.configs([])) == set(configs)
    assert snapshot.name == store.name
    assert ConfigTable([rows]).id == ConfigTable.of(configs).id


def test_a_text_that_is_none_does_not_spoil_the_others(store: Store, make_config: Make):
    store.put_best(make_config(), make_config("64x1@4096"))
    poison(store, "UPDATE best_configs SET variant = CAST(x'ff' AS TEXT) WHERE batch = '64x1@4096'")
    table = ConfigTable([store.snapshot().rows(StoredChecks())])
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
    table = ConfigTable([store.snapshot().rows(StoredChecks())])
    with pytest.MonkeyPatch.context() as patch:
        warned: list[str] = []
        patch.setattr("warnings.warn", lambda message, **_: warned.append(message))
        answers = [
            table.lookup(good.shape.spec, Batch.parse(batch), 16, good.gpu) for batch in (good.batch, bad.batch) * 2
        ]
    assert answers[0].config == good
    assert len(warned) <= 1
    assert all("row 2" in message for message in warned)
