from __future__ import annotations

import importlib
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from attention_tuner.db import (
    Chain,
    Exported,
    LiveTable,
    Store,
    default_table,
    export_json,
    load_table,
    lookup,
    shipped_configs,
    write_configs,
)
from attention_tuner.db.losses import Loss
from attention_tuner.kernel_templates.batch import Batch, BatchBucket
from attention_tuner.kernel_templates.errors import InputError, StoreError
from attention_tuner.kernel_templates.outcome import BestConfig, CaseResult, FullCheck
from attention_tuner.kernel_templates.sources import environment

# By its full name: the folder's attribute `lookup` is the function.
module = importlib.import_module("attention_tuner.db.lookup.lookup")

Make = Callable[..., BestConfig]
BATCH = Batch.parse("1x512@16384,63x1@32768")
NEAR = Batch.parse("1x1024@16384,63x1@32768")


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the user's database, which does not exist; nothing ships either."""
    monkeypatch.setenv("ATTENTION_TUNER_DB", str(tmp_path / "user.db"))
    (tmp_path / "configs").mkdir()
    monkeypatch.setattr(module, "SHIPPED", tmp_path / "configs")
    module._table.cache_clear()
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


def test_lookups_of_the_default_table_are_counted(database: Path, make_config: Make):
    config = make_config()
    for _ in range(3):
        lookup(config.shape.spec, BATCH, 16, config.gpu)
    assert default_table(config.gpu).coverage().counts["heuristic"] == 3
    assert default_table(config.gpu).id == load_table(gpu=config.gpu).id
    assert default_table(replace(config.gpu, name="NVIDIA H100")).coverage().misses == ()


def test_a_config_measured_with_the_present_software_is_fresh(database: Path, make_config: Make):
    config = make_config()
    fresh = replace(config, environment=environment("fused", config.gpu))
    with Store.open(database) as store:
        store.put_best(fresh)
    assert not lookup(config.shape.spec, BATCH, 16, config.gpu).stale


def test_configs_that_ship_answer_where_the_database_has_nothing_better(database: Path, make_config: Make):
    own, shipped = make_config(), make_config("64x1@4096")
    export_json([replace(own, measured_at="2026-12-01T00:00:00+00:00"), shipped], module.SHIPPED / "NVIDIA_H200.json")
    with Store.open(database) as store:
        store.put_best(own)
    assert len(load_table()) == 3
    answer = lookup(own.shape.spec, Batch.parse("64x1@4096"), 16, own.gpu)
    assert (answer.source, answer.origin, answer.config) == ("exact", "shipped", shipped)
    answer = lookup(own.shape.spec, BATCH, 16, own.gpu)
    assert (answer.source, answer.origin, answer.config) == ("exact", "database", own)


def test_configs_that_ship_answer_without_a_database_and_make_none(database: Path, make_config: Make):
    shipped = make_config()
    export_json([shipped], module.SHIPPED / "NVIDIA_H200.json")
    answer = lookup(shipped.shape.spec, BATCH, 16, shipped.gpu)
    assert (answer.source, answer.origin, answer.config) == ("exact", "shipped", shipped)
    assert [path.name for path in database.parent.iterdir()] == ["configs"]


def test_only_the_file_of_the_asked_gpu_is_read(database: Path, make_config: Make):
    h200 = make_config()
    odd = make_config(gpu=replace(h200.gpu, name="NVIDIA L40S/B  12"))
    export_json([h200], module.SHIPPED / "NVIDIA_H200.json")
    export_json([odd], module.SHIPPED / "NVIDIA_L40S_B_12.json")
    (module.SHIPPED / "NVIDIA_H100.json").write_text("{}")
    for config in (h200, odd):
        assert shipped_configs(config.gpu) == list(load_table(gpu=config.gpu).configs) == [config]
        assert lookup(config.shape.spec, BATCH, 16, config.gpu).config == config
    for name in ("NVIDIA H20", "nvidia h200", "../NVIDIA H200", "NVIDIA H200\0", "H" * 5000):
        assert lookup(h200.shape.spec, BATCH, 16, replace(h200.gpu, name=name)).source == "heuristic"
    with pytest.warns(UserWarning, match="NVIDIA_H100"):
        assert set(shipped_configs()) == {h200, odd}


def test_configs_of_another_gpu_in_a_shipped_file_are_left_out(database: Path, make_config: Make):
    config, other = make_config(), make_config(gpu=replace(make_config().gpu, name="NVIDIA H100"))
    export_json([config, other], module.SHIPPED / "NVIDIA_H200.json")
    assert shipped_configs() == shipped_configs(config.gpu) == [config]
    assert lookup(config.shape.spec, BATCH, 16, other.gpu).source == "heuristic"


@pytest.mark.parametrize("text", ["", "{}", '{"schema_version": 1, "groups": [{}]}', '{"schema_version": 2}'])
def test_a_shipped_file_that_cannot_be_read_is_set_aside_with_one_warning(database: Path, make_config: Make, text: str):
    config = make_config()
    with Store.open(database) as store:
        store.put_best(config)
    (module.SHIPPED / "NVIDIA_H200.json").write_text(text)
    with pytest.warns(UserWarning, match=r"shipped configs is set aside: .*NVIDIA_H200\.json") as caught:
        answers = [lookup(config.shape.spec, batch, 16, config.gpu) for batch in (BATCH, NEAR)]
    assert [answer.source for answer in answers] == ["exact", "neighbour"]
    assert len(caught) == 1


def test_a_database_that_cannot_be_read_is_set_aside_with_one_warning(database: Path, make_config: Make):
    database.write_text("some other file, long enough to be read as a header of a database" * 10)
    shipped = make_config()
    export_json([shipped], module.SHIPPED / "NVIDIA_H200.json")
    with pytest.warns(UserWarning, match=r"database is set aside: .*user\.db' is no SQLite database") as caught:
        answers = [lookup(shipped.shape.spec, batch, 16, shipped.gpu) for batch in (BATCH, NEAR)]
    assert [(answer.source, answer.origin) for answer in answers] == [("exact", "shipped"), ("neighbour", "shipped")]
    assert len(caught) == 1
    with pytest.raises(StoreError, match="no SQLite database"):
        load_table(str(database))


@pytest.mark.parametrize(("name", "message"), [
    ("sqlite://", "in memory"), ("nonsense://", "no driver|cannot be read"), ("~nobody-of-this-name/tuner.db", "home"),
    ("h" * 5000, "too long"),
])
def test_an_impossible_database_name_is_set_aside(database: Path, make_config: Make, monkeypatch: pytest.MonkeyPatch,
                                                name: str, message: str):
    monkeypatch.setenv("ATTENTION_TUNER_DB", name)
    config = make_config()
    with pytest.warns(UserWarning, match=f"database is set aside: .*({message})"):
        assert lookup(config.shape.spec, BATCH, 16, config.gpu).source == "heuristic"


def test_the_database_comes_before_files_in_their_order_and_what_ships_last(
    database: Path, tmp_path: Path, make_config: Make
):
    own, first, second, shipped = (
        replace(make_config(), measured_at=f"2026-11-0{day}T00:00:00+00:00") for day in range(1, 5))
    with Store.open(database) as store:
        store.put_best(own)
    write_configs(Exported([first]), tmp_path / "first", "folder")
    write_configs(Exported([second]), tmp_path / "second.json")
    export_json([shipped], module.SHIPPED / "NVIDIA_H200.json")
    asked = (own.shape.spec, BATCH, 16, own.gpu)
    files = [tmp_path / "first", tmp_path / "second.json"]
    answers = [load_table(files=files).lookup(*asked)]
    database.unlink()
    answers += [load_table(files=files).lookup(*asked), load_table(files=files[::-1]).lookup(*asked),
                load_table().lookup(*asked)]
    assert [(answer.config, answer.origin) for answer in answers] == [
        (own, "database"), (first, "file"), (second, "file"), (shipped, "shipped")]


@pytest.mark.parametrize("form", ["json", "folder"])
def test_a_file_that_is_cut_short_is_set_aside_with_one_warning(
    database: Path, tmp_path: Path, make_config: Make, form: str
):
    config = make_config()
    write_configs(Exported([config, make_config("64x1@4096")]), tmp_path / "out", form)
    cut = next((tmp_path / "out").iterdir()) if form == "folder" else tmp_path / "out"
    cut.write_text(cut.read_text()[:-40])
    with pytest.warns(UserWarning, match="a file of exported configs is set aside") as caught:
        table = load_table(files=[tmp_path / "out"])
    assert len(caught) == 1
    assert table.lookup(config.shape.spec, BATCH, 16, config.gpu).source == "heuristic"


@pytest.mark.parametrize("form", ["json", "folder"])
def test_a_file_about_another_gpu_does_not_answer(database: Path, tmp_path: Path, make_config: Make, form: str):
    config = make_config()
    write_configs(Exported([config]), tmp_path / "out", form)
    h20 = replace(config.gpu, name="NVIDIA H20")
    asked = (config.shape.spec, BATCH, 16, h20)
    assert load_table(files=[tmp_path / "out"]).lookup(*asked).source == "heuristic"
    warned: set[str] = set()
    with pytest.warns(UserWarning, match="of NVIDIA H200 only, which do not answer for NVIDIA H20"):
        load_table(gpu=h20, files=[tmp_path / "out"], warned=warned)
    # Loads that share the set do not warn again; warnings are errors here.
    assert load_table(gpu=h20, files=[tmp_path / "out"], warned=warned).lookup(*asked).source == "heuristic"
    lent = load_table(files=[tmp_path / "out"], chain=Chain(like=("NVIDIA H200",))).lookup(*asked)
    assert (lent.source, lent.lender) == ("neighbour", "NVIDIA H200")
    assert lent.variant == config.variant


def test_only_the_unreadable_config_of_a_shipped_file_is_set_aside(database: Path, make_config: Make):
    config = make_config()
    export_json([config, make_config("64x1@4096")], module.SHIPPED / "NVIDIA_H200.json")
    text = (module.SHIPPED / "NVIDIA_H200.json").read_text()
    (module.SHIPPED / "NVIDIA_H200.json").write_text(text.replace('"batch": "64x1@4096"', '"batch": "64x1"'))
    with pytest.warns(UserWarning, match=r"'groups\[0\].configs\[1\]' in .*NVIDIA_H200.json' cannot be read") as caught:
        table = load_table(gpu=config.gpu)
    assert len(caught) == 1
    assert table.lookup(config.shape.spec, BATCH, 16, config.gpu).config == config


def test_databases_answer_in_the_order_of_the_files(database: Path, tmp_path: Path, make_config: Make):
    config = make_config()
    paths = [tmp_path / f"{number}.db" for number in (1, 2)]
    export_json([config], tmp_path / "three.json", [Loss("NVIDIA H200", "bucket", 0.0, 9, 0.04)])
    for number, path in enumerate(paths, 1):
        with Store.open(path) as store:
            store.put_best(replace(config, measured_at=f"2026-11-0{number}T00:00:00+00:00"))
            store.put_losses("NVIDIA H200", [Loss("NVIDIA H200", "bucket", 0.0, 9, number / 100)])
    bucket = BatchBucket.of(BATCH)
    for files in ([*paths, tmp_path / "three.json"], [tmp_path / "three.json", *paths], paths[::-1]):
        answer = load_table(files=files).lookup(config.shape.spec, bucket, 16, config.gpu)
        assert answer.origin == "file"
        assert answer.config is not None
        assert (answer.config.measured_at[8:10], answer.loss) == {
            paths[0]: ("01", 0.01), paths[1]: ("02", 0.02), tmp_path / "three.json": ("29", 0.04)}[files[0]]
    # A check in the first database makes its config fail, so the second one's answers.
    failed = (CaseResult("edges", "failed", 2.0, "row 3"),)
    with Store.open(paths[0]) as store:
        store.put_full_check(FullCheck(config.shape.spec, config.variant, config.gpu.name, config.environment, failed,
                                       "2026-11-30T00:00:00+00:00"))
    with pytest.warns(UserWarning, match="failed the full check"):
        answer = load_table(files=paths).lookup(config.shape.spec, bucket, 16, config.gpu)
    assert answer.config is not None
    assert answer.config.measured_at[8:10] == "02"


def poison(database: Path, statement: str) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute(statement)


def test_unreadable_rows_are_named_in_one_warning_and_the_others_answer(database: Path, make_config: Make):
    config = make_config()
    with Store.open(database) as store:
        store.put_best(config, make_config("64x1@4096"), make_config("32x1@4096"))
    poison(database, "UPDATE best_configs SET variant = CAST(x'ff' AS TEXT) WHERE batch = '64x1@4096'")
    poison(database, "UPDATE best_configs SET gpu_num_sms = 'many' WHERE batch = '32x1@4096'")
    with pytest.warns(UserWarning, match="row 2 of table best_configs.*; row 3 .*'many'; expected a whole") as caught:
        table = load_table()
    assert len(caught) == 1
    assert table.configs == (config,)
    assert table.lookup(config.shape.spec, BATCH, 16, config.gpu).config == config


def test_loads_that_share_a_set_name_an_unreadable_row_once(database: Path, make_config: Make):
    with Store.open(database) as store:
        store.put_best(make_config())
    poison(database, "UPDATE best_configs SET spec = 'nothing'")
    warned: set[str] = set()
    with pytest.warns(UserWarning, match="row 1 of table best_configs"):
        load_table(warned=warned)
    # Warnings are errors here.
    assert load_table(warned=warned).configs == ()


@pytest.mark.parametrize("value", ["'poison'", "x'00ff'", "''", "-1", "'[]'"])
def test_poisoned_rows_never_end_a_load_or_a_lookup(database: Path, make_config: Make, value: str):
    columns = ("spec", "bucket", "batch", "variant", "samples_ms", "default_samples_ms", "regime", "default_regime",
               "verdict", "plan_ms", "gpu_l2_bytes", "gpu_driver", "measured_at")
    good = make_config()
    bad = {column: f"64x1@{4096 + 2 * number}" for number, column in enumerate(columns)}
    with Store.open(database) as store:
        store.put_best(good, *map(make_config, bad.values()))
        for column, batch in bad.items():
            poison(database, f"UPDATE best_configs SET {column} = {value} WHERE batch = '{batch}'")
        contents = store.contents()
    assert good in contents.configs
    assert len(contents.configs) + len(contents.unusable) == 1 + len(columns)
    with pytest.warns(UserWarning, match="row 2 of table best_configs") as caught:
        table = load_table()
    assert len(caught) == 1
    for batch in (good.batch, *bad.values()):
        assert table.lookup(good.shape.spec, Batch.parse(batch), 16, good.gpu).variant is not None


def test_the_id_depends_on_what_is_served_and_not_on_the_order_of_rows(
    database: Path, tmp_path: Path, make_config: Make
):
    one, two = make_config(), make_config("64x1@4096", full_check=False)
    with Store.open(database) as store, Store.open(tmp_path / "other.db") as other:
        store.put_best(one, two)
        other.put_best(two)
        other.put_best(one)
        assert load_table(other.name).id == (before := load_table().id)
        passed = (CaseResult("decode", "passed"),)
        store.put_full_check(FullCheck(two.shape.spec, two.variant, two.gpu.name, two.environment, passed, "2026"))
    assert load_table().id != before


def test_shipped_losses_are_expected(database: Path, make_config: Make):
    config = make_config()
    export_json([config], module.SHIPPED / "NVIDIA_H200.json", [Loss("NVIDIA H200", "neighbour", 1.0, 9, 0.02)])
    answer = lookup(config.shape.spec, NEAR, 16, config.gpu)
    assert (answer.source, answer.loss) == ("neighbour", 0.02)


def test_shipped_configs_are_lent_if_the_chain_names_their_gpu(database: Path, make_config: Make):
    config = make_config()
    export_json([config], module.SHIPPED / "NVIDIA_H200.json")
    h100 = replace(config.gpu, name="NVIDIA H100")
    lenders = Chain(like=("NVIDIA H200",))
    for table in (load_table(gpu=h100, chain=lenders), LiveTable(gpu=h100, chain=lenders)):
        answer = table.lookup(config.shape.spec, BATCH, 16, h100)
        assert (answer.source, answer.lender, answer.config) == ("neighbour", "NVIDIA H200", config)
    assert load_table(gpu=h100).configs == ()


def test_a_gpu_or_files_of_another_type_are_refused(database: Path, make_config: Make):
    spec = make_config().shape.spec
    for gpu in ("NVIDIA H200", {}):
        for call in (lambda gpu=gpu: lookup(spec, BATCH, 16, gpu), lambda gpu=gpu: load_table(gpu=gpu)):
            with pytest.raises(InputError, match="expected a Gpu"):
                call()
    for files in ("a.json", Path("a.json"), [3], 3):
        for load in (load_table, LiveTable):
            with pytest.raises(InputError, match="expected a list of paths"):
                load(files=files)
