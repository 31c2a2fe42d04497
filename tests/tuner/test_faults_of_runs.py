"""Faults of a whole run and of its database, through the real command line and the real loop on a CPU.

Each time, what was stored is kept and is not measured again, and either the run or the next one ends with a result.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fault_harness import Watcher

from attention_tuner.db.store import Store
from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.errors import StoreError
from attention_tuner.kernel_templates.gpu import INTERPRETER
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.task import Task
from attention_tuner.tuner.processes.worker import Worker
from attention_tuner.tuner.run import Executor
from attention_tuner.tuner.settings import Settings, TaskResult
from attention_tuner.tuner.tune import tune

TASK = Task(AttentionSpec(2, 1, 64, dtype="float16"), Batch.parse("1x9@20,1x1@24"), 16)
TRIALS = 6
SETTINGS = Settings(trials=TRIALS, sampler="random")
COMMAND = (
    sys.executable, "-m", "attention_tuner.tuner", "tune", "--spec", TASK.spec.key(), "--batch", str(TASK.batch),
    "--gpu", "interpreter", "--sampler", "random", "--json", "--trials",
)  # fmt: skip


def run(database: Path, trials: int, *before: str, file_limit: int | None = None) -> subprocess.Popen[str]:
    """`tune` in a process of its own, after the words `before`, which may write no file beyond `file_limit` bytes."""

    def limit() -> None:
        if file_limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))

    # The command decides for itself what interprets.
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment = {**inherited, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([*before, *COMMAND, str(trials), "--db", str(database)], env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=limit)  # fmt: skip


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Result of the one task that `tune` prints, once it has ended as it should."""
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    (found,) = json.loads(out)["results"]
    assert found["best"] is not None
    return found


def sentence(process: subprocess.Popen[str]) -> str:
    """The sentence that `tune` ends with when its database cannot be written."""
    out, err = process.communicate(timeout=400)
    assert process.returncode == StoreError.exit_status, err
    assert out == ""
    assert "Traceback" not in err
    return err.splitlines()[-1]


def num_rows(database: Path) -> int:
    """Number of trials in the database, which must be sound; all of them are timed."""
    with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    with Store.open(database, create=False) as store:
        counts = store.trial_counts()
    assert set(counts) <= {"timed"}
    return counts.total()


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """One process that measures for all runs that go on: importing torch takes longer than their trials."""
    with Worker(interpret=True) as shared:
        yield shared


def tune_here(database: Path, worker: Worker, trials: int = TRIALS) -> TaskResult:
    """The search of `run`, in this process."""
    with Store.open(database) as store:
        (found,) = tune([TASK], INTERPRETER, store, replace(SETTINGS, trials=trials), Executor(worker))
    return found


def check_resumed(database: Path, worker: Worker, trials: int = TRIALS) -> None:
    """The same search measures what is missing, and nothing else."""
    before = num_rows(database)
    resumed = tune_here(database, worker, trials)
    assert resumed.best is not None
    assert (resumed.reused, resumed.tried) == (before, trials - before)
    assert num_rows(database) == trials


def test_a_tuner_that_is_killed_goes_on_with_the_same_command(tmp_path: Path) -> None:
    database = tmp_path / "tuner.db"
    process = run(database, TRIALS)
    deadline = time.monotonic() + 200
    while not (database.exists() and stored_so_far(database) >= 2):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = num_rows(database)
    assert 2 <= before < TRIALS
    resumed = result(run(database, TRIALS))
    assert (resumed["reused"], resumed["tried"]) == (before, TRIALS - before)


def stored_so_far(database: Path) -> int:
    with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as connection:
        try:
            return int(connection.execute("SELECT count(*) FROM trials").fetchone()[0])
        except sqlite3.OperationalError:
            # It is being made.
            return 0


def test_a_file_that_must_not_grow_ends_the_run_in_a_sentence(tmp_path: Path, worker: Worker) -> None:
    database = tmp_path / "tuner.db"
    tune_here(database, worker, trials=1)
    said = sentence(run(database, TRIALS, file_limit=database.stat().st_size + 4096))
    assert str(database) in said
    assert "cannot be written: the disk is full" in said
    check_resumed(database, worker)


def can_mount() -> bool:
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=64k", "none", "/mnt"]
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="no file system can be mounted here")
def test_a_full_disk_ends_the_run_in_a_sentence(tmp_path: Path, worker: Worker) -> None:
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    kept.mkdir()
    script = f'mount -t tmpfs -o size=220k none {disk}; "$@"; status=$?; cp {disk}/* {kept}; exit $status'
    said = sentence(run(disk / "tuner.db", 200, "unshare", "-rm", "sh", "-c", script, "sh"))
    assert "the disk is full" in said
    rows = num_rows(kept / "tuner.db")
    assert rows >= 1
    check_resumed(kept / "tuner.db", worker, rows + 2)


@contextmanager
def locked(database: Path) -> Iterator[None]:
    """Another process is writing to the database, and does not finish."""
    code = f"""
import sqlite3, time
connection = sqlite3.connect({str(database)!r}, isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "locked\n"
            yield
        finally:
            process.kill()


def test_a_lock_of_a_moment_costs_no_trial(tmp_path: Path, worker: Worker) -> None:
    database = tmp_path / "tuner.db"
    with ExitStack() as lock, Store.open(database, timeout_s=120) as store:

        def lock_it(done: int) -> None:
            if done == 2:
                lock.enter_context(locked(database))
                threading.Timer(0.5, lock.close).start()

        (found,) = tune([TASK], INTERPRETER, store, SETTINGS, Executor(worker), Watcher(lock_it))
    assert found.best is not None
    assert found.tried == num_rows(database) == TRIALS


def test_a_database_that_stays_locked_ends_the_run(tmp_path: Path, worker: Worker) -> None:
    database = tmp_path / "tuner.db"
    with ExitStack() as lock, Store.open(database, timeout_s=0.5) as store, Worker(interpret=True) as own:
        listener = Watcher(lambda done: lock.enter_context(locked(database)) if done == 2 else None)
        with pytest.raises(StoreError, match="is locked by another process; try again") as caught:
            tune([TASK], INTERPRETER, store, SETTINGS, Executor(own), listener)
    assert caught.value.exit_status == 2
    assert num_rows(database) == 2
    check_resumed(database, worker)


def test_two_tuners_at_once_on_one_database_lose_no_trial(tmp_path: Path, worker: Worker) -> None:
    database = tmp_path / "tuner.db"
    found = [result(process) for process in [run(database, TRIALS) for _ in range(2)]]
    # Each knows what was stored before it began, and no more: no trial of either is lost.
    assert sum(each["tried"] for each in found) == num_rows(database)
    with Store.open(database, create=False) as store:
        assert len(store.best_configs()) == 1
    assert tune_here(database, worker).tried == 0
