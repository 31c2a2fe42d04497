from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from live_reader import HYBRID, ask
from sqlalchemy import delete

from attention_tuner.db import LiveTable, Store, export_json, load_table
from attention_tuner.db.engine import make_engine
from attention_tuner.db.models import BestRow, config_of
from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.outcome import BestConfig, Timing

Make = Callable[..., BestConfig]


@pytest.fixture(autouse=True)
def nothing_ships(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").mkdir()
    for name in ("lookup", "live"):
        module = importlib.import_module(f"attention_tuner.db.lookup.{name}")
        monkeypatch.setattr(module, "SHIPPED", tmp_path / "configs")


def test_refresh_takes_a_newer_snapshot_if_there_is_one(store: Store, make_config: Make):
    config = make_config()
    live = LiveTable(store.name, config.gpu)
    asked = (config.shape.spec, HYBRID, 16, config.gpu)
    assert live.lookup(*asked).source == "heuristic"
    assert live.refresh() is False
    store.put_best(config)
    before = live.table
    assert live.lookup(*asked).source == "heuristic"
    assert live.refresh() is True
    assert live.lookup(*asked).config == config
    assert before.lookup(*asked).source == "heuristic"
    assert live.refresh() is False


def test_a_newer_table_continues_the_counts_and_repeats_no_message(
    store: Store, make_config: Make, caplog: pytest.LogCaptureFixture
):
    config = make_config()
    live = LiveTable(store.name, config.gpu)
    for number in (1, 2, 3):
        assert live.lookup(config.shape.spec, Batch.parse("4x1@99"), 16, config.gpu).source == "heuristic"
        store.put_best(written(config, number))
        assert live.refresh() is True
    found = live.table.coverage()
    assert found.counts["heuristic"] == 3
    assert [miss.count for miss in found.misses] == [3]
    assert len(caplog.messages) == 1


def test_files_and_what_ships_are_followed_too(tmp_path: Path, make_config: Make):
    config, other = make_config(), make_config("64x1@4096")
    export_json([config], tmp_path / "a.json")
    live = LiveTable(str(tmp_path / "none.db"), config.gpu, files=[tmp_path / "a.json"])
    assert live.table.configs == (config,)
    export_json([config, other], tmp_path / "a.json")
    assert live.refresh() is True
    assert set(live.table.configs) == {config, other}
    export_json([make_config("32x1@4096")], tmp_path / "configs" / "NVIDIA_H200.json")
    assert live.refresh() is True
    assert len(live.table) == 3


def test_an_unreadable_database_leaves_the_old_table(store: Store, make_config: Make, monkeypatch: pytest.MonkeyPatch):
    config = make_config()
    store.put_best(config)
    store.close()
    for where in (store.name, None):
        monkeypatch.setenv("ATTENTION_TUNER_DB", store.name)
        live = LiveTable(where)
        content = Path(store.name).read_bytes()
        Path(store.name).write_bytes(b"something else" * 99)
        with pytest.warns(UserWarning, match="those at hand are kept: database .* is no SQLite database") as caught:
            assert live.refresh() is False
        assert len(caught) == 1
        # Warnings are errors here.
        assert live.refresh() is False
        assert live.table.configs == (config,)
        Path(store.name).write_bytes(content)
        assert live.refresh() is True


def written(config: BestConfig, number: int) -> BestConfig:
    regime = config.timing.regime
    return replace(config, variant=config.variant.replace(waves=4 if number % 2 else 8),
                   timing=Timing((float(number),), regime), default_timing=Timing((2.0 * number,), regime))


def test_readers_and_a_writer_do_not_disturb_each_other(store: Store, make_config: Make):
    config = make_config()
    store.put_best(written(config, 1))
    context = multiprocessing.get_context("spawn")
    refreshed, stop, results = context.Semaphore(0), context.Event(), context.Queue()
    readers = [context.Process(target=ask, args=(store.name, config, refreshed, stop, results)) for _ in range(2)]
    for reader in readers:
        reader.start()
    for _ in readers:
        assert refreshed.acquire(timeout=300)
    last = 1
    # Readers refresh between these writes.
    while last < 40 or not refreshed.acquire(timeout=0):
        last += 1
        store.put_best(written(config, last))
    stop.set()
    found = [results.get(timeout=300) for _ in readers]
    for reader in readers:
        reader.join(300)
        assert reader.exitcode == 0
    assert all(lookups > 0 and wrong == [] for lookups, _, wrong in found)
    # A reader never sees an earlier write after a later one.
    assert all(seen == sorted(seen) and seen[-1] <= last for _, seen, _ in found)


def test_a_reader_in_the_middle_of_a_load_does_not_block_a_writer_or_see_half_a_result(
        store: Store, make_config: Make):
    config, other = make_config(), make_config("64x1@4096")
    old, new = ([written(each, number) for each in (config, other)] for number in (1, 2))
    store.put_best(*old)
    engine = make_engine(store.name, read_only=True, timeout_s=0)
    with engine.connect() as connection:
        def load() -> list[BestConfig]:
            configs = store._records(connection, BestRow, config_of, [])  # pyright: ignore[reportPrivateUsage]
            return sorted(configs, key=lambda each: each.batch)

        assert load() == old
        # The reader's transaction is still open, so a writer that had to wait for it would raise at once.
        with Store.open(store.name, timeout_s=0) as writer:
            writer.put_best(*new)
        assert load() == old
        connection.commit()
        assert load() == new
    engine.dispose()


def test_a_transaction_is_seen_as_a_whole_after_its_commit(store: Store, make_config: Make):
    config, other = make_config(), make_config("64x1@4096")
    store.put_best(written(config, 1), written(other, 1))
    live = LiveTable(store.name, config.gpu)
    with store._writing() as session:  # pyright: ignore
        # The first half of what `put_best` does.
        session.execute(delete(BestRow))
        session.add(BestRow.of(written(config, 2)))
        session.flush()
        assert sorted(each.timing.median_ms for each in load_table(store.name, config.gpu).configs) == [1.0, 1.0]
        live.refresh()
        assert sorted(each.timing.median_ms for each in live.table.configs) == [1.0, 1.0]
        session.add(BestRow.of(written(other, 2)))
    assert live.refresh() is True
    assert sorted(each.timing.median_ms for each in live.table.configs) == [2.0, 2.0]


def test_refresh_follows_a_database_among_the_files(store: Store, make_config: Make, tmp_path: Path):
    config = make_config()
    store.put_best(written(config, 1))
    live = LiveTable(str(tmp_path / "none.db"), config.gpu, files=[store.name])
    assert live.refresh() is False
    store.put_best(written(config, 2))
    assert live.refresh() is True
    assert live.table.configs == (written(config, 2),)
    assert live.lookup(config.shape.spec, HYBRID, 16, config.gpu).origin == "file"


def test_a_deleted_database_is_reported_once(store: Store, make_config: Make):
    config = make_config()
    store.put_best(config)
    store.close()
    live = LiveTable(store.name, config.gpu)
    Path(store.name).unlink()
    with pytest.warns(UserWarning, match="is gone: its configs answer no more"):
        assert live.refresh() is True
    assert live.refresh() is False
    assert len(live.table) == 0
    with Store.open(store.name) as again:
        again.put_best(config)
    assert live.refresh() is True
    assert live.table.configs == (config,)


def test_the_next_snapshot_repeats_no_warning(store: Store, make_config: Make):
    config, invalid = make_config(), make_config("64x1@4096")
    store.put_best(config, replace(invalid, variant=invalid.variant.replace(block_m=17)))
    live = LiveTable(store.name, config.gpu)
    with pytest.warns(UserWarning, match="are set aside"):
        live.lookup(config.shape.spec, HYBRID, 16, config.gpu)
    for number in (1, 2, 3):
        store.put_best(written(config, number))
        assert live.refresh() is True
        assert live.lookup(config.shape.spec, HYBRID, 16, config.gpu).config is not None


def test_a_file_that_cannot_be_read_is_named_once(store: Store, make_config: Make, tmp_path: Path):
    (tmp_path / "broken.json").write_text("{")
    with pytest.warns(UserWarning, match="exported configs is set aside"):
        live = LiveTable(store.name, make_config().gpu, files=[tmp_path / "broken.json"])
    store.put_best(make_config())
    assert live.refresh() is True
    (tmp_path / "broken.json").write_text("[")
    with pytest.warns(UserWarning, match="exported configs is set aside"):
        assert live.refresh() is True
