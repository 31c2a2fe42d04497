from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fakes import DEFAULT, GPU, OTHER, SPEC, TASK, Bench, landscape

from attention_tuner.db.records import Setting
from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.default import default_variant
from attention_tuner.kernel_templates.errors import InputError
from attention_tuner.kernel_templates.gpu import INTERPRETER
from attention_tuner.kernel_templates.outcome import Environment, Outcome, Regime, Verdict
from attention_tuner.tuner.final import INTERPRETED_FINALISTS
from attention_tuner.tuner.run import Listener, Progress, Settings, TaskResult
from attention_tuner.tuner.task import Task
from attention_tuner.tuner.tune import RACE_LIMIT_S, tune


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def stored(bench: Bench, task: Task = TASK) -> list[Outcome]:
    setting = Setting(task.spec, task.batch, task.page_size, GPU, Regime("graph"))
    return [r.outcome for r in bench.store.reusable_trials(setting, bench.executor.environment_of)]


def test_the_best_is_found_raced_and_stored(bench: Bench) -> None:
    (result,) = tune([TASK], GPU, bench.store, Settings(trials=60), bench.executor)
    best = result.best
    assert best is not None
    assert bench.store.best_configs() == [best]
    assert best.timing.median_ms == min(map(landscape, bench.worker.measured))
    assert best.default_timing.median_ms == landscape(DEFAULT)
    assert best.speedup > 1.5
    assert (best.batch, best.gpu, best.environment.kernel_hash) == ("2x1@48", GPU, "hash")
    assert DEFAULT in bench.worker.races[0].variants
    assert result.baseline == DEFAULT
    assert (result.tried, len(stored(bench))) == (60, 60)
    assert not bench.worker.closed


def test_a_default_that_nothing_beats_is_kept(bench: Bench) -> None:
    bench.worker.ms = lambda v: 1.0 if v == DEFAULT else 1.004 + 0.001 * v.number("num_warps")
    (result,) = tune([TASK], GPU, bench.store, Settings(trials=20), bench.executor)
    assert result.best is not None
    assert result.best.variant == DEFAULT
    assert result.best.speedup == 1.0


def test_the_same_command_again_measures_nothing(bench: Bench) -> None:
    first = tune([TASK, OTHER], GPU, bench.store, Settings(trials=15), bench.executor)
    bench.restart()
    second = tune([TASK, OTHER], GPU, bench.store, Settings(trials=15), bench.executor)
    assert bench.worker.measured == []
    assert bench.worker.races == []
    assert [result.best for result in second] == [result.best for result in first]
    assert [(result.tried, result.reused) for result in second] == [(0, 15), (0, 15)]


def test_an_undecided_race_is_run_again(bench: Bench) -> None:
    bench.worker.ms = lambda v: 1.0 if v == DEFAULT else 0.9
    bench.worker.noise = 0.03
    (first,) = tune([TASK], GPU, bench.store, Settings(trials=8), bench.executor)
    assert first.best is not None
    assert first.best.verdict is Verdict.AMBIGUOUS
    bench.restart(lambda v: landscape(v) if v == DEFAULT else 0.5 + 0.1 * landscape(v))
    tune([TASK], GPU, bench.store, Settings(trials=8), bench.executor)
    assert bench.worker.measured == []
    assert len(bench.worker.races) >= 1


def test_an_interrupt_keeps_what_is_finished_and_ends_all_processes(bench: Bench) -> None:
    bench.worker.faults = lambda v: "interrupt" if len(bench.worker.measured) == 6 else ""
    with pytest.raises(KeyboardInterrupt):
        tune([TASK, OTHER], GPU, bench.store, Settings(trials=20), bench.executor)
    assert len(stored(bench)) == 5
    assert bench.worker.closed
    assert bench.pool.closed
    measured = set(bench.worker.measured[:5])
    bench.restart()
    (result,) = tune([TASK], GPU, bench.store, Settings(trials=20), bench.executor)
    assert result.reused == 5
    assert not measured & set(bench.worker.measured)
    assert len(bench.worker.measured) == 15


@pytest.mark.parametrize("seconds", [5.0, 20.0, 61.0])
def test_the_budget_is_kept_and_divided_fairly(bench: Bench, seconds: float) -> None:
    start = bench.clock()
    results = tune([TASK, OTHER], GPU, bench.store, Settings(trials=10_000, seconds=seconds), bench.executor)
    assert bench.clock() - start <= 1.05 * seconds
    assert all(result.best is not None for result in results)
    assert results[0].seconds <= 0.55 * seconds
    assert results[1].tried >= 0.8 * results[0].tried
    assert sum(result.seconds for result in results) == pytest.approx(bench.clock() - start)


def test_time_that_a_task_leaves_goes_to_the_next(bench: Bench) -> None:
    tune([TASK], GPU, bench.store, Settings(trials=40), bench.executor)
    bench.restart()
    results = tune([TASK, OTHER], GPU, bench.store, Settings(trials=40, seconds=30.0), bench.executor)
    assert results[0].tried == 0
    # Half of 30 s would be enough for 22 trials and a race.
    assert results[1].tried == 40


def test_a_race_has_its_own_limit(bench: Bench) -> None:
    bench.worker.ms = lambda v: 300.0 - v.number("num_warps") / 100
    bench.worker.noise = 0.05
    start = bench.clock()
    (result,) = tune([TASK], GPU, bench.store, Settings(trials=10), bench.executor)
    assert bench.clock() - start - 0.5 * result.tried <= RACE_LIMIT_S + 1
    assert len(bench.worker.races) >= 1


def test_a_hang_does_not_exceed_the_budget(bench: Bench) -> None:
    bench.worker.faults = lambda v: "hang" if len(bench.worker.measured) == 4 else ""
    start = bench.clock()
    (result,) = tune([TASK], GPU, bench.store, Settings(trials=100, seconds=20.0), bench.executor)
    assert bench.clock() - start <= 21
    assert result.best is not None
    assert result.outcomes == {"timed": 3}


def test_nothing_right_gives_no_best_and_the_reasons(bench: Bench) -> None:
    bench.worker.faults = lambda v: "wrong" if v.template == "unified" else "out of memory"
    (result,) = tune([TASK], GPU, bench.store, Settings(trials=20), bench.executor)
    assert result.best is None
    assert bench.store.best_configs() == []
    assert result.outcomes.total() == 20
    assert set(result.reasons) == {("wrong", "", "wrong result"), ("failed", "time", "out of memory")}


def test_wrong_and_failed_variants_never_win(bench: Bench) -> None:
    bench.worker.faults = lambda v: "wrong" if v.number("num_warps") == 1 else ""
    (result,) = tune([TASK], GPU, bench.store, Settings(trials=60), bench.executor)
    assert result.best is not None
    assert result.best.variant.number("num_warps") > 1
    assert result.outcomes["wrong"] > 0


def test_a_batch_too_long_for_the_interpreter_is_refused_before_anything_runs(bench: Bench) -> None:
    long = Task(SPEC, Batch.parse("1x512@1024,7x1@1024"), 16)
    bench.executor = replace(bench.executor, pool=None)
    with pytest.raises(InputError, match=r"1x512@1024,7x1@1024' is too large .* 2 variants would take about \d+ s"):
        tune([TASK, long], INTERPRETER, bench.store, Settings(seconds=60), bench.executor)
    assert bench.worker.measured == []
    results = tune([TASK], INTERPRETER, bench.store, Settings(trials=4, seconds=60), bench.executor)
    assert results[0].best is not None
    assert results[0].best.timing.regime == Regime("interpreter")
    assert all(len(race.variants) <= 1 + INTERPRETED_FINALISTS for race in bench.worker.races)


def test_the_listener_hears_it_all_in_order(bench: Bench) -> None:
    heard: list[str] = []

    class Heard(Listener):
        def started(self, task: Task, valid: int, reused: int) -> None:
            heard.append(f"started {task.batch} {valid > 1000} {reused}")

        def tried(self, progress: Progress) -> None:
            heard.append(f"tried {progress.done} of {progress.planned}")

        def racing(self, task: Task, variants: tuple[object, ...]) -> None:
            heard.append(f"racing {len(variants) > 1}")

        def finished(self, result: TaskResult) -> None:
            heard.append(f"finished {result.best is not None}")

    tune([TASK], GPU, bench.store, Settings(trials=3, sampler="random"), bench.executor, Heard())
    assert heard == [
        "started 2x1@48 True 0", "tried 1 of 3", "tried 2 of 3", "tried 3 of 3", "racing True", "finished True",
    ]  # fmt: skip


def test_an_unknown_sampler_is_refused(bench: Bench) -> None:
    with pytest.raises(InputError, match="unknown sampler 'best'"):
        tune([TASK], GPU, bench.store, Settings(sampler="best"), bench.executor)


def test_a_config_of_another_environment_is_raced_for_again(bench: Bench) -> None:
    tune([TASK], GPU, bench.store, Settings(trials=5), bench.executor)
    bench.restart()
    bench.executor = replace(bench.executor, environment_of=lambda template, gpu: Environment("new", "", "", ""))
    (result,) = tune([TASK], GPU, bench.store, Settings(trials=5), bench.executor)
    assert (result.reused, result.tried, result.outdated.total()) == (0, 5, 5)
    assert result.best is not None
    assert result.best.environment.kernel_hash == "new"
    assert default_variant(SPEC, TASK.batch, 16) in bench.worker.measured
