from __future__ import annotations

import contextlib
import json
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import GPU, Bench, FakeWorker

from attention_tuner.kernel_templates.errors import StoreError
from attention_tuner.kernel_templates.gpu import INTERPRETER
from attention_tuner.kernel_templates.outcome import Regime
from attention_tuner.tuner.measure.gpu_state import GpuState
from attention_tuner.tuner.processes.compile import CompilePool
from attention_tuner.tuner.processes.worker import Worker
from attention_tuner.tuner.run import AHEAD_PER_PROCESS, FEWEST_AHEAD, Executor, open_run
from attention_tuner.tuner.settings import Settings


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_closing_an_executor_ends_all_it_runs(bench: Bench) -> None:
    bench.executor.close()
    assert bench.worker.closed
    assert bench.pool.closed


def test_the_real_worker_and_pool_can_be_its_parts() -> None:
    executor = Executor(Worker(interpret=True), CompilePool(1))
    assert executor.pool is not None
    assert executor.pool.pending == 0
    executor.close()


def test_the_interpreter_has_a_regime_of_its_own(bench: Bench) -> None:
    settings = Settings(regime=Regime("eager"))
    assert bench.run(settings).regime == Regime("eager")
    assert bench.run(settings, INTERPRETER).regime == Regime("interpreter")
    assert bench.run(settings, GPU, seconds=9.0).seconds_left == 9.0


def test_an_executor_starts_all_it_has(bench: Bench) -> None:
    racer = FakeWorker(bench.clock)
    replace(bench.executor, racer=racer).start(3)
    assert (bench.worker.starts, racer.starts, bench.pool.started_for) == (1, 1, [3])
    Executor(bench.worker).start(3)
    assert bench.worker.starts == 2


def test_a_quarter_of_the_trials_are_chosen_ahead_or_fewer_if_there_are_few_processes(bench: Bench) -> None:
    run = bench.run(Settings(trials=20))
    assert run.ahead == 5
    assert run.most_ahead == AHEAD_PER_PROCESS * bench.pool.processes
    assert replace(run, settings=Settings(trials=1000)).ahead == run.most_ahead
    assert replace(run, settings=Settings(trials=3)).ahead == FEWEST_AHEAD
    assert replace(run, settings=Settings(ahead=5)).ahead == 5
    assert replace(run, executor=replace(bench.executor, pool=None), settings=Settings(ahead=5)).ahead == 1



def test_a_run_ends_by_its_seconds_less_those_that_pass_aside(bench: Bench) -> None:
    executor = replace(bench.executor, aside_s=3.0)
    with open_run(GPU, bench.store, Settings(seconds=10), executor) as run:
        assert run.seconds_left == pytest.approx(7.0)
        assert run.builds is not None
    with open_run(GPU, bench.store, Settings(), replace(bench.executor, pool=None)) as run:
        assert run.seconds_left == float("inf")
        assert run.builds is None
    assert not bench.worker.closed


def test_the_gpu_state_is_stored_from_before_and_after_the_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    states = iter([GpuState(power_w=70), GpuState(power_w=690)])
    monkeypatch.setattr("attention_tuner.tuner.run.read_gpu_state", lambda uuid: next(states))
    with open_run(GPU, bench.store, Settings(trials=7), replace(bench.executor, uuid="GPU-1")) as run:
        assert run.run_id == 1
    with contextlib.closing(sqlite3.connect(bench.store.name)) as connection:
        ((text,),) = connection.execute("select settings from runs").fetchall()
    settings = json.loads(text)
    assert (settings["trials"], settings["processes"]) == (7, 4)
    assert [settings["card"][when]["power_w"] for when in ("start", "end")] == [70, 690]


def test_a_failure_closes_the_processes_but_a_note_that_cannot_be_stored_does_not(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(bench.store, "finish_run", refuse)
    with pytest.warns(UserWarning, match="the disk is full"), open_run(GPU, bench.store, Settings(), bench.executor):
        pass
    assert not bench.worker.closed
    with pytest.raises(KeyboardInterrupt), open_run(GPU, bench.store, Settings(), bench.executor):
        raise KeyboardInterrupt
    assert bench.worker.closed
    assert bench.pool.closed
