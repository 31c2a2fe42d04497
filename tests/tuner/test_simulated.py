from __future__ import annotations

from dataclasses import replace

import pytest
from recording_samples import CHUNK, DECODE, FASTEST, SPEC, small_recording, unified

from attention_tuner.kernel_templates.gpu import INTERPRETER
from attention_tuner.kernel_templates.outcome import Environment, Failed, JobError, StaticFacts, Timed, Timing, Wrong
from attention_tuner.tuner.measure.jobs import MeasureJob, PrepareJob, RaceJob
from attention_tuner.tuner.measure.rates import RatesJob
from attention_tuner.tuner.processes.compile import CompileJob
from attention_tuner.tuner.recording import Recording
from attention_tuner.tuner.run import Executor
from attention_tuner.tuner.simulated import NOT_RECORDED, Clock, RecordedPool, RecordedWorker, executor_of

RECORDING = small_recording()
BEST = unified(**FASTEST)


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
