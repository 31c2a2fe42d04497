from __future__ import annotations

import itertools
import math
import os
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from recording_samples import CHUNK, DECODE, FASTEST, SPEC, small_recording, unified

from attention_tuner.kernel_templates.gpu import INTERPRETER
from attention_tuner.kernel_templates.outcome import (
    Environment,
    Failed,
    JobError,
    Skipped,
    StaticFacts,
    Timed,
    Timing,
    Wrong,
)
from attention_tuner.kernel_templates.task import Task
from attention_tuner.search_spaces.files import shipped
from attention_tuner.tuner.measure.jobs import MeasureJob, PrepareJob, RaceJob
from attention_tuner.tuner.measure.rates import RatesJob
from attention_tuner.tuner.processes.compile import CompileJob
from attention_tuner.tuner.recording import Recording
from attention_tuner.tuner.replay import (
    NOT_RECORDED,
    Clock,
    RecordedPool,
    RecordedWorker,
    executor_of,
    near,
    replay,
)
from attention_tuner.tuner.run import Executor
from attention_tuner.tuner.sampling.samplers import DEFAULT_SAMPLER
from attention_tuner.tuner.sampling.study import Study
from attention_tuner.tuner.settings import Listener, Progress, Settings, TaskResult

RECORDING = small_recording()
BEST = unified(**FASTEST)
ALL = 54
# The loss after so many trials that a search without leads may have, at most and on average over the seeds.
TRIALS, SEEDS, TOLERATED, TOLERATED_MEAN = 120, 2, 0.02, 0.005


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_all_trials_find_the_optimum(sampler: str) -> None:
    for each in replay(RECORDING, RECORDING.tasks, Settings(trials=ALL, sampler=sampler)):
        assert each.loss == 0
        assert each.result.best is not None
        assert each.result.best.variant == unified(**FASTEST) == each.trials[(each.within() or 0) - 1].variant
        assert each.result.best.measured_at == RECORDING.recorded_at[1]
        assert len({trial.variant for trial in each.trials}) == len(each.trials)


def test_the_same_seed_gives_the_same_search() -> None:
    def trials(seed: int) -> list[tuple[object, ...]]:
        found = replay(RECORDING, [DECODE], Settings(trials=20, sampler="random", seed=seed))
        return [(tuple(t.variant for t in each.trials), each.result.seconds, each.result.best) for each in found]

    assert trials(1) == trials(1)
    assert trials(1) != trials(2)


def test_trials_have_the_recorded_outcomes_and_a_skipped_variant_is_none() -> None:
    (each,) = replay(RECORDING, [DECODE], Settings(trials=ALL, sampler="random"))
    kinds = [type(trial) for trial in each.trials]
    assert kinds.count(Wrong) == 1
    assert kinds.count(Failed) == 2 + (len(each.trials) == ALL)
    assert Skipped not in kinds
    for trial in each.trials:
        if isinstance(trial, Timed):
            assert trial == RECORDING.outcome(DECODE, trial.variant)


def test_compiling_and_measuring_take_the_recorded_seconds() -> None:
    def seconds(processes: int) -> float:
        (each,) = replay(RECORDING, [CHUNK], Settings(trials=ALL, sampler="random"), processes=processes)
        assert each.result.measuring_seconds >= ALL * 0.03125
        return each.result.seconds

    # 18 codes of 3.5 s each.
    assert seconds(1) > 18 * 3.5 > seconds(9) > 2 * 3.5


def test_the_time_limit_counts_simulated_seconds() -> None:
    (each,) = replay(RECORDING, [CHUNK], Settings(trials=ALL, sampler="random", seconds=8.0), processes=2)
    assert 3 <= len(each.trials) < ALL
    assert each.result.seconds <= 8
    (nothing,) = replay(RECORDING, [CHUNK], Settings(seconds=1.0, sampler="random"))
    assert nothing.result.best is None
    assert (nothing.loss, nothing.within(), nothing.trials) == (None, None, ())


def test_a_listener_is_called_as_in_a_run() -> None:
    heard: list[str] = []

    class Ear(Listener):
        def started(self, task: object, valid: int, reused: int) -> None:
            heard.append(f"{valid} valid")

        def tried(self, progress: Progress) -> None:
            heard.append("tried")

        def racing(self, task: object, variants: tuple[object, ...]) -> None:
            heard.append("racing")

        def finished(self, result: TaskResult) -> None:
            heard.append("finished")

    replay(RECORDING, [CHUNK], Settings(trials=5, sampler="random"), Ear())
    assert [what for what, _ in itertools.groupby(heard)] == ["54 valid", "tried", "racing", "finished"]


def test_a_default_that_is_not_recorded_fails_and_the_search_goes_on() -> None:
    held = {v: r for v, r in RECORDING.trials[CHUNK].items() if v.number("num_warps") == 2}
    (each,) = replay(replace(RECORDING, trials={CHUNK: held}), [CHUNK], Settings(trials=30, sampler="random"))
    assert each.loss == 0
    assert [t.reason for t in each.trials if isinstance(t, Failed)] == [NOT_RECORDED]


def test_variants_near_the_optimum_are_counted() -> None:
    assert near(RECORDING, DECODE) == 1
    assert near(RECORDING, DECODE, 1.1) > 1
    assert near(RECORDING, DECODE, 1e9) == 50
    assert near(RECORDING, replace(DECODE, page_size=128)) == 0


def test_a_replay_loads_no_torch_and_leaves_no_database(tmp_path: Path) -> None:
    RECORDING.save(tmp_path / "small.json.gz")
    script = (
        "import sys; from attention_tuner.tuner.recording import Recording; "
        "from attention_tuner.tuner.replay import replay; from attention_tuner.tuner.run import Settings; "
        "recording = Recording.load(sys.argv[1]); "
        "replay(recording, recording.tasks, Settings(trials=5, sampler='random')); "
        "sys.exit(bool({'torch', 'triton'} & sys.modules.keys()))"
    )
    environment = {**os.environ, "ATTENTION_TUNER_DB": str(tmp_path / "tuner.db"), "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "small.json.gz")], check=True, env=environment)
    assert [path.name for path in tmp_path.iterdir()] == ["small.json.gz"]


def test_every_recording_that_ships_can_be_searched() -> None:
    for name in shipped("recordings", (".json.gz", ".json")):
        recording = Recording.load(name)
        for each in replay(recording, recording.tasks, Settings(trials=20, sampler="random")):
            assert len(each.trials) >= 20, (name, each.result.task)
            assert not [t for t in each.trials if isinstance(t, Failed) and t.reason == NOT_RECORDED]
            assert each.result.best is not None
            assert each.result.best.speedup >= 1, (name, each.result.task)


def finals(recording: Recording, task: Task, sampler: str, seeds: int) -> list[float]:
    """The ratio of the best of so many trials to the optimum, by seed, in searches without leads."""
    optimum = recording.optimum(task)
    assert optimum is not None
    found: list[float] = []
    for seed in range(seeds):
        study, best_ms = Study(recording.variants(task), sampler=sampler, seed=seed), math.inf
        for _ in range(TRIALS):
            variant = study.ask()
            assert variant is not None
            outcome = recording.outcome(task, variant)
            assert outcome is not None
            study.tell(outcome)
            if isinstance(outcome, Timed):
                best_ms = min(best_ms, outcome.timing.median_ms)
        found.append(best_ms / optimum.timing.median_ms)
    return found


def test_the_sampler_comes_near_recorded_optima_without_leads_where_chance_does_not() -> None:
    recording = Recording.load("h200_llama_3_8b")
    task = recording.tasks[5]
    found, chance = (finals(recording, task, sampler, SEEDS) for sampler in (DEFAULT_SAMPLER, "random"))
    assert max(found) <= 1 + TOLERATED, found
    assert statistics.mean(found) <= 1 + TOLERATED_MEAN < statistics.mean(chance), (found, chance)
    assert max(chance) > 1 + TOLERATED, chance


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def worker(clock: Clock) -> RecordedWorker:
    return RecordedWorker(RECORDING, clock)


def compile_job(**values: int) -> CompileJob:
    return CompileJob(unified(**values), SPEC, RECORDING.gpu, DECODE.batch)


def test_the_clock_advances_only_when_a_result_is_asked_for(clock: Clock, worker: RecordedWorker) -> None:
    first = worker.submit(MeasureJob(DECODE, BEST, 5), 10.0)
    second = worker.submit(MeasureJob(CHUNK, BEST, 5), 10.0)
    ends: list[float] = []
    second.add_done_callback(lambda _: ends.append(clock()))
    assert clock() == 0
    assert second.result() == RECORDING.outcome(CHUNK, BEST)
    assert ends == [clock()] == [0.0625]
    # It ended before.
    assert first.result() == RECORDING.outcome(DECODE, BEST)
    assert (clock(), worker.busy_s) == (0.0625, 0.0625)


def test_every_kind_of_outcome_is_answered(worker: RecordedWorker) -> None:
    found = [worker.submit(MeasureJob(DECODE, v, 5), 10.0).result() for v in RECORDING.variants(DECODE)]
    assert sum(isinstance(each, Wrong) for each in found) == 1
    assert sorted(each.reason for each in found if isinstance(each, Failed)) == [
        "RuntimeError: PassManager::run failed", "its shared memory exceeds the GPU's", "killed by SIGSEGV"]
    unknown = unified(block_m=128)
    assert worker.submit(MeasureJob(DECODE, unknown, 5), 10.0).result() == Failed(unknown, "check", NOT_RECORDED)
    assert worker.submit(PrepareJob(DECODE), 10.0).result() == 0
    with pytest.raises(JobError, match="RatesJob is not recorded"):
        worker.submit(RatesJob(), 10.0)


def test_a_job_that_would_end_after_the_deadline_is_interrupted(clock: Clock, worker: RecordedWorker) -> None:
    cut = worker.submit(MeasureJob(DECODE, BEST, 5), 10.0, deadline=0.02)
    assert isinstance(cut.result(), Failed)
    assert (clock(), worker.busy_s) == (0.02, 0.02)
    race = worker.submit(RaceJob(DECODE, (BEST, unified(num_warps=1)), 13), 10.0, deadline=0.03)
    with pytest.raises(JobError, match="the time was up"):
        race.result()
    assert clock() == 0.03


def test_a_race_draws_from_the_recorded_samples(clock: Clock, worker: RecordedWorker) -> None:
    wrong = next(v for v in RECORDING.variants(DECODE) if isinstance(RECORDING.outcome(DECODE, v), Wrong))
    job = RaceJob(DECODE, (BEST, wrong), 13, seed=1)
    result = worker.submit(job, 10.0).result()
    timing, outcome = result.timings[BEST], RECORDING.outcome(DECODE, BEST)
    assert isinstance(timing, Timing)
    assert isinstance(outcome, Timed)
    assert len(timing.samples_ms) == 13
    assert set(timing.samples_ms) <= set(outcome.timing.samples_ms)
    assert len(set(timing.samples_ms)) > 1
    assert result.timings[wrong] == Failed(wrong, "time", NOT_RECORDED)
    assert result.is_steady
    assert clock() > 0.03125
    assert RecordedWorker(RECORDING, Clock()).submit(job, 10.0).result() == result
    assert worker.submit(replace(job, seed=2), 10.0).result() != result


def test_each_process_compiles_one_code_at_a_time(clock: Clock) -> None:
    pool = RecordedPool(RECORDING, clock, 2)
    jobs = [compile_job(num_warps=w, block_n=n) for w, n in ((1, 16), (2, 16), (4, 16))]
    for job in jobs:
        pool.submit(job)
    assert pool.results(0.0) == []
    assert pool.results(0.5) == []
    assert clock() == 0.5
    assert [(build.job, build.seconds) for build in pool.results(60.0)] == [(job, 3.5) for job in jobs[:2]]
    assert (clock(), pool.full_seconds) == (3.5, 3.5)
    assert [build.job for build in pool.results(60.0)] == jobs[2:]
    # One of the two was idle.
    assert (clock(), pool.full_seconds) == (7.0, 3.5)
    assert pool.results(60.0) == []
    assert clock() == 7


def test_forgetting_empties_the_queue_and_lets_running_compiles_end(clock: Clock) -> None:
    pool = RecordedPool(RECORDING, clock, 1)
    first, second = compile_job(num_warps=1), compile_job(num_warps=4)
    pool.submit(first)
    pool.submit(second)
    assert pool.cancel_queued() == [second]
    assert [build.job for build in pool.results(60.0)] == [first]
    pool.submit(second)
    assert [build.job for build in pool.results(60.0)] == [second]
    assert clock() == 7


def test_the_recorded_facts_or_failure_are_answered(clock: Clock) -> None:
    pool = RecordedPool(RECORDING, clock, 4)
    failed = compile_job(block_m=32, num_segments=8, num_warps=1)
    unknown = compile_job(block_m=128)
    for job in (compile_job(), failed, unknown):
        pool.submit(job)
    found = {build.job: build.result for _ in range(3) for build in pool.results(60.0)}
    facts = found[compile_job()]
    assert isinstance(facts, StaticFacts)
    assert facts.registers == 64
    assert found[failed] == RECORDING.outcome(DECODE, failed.variant)
    assert found[unknown] == Failed(unknown.variant, "compile", NOT_RECORDED)


def test_the_executor_has_what_a_run_needs() -> None:
    executor: Executor = executor_of(RECORDING, 3)
    assert executor.pool is not None
    assert executor.pool.processes == 3
    assert executor.environment_of("unified", RECORDING.gpu) == RECORDING.environments["unified"]
    assert executor.environment_of("fused", RECORDING.gpu) == Environment("", "", "", RECORDING.gpu.driver)
    executor.start(3)
    assert executor.worker.ready(0.0)
    executor.close()
    interpreted: Recording = replace(RECORDING, gpu=INTERPRETER)
    assert executor_of(interpreted).pool is None
