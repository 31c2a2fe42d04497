from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from attention_tuner.db.models import BestRow
from attention_tuner.db.rows import COLUMNS, Slot, label_of, made, stored
from attention_tuner.kernel_templates.outcome import BestConfig

Make = Callable[..., BestConfig]


def values(config: BestConfig, number: int = 1, **changes: object) -> tuple[object, ...]:
    row = BestRow.of(config)
    return number, *(changes.get(name, getattr(row, name)) for name in COLUMNS)


def slot(config: BestConfig) -> Slot:
    return Slot.of(config.shape.spec, config.variant.page_size, config.gpu)


def test_the_columns_are_those_of_the_table():
    assert {"id", "template", *COLUMNS} == set(BestRow.__table__.columns.keys())
    assert len(COLUMNS) == len(set(COLUMNS))


def test_made_and_stored_rows_hold_the_same(make_config: Make):
    configs = [make_config(), make_config("64x1@4096"), make_config(gpu=replace(make_config().gpu, name="NVIDIA H100"))]
    for rows in (made(configs, "file"), stored([values(c, n) for n, c in enumerate(configs)], "a table", "file")):
        bad: list[str] = []
        assert len(rows) == 3
        assert set(rows.slots) == set(map(slot, configs))
        found = list(rows.read(slot(configs[0]), bad))
        assert [(row.bucket, row.variant, row.config()) for row in found] == [
            (config.shape.bucket, config.variant, config) for config in configs[:2]]
        assert list(rows.configs(bad)) == configs
        assert bad == []


def test_a_judge_decides_what_is_served(make_config: Make):
    config, other = make_config(full_check=False), make_config("64x1@4096")

    def judge(each: BestConfig) -> BestConfig | None:
        return replace(each, full_check=True) if each == config else None

    as_stored = [values(config), values(other)]
    for rows in (made([config, other], "file", judge), stored(as_stored, "a table", "file", judge)):
        assert list(rows.configs([])) == [replace(config, full_check=True)]


@pytest.mark.parametrize(("column", "value", "reason"), [
    ("spec", "nothing", "does not name an attention layer"),
    ("bucket", "7", "does not name a bucket"),
    ("variant", None, ""),
    ("samples_ms", "[0", ""),
    ("verdict", b"\xff", ""),
])
def test_what_cannot_be_read_is_named_and_the_rest_is_read(make_config: Make, column: str, value: object, reason: str):
    good, bad_one = values(make_config(), 1), values(make_config(), 2, **{column: value})
    rows = stored([good, bad_one], "table best_configs", "database")
    bad: list[str] = []
    assert list(rows.configs(bad)) == [make_config()]
    (text,) = bad
    assert text.startswith("row 2 of table best_configs cannot be read: ")
    assert reason in text
    assert len(rows) == 2


def test_a_config_is_labelled_by_what_it_is(make_config: Make):
    config = make_config()
    (row,) = made([config], "file").read(slot(config), [])
    assert row.label() == label_of(config)
    assert config.variant.key() in row.label()
    assert "NVIDIA H200" in row.label()
