from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import DEFAULT, GPU, TASK, Bench, FakeWorker

from attention_tuner.kernel_templates.errors import InputError
from attention_tuner.kernel_templates.gpu import INTERPRETER
from attention_tuner.kernel_templates.outcome import Check, Failed, Regime, Skipped, Timed, Timing, Wrong
from attention_tuner.tuner.processes.compile import CompilePool
from attention_tuner.tuner.processes.worker import Worker
from attention_tuner.tuner.run import AHEAD, Executor, Settings, TaskResult


@pytest.mark.parametrize("name", ["trials", "ahead", "finalists", "samples"])
def test_a_count_below_one_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} must be at least 1, not 0"):
        Settings(**{name: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_an_impossible_time_is_refused(seconds: float) -> None:
    with pytest.raises(InputError, match="seconds must be a positive number"):
        Settings(seconds=seconds)


def test_settings_can_be_written_as_json() -> None:
    assert json.loads(json.dumps(Settings(seconds=3.5).as_json()))["regime"] == "graph-cold-burst"


def test_a_result_counts_outcomes_and_reasons() -> None:
    result = TaskResult(TASK)
    timing = Timing((1.0,), Regime("graph"))
    for outcome in (
        Timed(DEFAULT, Check(0.1), timing), Wrong(DEFAULT, Check(2.0)), Wrong(DEFAULT, Check(math.nan)),
        Failed(DEFAULT, "compile", "too big"), Skipped(DEFAULT, "known"),
    ):  # fmt: skip
        result.count(outcome)
    assert result.outcomes == {"timed": 1, "wrong": 2, "failed": 1, "skipped": 1}
    assert result.reasons == {
        ("wrong", "", "wrong result"): 2, ("failed", "compile", "too big"): 1, ("skipped", "", "known"): 1,
    }  # fmt: skip
    assert result.skipped == 1


def test_closing_an_executor_ends_all_it_runs(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.executor.close()
    assert bench.worker.closed
    assert bench.pool.closed


def test_the_real_worker_and_pool_can_be_its_parts() -> None:
    executor = Executor(Worker(interpret=True), CompilePool(1))
    assert executor.pool is not None
    assert executor.pool.pending == 0
    executor.close()


def test_the_interpreter_has_a_regime_of_its_own(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    settings = Settings(regime=Regime("eager"))
    assert bench.run(settings).regime == Regime("eager")
    assert bench.run(settings, INTERPRETER).regime == Regime("interpreter")
    assert bench.run(settings, GPU, seconds=9.0).seconds_left == 9.0


def test_an_executor_starts_all_it_has(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    racer = FakeWorker(bench.clock)
    replace(bench.executor, racer=racer).start()
    assert (bench.worker.starts, racer.starts, bench.pool.starts) == (1, 1, 1)
    Executor(bench.worker).start()
    assert bench.worker.starts == 2


def test_without_a_pool_nothing_is_asked_ahead(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    run = bench.run(Settings())
    assert run.ahead == AHEAD * bench.pool.processes
    assert replace(run, settings=Settings(ahead=5)).ahead == 5
    assert replace(run, executor=replace(bench.executor, pool=None), settings=Settings(ahead=5)).ahead == 1


def test_trials_are_counted_by_the_second() -> None:
    assert TaskResult(TASK, tried=30, seconds=20.0).measured_per_second == 1.5
    assert TaskResult(TASK).measured_per_second == 0
