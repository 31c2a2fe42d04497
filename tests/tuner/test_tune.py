from __future__ import annotations

import contextlib
import functools
import os
import re
import sqlite3
import subprocess
import sys
import textwrap
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import DEFAULT, GPU, OTHER, SPEC, TASK, Bench, FakePool, FakeWorker, landscape, warps
from recording_samples import small_recording

from attention_tuner.db.lookup.table import ConfigTable
from attention_tuner.db.records import Setting
from attention_tuner.db.store import Store
from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.errors import InputError, TunerError
from attention_tuner.kernel_templates.gpu import INTERPRETER
from attention_tuner.kernel_templates.heuristic import default_variant
from attention_tuner.kernel_templates.outcome import Environment, Failed, JobError, Outcome, Regime, Verdict
from attention_tuner.kernel_templates.registry import template_of
from attention_tuner.kernel_templates.task import Task
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.tuner.costs import fewest_seconds
from attention_tuner.tuner.final import INTERPRETED_FINALISTS
from attention_tuner.tuner.measure.jobs import RaceJob
from attention_tuner.tuner.replay import replay
from attention_tuner.tuner.run import FEWEST_AHEAD
from attention_tuner.tuner.sampling.study import Study
from attention_tuner.tuner.settings import Budget, Listener, Progress, Settings, TaskResult
from attention_tuner.tuner.tune import refuse, tune

# The sampler that chooses in the least time; these tests are not about samplers.
randomly = functools.partial(Settings, sampler="random")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def stored(bench: Bench, task: Task = TASK) -> list[Outcome]:
    setting = Setting(task.spec, task.batch, task.page_size, GPU, Regime("graph"))
    return [r.outcome for r in bench.store.known_trials(setting, bench.executor.environment_of).reusable]


def test_the_best_is_found_raced_and_stored(bench: Bench) -> None:
    (result,) = tune([TASK], GPU, bench.store, randomly(trials=60), bench.executor)
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


def test_no_task_has_more_trials_than_were_asked_for(bench: Bench) -> None:
    # The next task begins while the last one races.
    bench.executor = replace(bench.executor, pool=FakePool(bench.clock, processes=14))
    tasks = [Task(SPEC, Batch.parse(text), 16) for text in ("2x1@48", "1x16@32,2x1@40", "1x300@900")]
    results = tune(tasks, GPU, bench.store, randomly(trials=30), bench.executor)
    assert [result.tried for result in results] == [30, 30, 30]
    assert min(result.shared for result in results[1:]) > 0


def test_a_default_that_nothing_beats_is_kept(bench: Bench) -> None:
    bench.worker.ms = lambda v: 1.0 if v == DEFAULT else 1.004 + 0.001 * warps(v)
    (result,) = tune([TASK], GPU, bench.store, randomly(trials=20), bench.executor)
    assert result.best is not None
    assert result.best.variant == DEFAULT
    assert result.best.speedup == 1.0


def test_regimes_share_neither_trials_nor_best_configs_and_the_served_one_answers(bench: Bench) -> None:
    warm, served = Regime("graph", "warm"), Regime("graph", "cold")
    tune([TASK], GPU, bench.store, randomly(trials=10, regime=warm), bench.executor)
    bench.restart()
    (result,) = tune([TASK], GPU, bench.store, randomly(trials=10), bench.executor)
    assert (result.reused, result.tried) == (0, 10)
    assert {config.timing.regime for config in bench.store.best_configs()} == {warm, served}
    table = ConfigTable.of(bench.store.best_configs())
    assert table.lookup(SPEC, TASK.batch, TASK.page_size, GPU).config == result.best


def test_the_same_command_again_measures_nothing(bench: Bench) -> None:
    first = tune([TASK, OTHER], GPU, bench.store, randomly(trials=15), bench.executor)
    bench.restart()
    second = tune([TASK, OTHER], GPU, bench.store, randomly(trials=15), bench.executor)
    assert bench.worker.measured == []
    assert bench.worker.races == []
    assert [result.best for result in second] == [result.best for result in first]
    assert [(result.tried, result.reused) for result in second] == [(0, 15), (0, 15)]


def test_an_undecided_race_is_run_again(bench: Bench) -> None:
    bench.worker.ms = lambda v: 1.0 if v == DEFAULT else 0.9
    bench.worker.noise = 0.03
    (first,) = tune([TASK], GPU, bench.store, randomly(trials=8), bench.executor)
    assert first.best is not None
    assert first.best.verdict is Verdict.AMBIGUOUS
    bench.restart(lambda v: landscape(v) if v == DEFAULT else 0.5 + 0.1 * landscape(v))
    tune([TASK], GPU, bench.store, randomly(trials=8), bench.executor)
    assert bench.worker.measured == []
    assert len(bench.worker.races) >= 1


def test_an_interrupt_keeps_what_is_finished_and_ends_all_processes(bench: Bench) -> None:
    bench.worker.faults = lambda v: "interrupt" if len(bench.worker.measured) == 6 else ""
    with pytest.raises(KeyboardInterrupt):
        tune([TASK, OTHER], GPU, bench.store, randomly(trials=20), bench.executor)
    assert len(stored(bench)) == 5
    assert bench.worker.closed
    assert bench.pool.closed
    measured = set(bench.worker.measured[:5])
    bench.restart()
    (result,) = tune([TASK], GPU, bench.store, randomly(trials=20), bench.executor)
    assert result.reused == 5
    assert not measured & set(bench.worker.measured)
    assert len(bench.worker.measured) == 15


@pytest.mark.parametrize("seconds", [5.0, 20.0, 61.0])
def test_the_budget_is_kept_and_divided_fairly(bench: Bench, seconds: float) -> None:
    start = bench.clock()
    results = tune([TASK, OTHER], GPU, bench.store, randomly(trials=10_000, seconds=seconds), bench.executor)
    assert bench.clock() - start <= 1.05 * seconds
    assert all(result.best is not None for result in results)
    assert results[0].seconds <= 0.55 * seconds
    assert results[1].tried >= 0.8 * results[0].tried
    assert sum(result.seconds for result in results) == pytest.approx(bench.clock() - start)


def test_starting_the_process_takes_its_time_from_all_tasks(bench: Bench) -> None:
    bench.worker.start_cost = 20.0
    results = tune([TASK, OTHER], GPU, bench.store, randomly(trials=10_000, seconds=60.0), bench.executor)
    assert results[0].tried >= 0.7 * results[1].tried


@pytest.mark.parametrize("error", [KeyboardInterrupt(), TunerError("a worker process could not start")])
def test_an_interrupted_start_of_the_process_loses_no_stored_trial(
    bench: Bench, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.worker.faults = lambda v: "interrupt" if len(bench.worker.measured) == 6 else ""
    with pytest.raises(KeyboardInterrupt):
        tune([TASK], GPU, bench.store, randomly(trials=20), bench.executor)
    with contextlib.closing(sqlite3.connect(bench.store.name)) as connection:
        connection.execute("DELETE FROM best_configs")
        connection.commit()
    bench.restart()

    def ready(limit_s: float) -> bool:
        raise error

    monkeypatch.setattr(bench.worker, "ready", ready)
    with pytest.raises(type(error)):
        tune([TASK], GPU, bench.store, randomly(trials=20), bench.executor)
    assert len(bench.store.best_configs()) == 1


def test_time_that_a_task_leaves_goes_to_the_next(bench: Bench) -> None:
    tune([TASK], GPU, bench.store, randomly(trials=40), bench.executor)
    bench.restart()
    results = tune([TASK, OTHER], GPU, bench.store, randomly(trials=40, seconds=30.0), bench.executor)
    assert results[0].tried == 0
    # Half of 30 s would be enough for 22 trials and a race.
    assert results[1].tried == 40


def test_a_race_has_its_own_limit(bench: Bench) -> None:
    bench.worker.ms = lambda v: 300.0 - warps(v) / 100
    bench.worker.noise = 0.05
    start = bench.clock()
    (result,) = tune([TASK], GPU, bench.store, randomly(trials=10), bench.executor)
    assert bench.clock() - start - 0.5 * result.tried <= Budget().race_limit_s + 1
    assert len(bench.worker.races) >= 1


def test_a_hang_does_not_exceed_the_budget(bench: Bench) -> None:
    bench.worker.faults = lambda v: "hang" if len(bench.worker.measured) == 4 else ""
    start = bench.clock()
    (result,) = tune([TASK], GPU, bench.store, randomly(trials=100, seconds=20.0), bench.executor)
    assert bench.clock() - start <= 21
    assert result.best is not None
    assert result.outcomes == {"timed": 3}


def test_nothing_right_gives_no_best_and_the_reasons(bench: Bench) -> None:
    bench.worker.faults = lambda v: "wrong" if v.template == "unified" else "out of memory"
    (result,) = tune([TASK], GPU, bench.store, randomly(trials=20), bench.executor)
    assert result.best is None
    assert bench.store.best_configs() == []
    assert result.outcomes.total() == 20
    assert set(result.reasons) == {("wrong", "", "wrong result"), ("failed", "time", "out of memory")}


def test_wrong_and_failed_variants_never_win(bench: Bench) -> None:
    bench.worker.faults = lambda v: "wrong" if warps(v) == 1 else ""
    (result,) = tune([TASK], GPU, bench.store, randomly(trials=60), bench.executor)
    assert result.best is not None
    assert warps(result.best.variant) > 1
    assert result.outcomes["wrong"] > 0


def test_a_batch_too_long_for_the_interpreter_is_refused_before_anything_runs(bench: Bench) -> None:
    long = Task(SPEC, Batch.parse("1x512@1024,7x1@1024"), 16)
    bench.executor = replace(bench.executor, pool=None)
    with pytest.raises(InputError, match=r"1x512@1024,7x1@1024' is too large .* 2 variants would take about \d+ s"):
        tune([TASK, long], INTERPRETER, bench.store, randomly(seconds=60), bench.executor)
    assert bench.worker.measured == []
    results = tune([TASK], INTERPRETER, bench.store, randomly(trials=4, seconds=60), bench.executor)
    assert results[0].best is not None
    assert results[0].best.timing.regime == Regime("interpreter")
    assert all(len(race.variants) <= 1 + INTERPRETED_FINALISTS for race in bench.worker.races)


def test_batches_that_fit_the_time_one_by_one_but_not_together_are_refused(bench: Bench) -> None:
    tasks = [Task(SPEC, Batch.parse(text), 16) for text in ("1x64@64", "1x64@60", "1x64@50")]
    seconds = 1.1 * max(fewest_seconds([task], INTERPRETER, 30) for task in tasks)
    with pytest.raises(InputError, match=r"'1x64@64' is too large .* its share of the time .* in all") as told:
        tune(tasks, INTERPRETER, bench.store, randomly(seconds=seconds), bench.executor)
    assert bench.worker.jobs == []
    (enough,) = re.findall(r"(\d+) seconds in all", str(told.value))
    refuse(tasks, INTERPRETER, randomly(seconds=float(enough)))
    refuse(tasks[:1], INTERPRETER, randomly(seconds=seconds))


def test_a_batch_that_the_memory_of_the_gpu_cannot_hold_is_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = Task(SPEC, Batch.parse("1x1@99999999"), 16)
    monkeypatch.setattr("attention_tuner.tuner.tune.present_memory_bytes", lambda: 40 << 30)
    # 10^8 keys and values of 2 heads of 64 numbers of 2 bytes.
    with pytest.raises(InputError, match=r"'1x1@99999999' needs 47\.7 GiB of GPU memory .* the GPU has 40\.0 GiB"):
        tune([TASK, large], GPU, bench.store, randomly(trials=3), bench.executor)
    assert bench.worker.jobs == []
    assert bench.pool.submitted == []
    tune([TASK], GPU, bench.store, randomly(trials=3), bench.executor)


def test_progress_reports_the_time_of_the_default_only(bench: Bench) -> None:
    told: list[float | None] = []

    class Heard(Listener):
        def tried(self, progress: Progress) -> None:
            told.append(progress.default_ms)

    bench.worker.faults = lambda v: "out of memory" if v == DEFAULT else ""
    (result,) = tune([TASK], GPU, bench.store, randomly(trials=4), bench.executor, Heard())
    assert told == [None] * 4
    assert result.baseline not in (None, DEFAULT)


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

    tune([TASK], GPU, bench.store, randomly(trials=3), bench.executor, Heard())
    assert heard == [
        "started 2x1@48 True 0", "tried 1 of 3", "tried 2 of 3", "tried 3 of 3", "racing True", "finished True",
    ]  # fmt: skip


def test_an_unknown_sampler_is_refused(bench: Bench) -> None:
    with pytest.raises(InputError, match="unknown sampler 'best'"):
        tune([TASK], GPU, bench.store, Settings(sampler="best"), bench.executor)


def test_a_config_of_another_environment_is_raced_for_again(bench: Bench) -> None:
    tune([TASK], GPU, bench.store, randomly(trials=5), bench.executor)
    bench.restart()
    bench.executor = replace(bench.executor, environment_of=lambda template, gpu: Environment("new", "", "", ""))
    (result,) = tune([TASK], GPU, bench.store, randomly(trials=5), bench.executor)
    assert (result.reused, result.tried, result.outdated.total()) == (0, 5, 5)
    assert result.best is not None
    assert result.best.environment.kernel_hash == "new"
    assert default_variant(SPEC, TASK.batch, 16) in bench.worker.measured


NEAR = Task(SPEC, Batch.parse("2x1@60"), TASK.page_size)


def test_the_next_tasks_first_variants_are_compiled_while_a_race_is_run(bench: Bench) -> None:
    racer = FakeWorker(bench.clock)
    bench.executor = replace(bench.executor, racer=racer)
    seen: list[int] = []
    race = racer._race

    def noted(job: RaceJob) -> Any:
        seen.append(len(bench.pool.submitted))
        return race(job)

    racer._race = noted
    heard: list[int] = []

    class Heard(Listener):
        def finished(self, result: TaskResult) -> None:
            heard.append(len(bench.pool.submitted))

    results = tune([TASK, OTHER], GPU, bench.store, randomly(trials=10), bench.executor, Heard())
    # Between the begin and the end of the first race, as many as may be ahead.
    assert heard[0] - seen[0] >= FEWEST_AHEAD
    assert all(job.batch == OTHER.batch for job in bench.pool.submitted[seen[0] : heard[0]])
    assert len(bench.pool.submitted) >= heard[1] >= heard[0]
    assert [result.tried for result in results] == [10, 10]


def test_each_process_gives_its_memory_back_before_the_other_measures(bench: Bench) -> None:
    racer = FakeWorker(bench.clock)
    bench.executor = replace(bench.executor, racer=racer)
    tune([TASK, OTHER], GPU, bench.store, randomly(trials=5), bench.executor)
    # One job prepares, and five measure.
    assert bench.worker.freed == [6, 12]
    assert bench.worker.races == []
    assert racer.measured == []
    assert racer.freed == [len(racer.races) - len([r for r in racer.races if r.task == OTHER]), len(racer.races)]


def test_all_processes_start_at_once_unless_nothing_is_to_be_tried(bench: Bench) -> None:
    racer = FakeWorker(bench.clock)
    bench.executor = replace(bench.executor, racer=racer)
    tune([TASK], GPU, bench.store, randomly(trials=5), bench.executor)
    assert (bench.worker.starts, racer.starts, bench.pool.started_for) == (1, 1, [5])
    bench.restart()
    tune([TASK], GPU, bench.store, randomly(trials=5), bench.executor)
    assert (bench.worker.starts, bench.pool.started_for) == (0, [])


def test_a_result_says_how_its_time_was_spent(bench: Bench) -> None:
    bench.worker.cost = 0.01
    bench.pool.cost = 2.0
    start = bench.clock()
    (cold,) = tune([TASK], GPU, bench.store, randomly(trials=100), bench.executor)
    assert cold.seconds == pytest.approx(bench.clock() - start)
    assert 0.8 * cold.seconds <= cold.compiling_seconds <= cold.seconds
    assert cold.measuring_seconds < 0.2 * cold.seconds
    assert cold.measured_per_second == pytest.approx(100 / cold.seconds)
    bench.restart(cost=0.5)
    (slow,) = tune([OTHER], GPU, bench.store, randomly(trials=100), bench.executor)
    assert 0.8 * slow.seconds <= slow.measuring_seconds <= slow.seconds


def test_a_suite_shares_what_it_compiled(bench: Bench) -> None:
    bench.pool.cost = 0.7
    bench.worker.cost = 0.1
    tasks = [TASK, NEAR, Task(SPEC, Batch.parse("3x1@70"), TASK.page_size)]
    first, *rest = tune(tasks, GPU, bench.store, randomly(trials=60), bench.executor)
    codes = [(job.spec, template_of(job.variant).code_key(job.variant)) for job in bench.pool.submitted]
    assert len(codes) == len(set(codes))
    assert first.measuring_seconds < 0.7 * first.seconds
    for result in rest:
        assert result.measuring_seconds >= 0.8 * result.seconds


def test_time_that_passed_before_or_will_pass_after_is_not_spent_again(bench: Bench) -> None:
    bench.executor = replace(bench.executor, aside_s=8.0)
    start = bench.clock()
    tune([TASK], GPU, bench.store, randomly(trials=1000, seconds=20.0), bench.executor)
    assert 8 <= bench.clock() - start <= 12


def test_processes_that_start_slowly_do_not_exceed_the_budget(bench: Bench) -> None:
    racer = FakeWorker(bench.clock)
    racer.start_cost = bench.worker.start_cost = 7.0
    bench.executor = replace(bench.executor, racer=racer)
    start = bench.clock()
    (result,) = tune([TASK], GPU, bench.store, randomly(trials=1000, seconds=20.0), bench.executor)
    assert bench.clock() - start <= 20.0
    assert result.best is not None


def closely(variant: Variant) -> float:
    """Milliseconds: every variant is a little faster than the default."""
    return 1.0 if variant == DEFAULT else 0.94 + 0.002 * warps(variant)


@pytest.mark.parametrize("why", ["late", "lost", "interrupted"])
def test_without_a_race_a_decided_best_stays_and_is_raced_for_later(bench: Bench, why: str) -> None:
    bench.worker.ms = closely
    (first,) = tune([TASK], GPU, bench.store, randomly(trials=20), bench.executor)
    assert first.best is not None
    assert first.best.verdict is not Verdict.AMBIGUOUS
    assert first.best.variant != DEFAULT
    bench.restart(closely)
    racer = FakeWorker(bench.clock, closely)
    racer.start_cost = 60.0 if why == "late" else 0.0
    racer.fail_next_race = {"lost": JobError("killed"), "interrupted": KeyboardInterrupt()}.get(why)
    bench.executor = replace(bench.executor, racer=racer)
    with pytest.raises(KeyboardInterrupt) if why == "interrupted" else contextlib.nullcontext():
        (second,) = tune([TASK], GPU, bench.store, randomly(trials=22, seconds=8.0), bench.executor)
        assert (second.tried, second.best) == (2, first.best)
    assert bench.store.best_configs() == [first.best]
    bench.restart(closely)
    (third,) = tune([TASK], GPU, bench.store, randomly(trials=22), bench.executor)
    assert (third.tried, len(bench.worker.races) > 0) == (0, True)
    assert third.best is not None
    assert third.best.measured_at > first.best.measured_at


def test_a_far_faster_variant_replaces_the_stored_best_even_without_a_race(bench: Bench) -> None:
    (first,) = tune([TASK], GPU, bench.store, randomly(trials=1), bench.executor)
    assert first.best is not None
    assert (first.best.variant, first.best.verdict) == (DEFAULT, Verdict.TIE)
    bench.restart()
    bench.worker.fail_next_race = JobError("killed")
    (second,) = tune([TASK], GPU, bench.store, randomly(trials=20), bench.executor)
    assert second.best is not None
    assert second.best.verdict is Verdict.AMBIGUOUS
    assert second.best.speedup > 1.5
    assert bench.store.best_configs() == [second.best]


def test_an_interrupt_stores_the_best_so_far(bench: Bench) -> None:
    bench.worker.faults = lambda v: "interrupt" if len(bench.worker.measured) == 10 else ""
    with pytest.raises(KeyboardInterrupt):
        tune([TASK, OTHER], GPU, bench.store, randomly(trials=20), bench.executor)
    (best,) = bench.store.best_configs()
    assert (best.batch, best.verdict) == (str(TASK.batch), Verdict.AMBIGUOUS)
    assert best.timing.median_ms == min(map(landscape, bench.worker.measured[:9]))


def test_a_variant_that_is_lost_in_the_race_is_stored_as_failed_and_races_no_more(bench: Bench, tmp_path: Path) -> None:
    (expected,) = tune([TASK], GPU, Store.open(tmp_path / "other.db"), randomly(trials=20), bench.executor)
    assert expected.best is not None
    fastest = expected.best.variant
    bench.restart()
    bench.worker.race_faults = lambda v: "illegal address" if v == fastest else ""
    (result,) = tune([TASK], GPU, bench.store, randomly(trials=20), bench.executor)
    assert fastest in bench.worker.races[0].variants
    assert result.best is not None
    assert result.best.variant != fastest
    assert result.reasons["failed", "time", "illegal address"] == result.outcomes["failed"] == 1
    assert result.outcomes.total() == result.tried == 20
    assert Failed(fastest, "time", "illegal address") in stored(bench)
    bench.restart()
    (again,) = tune([TASK], GPU, bench.store, randomly(trials=21), bench.executor)
    assert (again.tried, again.outcomes["failed"]) == (1, 1)
    assert all(fastest not in race.variants for race in bench.worker.races)


def counting(counts: Counter[str], name: str, call: Any) -> Any:
    def counted(*given: Any, **named: Any) -> Any:
        counts[name] += 1
        return call(*given, **named)

    return counted


def test_the_database_is_read_once_a_run_and_a_task(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [Task(SPEC, Batch.parse(f"{count}x1@48"), 16) for count in range(1, 8)]
    tune(tasks, GPU, bench.store, randomly(trials=4), bench.executor)
    reads: Counter[str] = Counter()
    for name in ("known_trials", "trials", "best_configs", "full_checks"):
        monkeypatch.setattr(bench.store, name, counting(reads, name, getattr(bench.store, name)))
    bench.restart()
    tune(tasks, GPU, bench.store, randomly(trials=5, cross=True), bench.executor)
    decided = len({race.task for race in bench.worker.races})
    assert decided == len(tasks)
    # Before a best config is written, the present one is read, which another process may have stored.
    assert reads == {"known_trials": len(tasks), "best_configs": 1 + decided}


def test_the_example_of_the_docstring_runs_as_it_stands(tmp_path: Path) -> None:
    assert tune.__doc__ is not None
    example = textwrap.dedent(tune.__doc__[tune.__doc__.index("        from contextlib"):])
    script = tmp_path / "example.py"
    script.write_text(example)
    # The example decides for itself what interprets.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr
    assert Variant.parse(done.stdout.strip()).page_size == 16


def test_the_sampler_chooses_few_variants_before_the_first_result(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Variant | None] = []
    at_first_result: list[int] = []
    ask = Study.ask

    def noted(study: Study) -> Variant | None:
        is_fixed, variant = study.has_first, ask(study)
        if not is_fixed:
            chosen.append(variant)
        return variant

    class Heard(Listener):
        def tried(self, progress: Progress) -> None:
            if progress.done == 1:
                at_first_result.append(len(chosen))

    monkeypatch.setattr(Study, "ask", noted)
    recording = small_recording()
    (found,) = replay(recording, recording.tasks[:1], randomly(trials=30), Heard(), processes=14)
    assert found.result.tried == 30
    assert at_first_result[0] <= 8 < len(chosen)
