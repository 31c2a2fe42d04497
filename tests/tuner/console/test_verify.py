from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cli_samples import Lines
from fakes import GPU, OTHER, TASK, Bench, landscape
from portfolio_samples import MIDDLE, SMALL, A, B, best_config

from attention_tuner.db import Store
from attention_tuner.kernel_templates.batch import BatchBucket
from attention_tuner.kernel_templates.heuristic import candidates
from attention_tuner.kernel_templates.outcome import Regime, Timing
from attention_tuner.kernel_templates.sources import environment
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.tuner.console.verify import print_verified
from attention_tuner.tuner.run import Executor
from attention_tuner.tuner.settings import Settings
from attention_tuner.tuner.tune import tune
from attention_tuner.tuner.verify import BEATEN, HELD, UNDECIDED, Verified

STAR = candidates(TASK.spec, BatchBucket.of(TASK.batch), 16, GPU)[0]


def steady(variant: Variant) -> float:
    return 1.0 if variant.as_dict() == STAR.as_dict() else 1.1 + landscape(variant)


class Machine:
    """A GPU that is not there, on which one batch was tuned with this source and another driver."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bench = Bench(folder, steady)
        self._executor(environment)
        tune([TASK, OTHER], GPU, self.bench.store, Settings(trials=8, sampler="random"), self.bench.executor)
        self.path = self.bench.store.name
        monkeypatch.setattr("attention_tuner.tuner.console.request.running_gpu", lambda name: GPU)
        monkeypatch.setattr("attention_tuner.tuner.run.executor_on", lambda gpu: self.bench.executor)
        self.now()

    def _executor(self, environment_of: Callable[..., object]) -> None:
        self.bench.executor = replace(self.bench.executor, environment_of=environment_of, aside_s=0.0)

    def now(self, ms: Callable[[Variant], float] = steady) -> Executor:
        """Processes anew."""
        self.bench.restart(ms)
        self._executor(environment)
        return self.bench.executor

    def change_driver(self) -> None:
        """Have everything measured with another driver than the present one."""
        with contextlib.closing(sqlite3.connect(self.path)) as connection, connection:
            for table in ("trials", "best_configs"):
                connection.execute(f"update {table} set driver = 'before'")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Lines:
    return Lines(capsys)


def test_what_is_of_now_is_not_raced_unless_all_are(lines: Lines, machine: Machine) -> None:
    assert lines.run("verify", "--db", machine.path) == 0
    assert "2 best configs of" in lines.out
    assert machine.bench.worker.jobs == []
    assert lines.run("verify", "--all", "--db", machine.path, "--json") == 0
    assert json.loads(lines.out)["states"] == {"held": 2}


def test_after_a_change_of_driver_all_are_raced_once(lines: Lines, machine: Machine) -> None:
    machine.change_driver()
    assert lines.run("verify", "--spec", TASK.spec.key(), "--db", machine.path) == 0
    assert "2 best configs raced with the runners-up and neighbours: 2 held" in lines.out
    machine.now()
    assert lines.run("verify", "--db", machine.path, "--json") == 0
    document = json.loads(lines.out)
    assert (document["fresh"], document["verified"]) == (2, [])
    assert machine.bench.worker.jobs == []


def test_what_moved_ends_with_status_3_and_is_tuned_anew_on_request(lines: Lines, machine: Machine) -> None:
    machine.change_driver()
    machine.now(lambda v: 2.0 * steady(v))
    assert lines.run("verify", "--db", machine.path, "--json") == 3
    assert json.loads(lines.out)["states"] == {"changed": 2}
    machine.now(lambda v: 2.0 * steady(v))
    assert lines.run("verify", "--retune", "--trials", "12", "--db", machine.path, "--json") == 0
    document = json.loads(lines.out)
    assert document["retuned"] == 2
    assert {each["retuned_ms"] for each in document["verified"]} == {2.0}
    with Store.open(machine.path) as store:
        assert {config.timing.median_ms for config in store.best_configs()} == {2.0}
    assert lines.run("verify", "--db", machine.path) == 0


def test_what_the_time_did_not_suffice_for_ends_with_status_4(lines: Lines, machine: Machine) -> None:
    machine.change_driver()
    assert lines.run("verify", "--seconds", "0.001", "--db", machine.path, "--json") == 4
    assert json.loads(lines.out)["states"] == {"undecided": 2}


def test_where_nothing_is_stored_there_is_nothing_to_verify(lines: Lines, machine: Machine) -> None:
    assert lines.run("verify", "--warm", "--db", machine.path) == 1
    assert "graph-warm-burst" in lines.err
    assert lines.run("verify", "--model", "llama-3-8b", "--db", machine.path) == 1
    assert "tune first" in lines.err


def test_each_winner_is_shown_with_its_times_and_what_beats_it(capsys: pytest.CaptureFixture[str]) -> None:
    def timing(ms: float) -> Timing:
        return Timing((ms,), Regime("graph"))

    found = [
        Verified(best_config(SMALL, A), HELD, timing(1.02), A, 1.02),
        Verified(best_config(MIDDLE, A, 2.0), BEATEN, timing(2.0), B, 1.5, retuned=best_config(MIDDLE, B, 1.5)),
        Verified(best_config(MIDDLE, A, 2.0), UNDECIDED),
    ]
    print_verified("tuner.db", GPU, found, 4, as_json=False)
    out = " ".join(capsys.readouterr().out.split())
    assert "8x1@1100 16 held 1 ms 1.02 ms (+2.0%) itself" in out
    assert "2 ms (+0.0%)" in out
    assert "1 held, 1 beaten, 1 undecided; 1 tuned anew" in out
    print_verified("tuner.db", GPU, found, 0, as_json=True)
    held, beaten, undecided = json.loads(capsys.readouterr().out)["verified"]
    assert (held["state"], held["ratio"], held["fastest"]) == ("held", pytest.approx(1.02), A.key())
    assert (beaten["fastest"], beaten["retuned"], beaten["retuned_ms"]) == (B.key(), B.key(), 1.5)
    assert (undecided["now_ms"], undecided["ratio"], undecided["retuned"]) == (None, None, None)
