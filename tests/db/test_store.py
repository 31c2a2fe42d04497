from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from attention_tuner.db import Setting, Store, TrialRecord
from attention_tuner.db.engine import MIGRATIONS
from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.errors import StoreError
from attention_tuner.kernel_templates.gpu import Gpu
from attention_tuner.kernel_templates.outcome import (
    BestConfig,
    CaseResult,
    Check,
    Environment,
    Failed,
    FullCheck,
    Regime,
    Skipped,
    Timed,
    Wrong,
)

NOW = Environment("0123456789abcdef", "3.9.0", "2.13.0", "580.1")


def now(template: str, gpu: Gpu) -> Environment:
    return NOW


def execute(path: Path, statement: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute(statement)
    connection.commit()
    connection.close()


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@contextmanager
def unprivileged() -> Iterator[None]:
    """Run as an ordinary user, since root ignores permissions."""
    if os.getuid():
        yield
        return
    os.setresuid(65534, 65534, 0)
    try:
        if not os.access(MIGRATIONS, os.R_OK):
            pytest.skip("the package is installed where only root can read it")
        yield
    finally:
        os.setresuid(0, 0, 0)


# Opening


def test_folders_are_made_and_the_file_is_in_wal_mode(tmp_path: Path):
    path = tmp_path / "new" / "folder" / "a.db"
    with Store.open(path) as store:
        assert store.name == str(path)
        assert store.best_configs() == []
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


def test_opening_for_reading_creates_nothing(tmp_path: Path):
    with pytest.raises(StoreError, match="there is no database"):
        Store.open(tmp_path / "folder" / "a.db", create=False)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "empty.db").touch()
    with pytest.raises(StoreError, match="is empty"):
        Store.open(tmp_path / "empty.db", create=False)
    assert (tmp_path / "empty.db").read_bytes() == b""


def test_a_store_open_for_reading_refuses_to_write(tmp_path: Path, make_config: Callable[..., BestConfig]):
    Store.open(tmp_path / "a.db").close()
    with Store.open(tmp_path / "a.db", create=False) as store, pytest.raises(StoreError, match="cannot be written"):
        store.put_best(make_config())


@pytest.mark.parametrize("create", [True, False])
def test_a_file_of_another_kind_is_refused_unchanged(tmp_path: Path, create: bool):
    path = tmp_path / "notes.txt"
    path.write_text("not a database\n" * 100)
    with pytest.raises(StoreError, match="no SQLite database"):
        Store.open(path, create=create)
    assert path.read_text() == "not a database\n" * 100


def test_a_path_under_a_file_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"folder of database .* cannot be made"):
        Store.open(tmp_path / "file" / "a.db")


def test_a_read_only_file_can_be_read_but_not_opened_for_writing(make_config: Callable[..., BestConfig]):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.db"
        with Store.open(path) as store:
            store.put_best(make_config())
        path.chmod(0o444)
        os.chmod(folder, 0o555)
        with unprivileged():
            with pytest.raises(StoreError, match="cannot be"):
                Store.open(path)
            with Store.open(path, create=False) as store:
                assert store.best_configs() == [make_config()]
        os.chmod(folder, 0o755)
        assert os.listdir(folder) == ["a.db"]


@pytest.mark.parametrize("mode", ["WAL", "DELETE"])
def test_reading_leaves_nothing_beside_the_file(tmp_path: Path, make_config: Callable[..., BestConfig], mode: str):
    path = tmp_path / "a.db"
    with Store.open(path) as store:
        store.put_best(make_config())
    execute(path, f"PRAGMA journal_mode = {mode}")
    before = path.read_bytes()
    with Store.open(path, create=False) as store:
        assert store.best_configs() == [make_config()]
    assert os.listdir(tmp_path) == ["a.db"]
    assert path.read_bytes() == before


# Trials


def test_another_process_sees_a_trial_at_once(store: Store, make_trial: Callable[..., TrialRecord], setting: Setting):
    assert store.start_run({"seed": 0}) == 1
    assert store.start_run({"seed": 1}) == 2
    store.add_trial(make_trial(run_id=2))
    with Store.open(store.name, create=False) as reader:
        assert reader.known_trials(setting, now).reusable == [make_trial(run_id=2)]
        assert reader.trial_counts() == {"timed": 1}


def test_a_trial_needs_its_run(store: Store, make_trial: Callable[..., TrialRecord]):
    with pytest.raises(StoreError, match="FOREIGN KEY"):
        store.add_trial(make_trial(run_id=7))
    assert store.trial_counts() == {}


def test_the_latest_trial_of_each_variant_is_reused(store: Store, make_trial: Callable[..., TrialRecord],
                                                    setting: Setting):
    run = store.start_run({})
    first = make_trial()
    variant = first.outcome.variant
    others = [Wrong(variant.replace(block_m=32), Check(3.0)), Failed(variant.replace(block_m=64), "compile", "no"),
              Skipped(variant.replace(block_m=128), "too long")]
    again = make_trial(Failed(variant, "time", "hung"), run_id=run)
    for record in (first, *map(make_trial, others), again):
        store.add_trial(record)
    assert store.known_trials(setting, now).reusable == [*map(make_trial, others), again]
    assert store.trial_counts() == {"timed": 1, "wrong": 1, "failed": 2, "skipped": 1}
    assert store.failure_counts() == {
        ("wrong", "", "wrong result"): 1, ("failed", "compile", "no"): 1, ("failed", "time", "hung"): 1,
        ("skipped", "", "too long"): 1,
    }


def test_trials_of_a_layer_and_page_size_include_outdated_ones(
    store: Store, make_trial: Callable[..., TrialRecord], setting: Setting
):
    run_id = store.start_run({})
    first = make_trial(run_id=run_id)
    other = replace(first, setting=replace(setting, batch=Batch.parse("3x1@9")))
    later = replace(first, environment=replace(NOW, driver="590.2"))
    smaller = replace(first, setting=replace(setting, gpu=replace(setting.gpu, num_sms=114)))
    for record in (first, other, later, smaller):
        store.add_trial(record)
    assert store.trials(setting.spec, setting.page_size, setting.gpu) == [first, other, later]
    assert store.trials(setting.spec, setting.page_size, setting.gpu, "3x1@9") == [other]
    assert store.trials(setting.spec, 2 * setting.page_size, setting.gpu) == []
    failed = FullCheck(setting.spec, first.outcome.variant, setting.gpu.name, first.environment,
                       (CaseResult("large logits", "failed", 2.0, "row 3"),), "2026-12-01T00:00:00+00:00")
    store.put_full_check(failed)
    kinds = [type(trial.outcome) for trial in store.trials(setting.spec, setting.page_size, setting.gpu)]
    assert kinds == [Wrong, Wrong, Timed]


@pytest.mark.parametrize("change", [
    {"batch": Batch.parse("1x16@33,2x1@40")},
    {"gpu": Gpu("NVIDIA H100", (9, 0), 132, 232448, 62914560, "580.1")},
    {"gpu": Gpu("NVIDIA H200", (9, 0), 66, 232448, 62914560, "580.1")},
    {"regime": Regime("eager")},
    {"regime": Regime("graph", "warm")},
])
def test_trials_of_another_setting_are_not_reused(store: Store, make_trial: Callable[..., TrialRecord],
                                                  setting: Setting, change: dict[str, object]):
    store.start_run({})
    store.add_trial(make_trial())
    other = replace(setting, **change)
    assert store.known_trials(other, now).reusable == []
    assert store.known_trials(other, now).outdated == {}
    assert len(store.known_trials(setting, now).reusable) == 1


def test_outdated_trials_are_counted_by_reason(store: Store, make_trial: Callable[..., TrialRecord], setting: Setting):
    store.start_run({})
    timed = make_trial().outcome
    assert isinstance(timed, Timed)
    gone = replace(timed, variant=replace(timed.variant, template="gone"))
    records = [
        make_trial(),
        make_trial(environment=replace(NOW, kernel_hash="x", triton="3.6.0")),
        make_trial(environment=replace(NOW, kernel_hash="x")),
        make_trial(environment=replace(NOW, triton="3.6.0")),
        make_trial(environment=replace(NOW, torch="2.11.0")),
        make_trial(environment=replace(NOW, driver="550")),
        make_trial(gone),
    ]
    for record in records:
        store.add_trial(record)
    known = store.known_trials(setting, now)
    assert known.reusable == records[:1]
    assert known.outdated == Counter({
        "measured with another kernel source": 2,
        "measured with another triton": 1,
        "measured with another torch": 1,
        "measured with another driver": 1,
        "of a template that is not installed": 1,
    })


# Best configs


def test_one_config_is_stored_for_each_question(store: Store, make_config: Callable[..., BestConfig]):
    old = make_config()
    new = make_config(measured_at="2026-11-30T12:00:00+00:00", full_check=False,
                      variant=old.variant.replace(waves=4), environment=replace(NOW, triton="3.6.0"))
    elsewhere = [
        make_config("64x1@4096"),
        make_config(variant=replace(old.variant, page_size=128)),
        make_config(gpu=replace(old.gpu, name="NVIDIA H100")),
        make_config(gpu=replace(old.gpu, num_sms=66)),
        make_config(timing=replace(old.timing, regime=Regime("eager"))),
    ]
    store.put_best(old, *elsewhere)
    assert len(store.best_configs()) == 6
    store.put_best(new)
    kept = store.best_configs()
    assert len(kept) == 6
    assert set(kept) == {new, *elsewhere}
    assert store.best_configs(page_size=128) == [elsewhere[1]]
    assert store.best_configs(gpu_name="NVIDIA H100") == [elsewhere[2]]
    assert store.best_configs(bucket=elsewhere[0].shape.bucket) == [elsewhere[0]]
    assert store.best_configs(regime=Regime("eager")) == [elsewhere[4]]
    assert store.best_configs(spec=replace(old.shape.spec, dtype="float16")) == []


def test_two_batches_of_one_bucket_each_keep_their_config(store: Store, make_config: Callable[..., BestConfig]):
    one, other = make_config("1x512@16384,63x1@32768"), make_config("1x512@16384,63x1@32760")
    assert one.shape == other.shape
    store.put_best(one)
    store.put_best(other)
    assert set(store.best_configs()) == {one, other}


def test_either_all_configs_are_stored_or_none(store: Store, make_config: Callable[..., BestConfig]):
    broken = replace(make_config("64x1@4096"), measured_at=None)
    with pytest.raises(StoreError, match="NOT NULL"):
        store.put_best(make_config(), broken)
    assert store.best_configs() == []


def test_a_poisoned_row_is_set_aside_and_named(store: Store, make_config: Callable[..., BestConfig],
                                               make_trial: Callable[..., TrialRecord], setting: Setting):
    store.put_best(make_config(), make_config("64x1@4096"))
    store.start_run({})
    store.add_trial(make_trial())
    store.add_trial(make_trial())
    execute(Path(store.name),
            "UPDATE best_configs SET variant = 'nonsense', samples_ms = CAST(X'ff' AS TEXT) WHERE id = 1")
    with pytest.warns(UserWarning, match=r"set aside: row 1 of table best_configs in .*tuner\.db") as caught:
        assert store.best_configs() == [make_config("64x1@4096")]
    assert len(caught) == 1
    execute(Path(store.name), "DELETE FROM best_configs WHERE id = 1")
    execute(Path(store.name), "UPDATE best_configs SET batch = 'garbage'")
    with pytest.warns(UserWarning, match=r"row 2 of table best_configs .* cannot be read: cannot read 'garbage'"):
        assert store.best_configs() == []
    execute(Path(store.name), "UPDATE trials SET samples_ms = '[0.2,', plan_ms = 'long' WHERE id = 2")
    with pytest.warns(UserWarning, match=r"row 2 of table trials"):
        assert store.known_trials(setting, now).reusable == [make_trial()]


# Several at once


def test_a_lock_held_too_long_is_an_error(tmp_path: Path, make_config: Callable[..., BestConfig]):
    path = tmp_path / "a.db"
    with Store.open(path, timeout_s=0.1) as store:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="is locked by another process"):
            store.put_best(make_config())
        assert store.best_configs() == []
        with pytest.raises(StoreError, match="is locked by another process"):
            Store.open(path, timeout_s=0.1)
        Store.open(path, create=False, timeout_s=0.1).close()
        other.execute("ROLLBACK")
        other.close()
        store.put_best(make_config())
        assert store.best_configs() == [make_config()]


MANY_RUNS = """
import sys
from attention_tuner.db import Store
with Store.open(sys.argv[1]) as store:
    for step in range(40):
        store.start_run({"step": step})
"""


def test_several_processes_create_and_write_one_database(tmp_path: Path):
    path = tmp_path / "a.db"
    processes = [python(MANY_RUNS, str(path)) for _ in range(3)]
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    with Store.open(path) as store:
        assert store.start_run({}) == 121


def test_threads_share_a_store(store: Store, make_trial: Callable[..., TrialRecord]):
    store.start_run({})
    threads = [threading.Thread(target=lambda: [store.add_trial(make_trial()) for _ in range(20)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.trial_counts() == {"timed": 80}


KILLED = """
import sys, time
from attention_tuner.db import Store
from attention_tuner.db.models import RunRow
store = Store.open(sys.argv[1])
store.start_run({"kept": True})
with store._writing() as session:
    session.add(RunRow(started_at="", settings="half-way"))
    session.flush()
    print("written", flush=True)
    time.sleep(60)
"""


def test_a_killed_process_leaves_its_finished_transactions(tmp_path: Path):
    path = tmp_path / "a.db"
    process = python(KILLED, str(path))
    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with Store.open(path, timeout_s=1) as store:
        assert store.start_run({}) == 2


def test_the_settings_of_every_run_are_read_with_their_notes(tmp_path: Path):
    with Store.open(tmp_path / "a.db") as store:
        first, second = store.start_run({"trials": 30}), store.start_run({})
        store.finish_run(first, {"card": None})
        assert store.run_settings() == {first: {"trials": 30, "card": None}, second: {}}
