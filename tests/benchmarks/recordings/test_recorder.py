from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
from fakes import FACTS, GPU, Bench, FakeWorker, environment
from grid_samples import SMALL
from grids import Grid, GridPart
from ground_truth import grid_tasks, recording_of
from recorder import Recorder

from attention_tuner.kernel_templates.errors import InputError
from attention_tuner.kernel_templates.gpu import INTERPRETER, TARGETS
from attention_tuner.kernel_templates.outcome import Failed, Skipped, StaticFacts, Timed, Wrong
from attention_tuner.kernel_templates.registry import code_of, templates
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.tuner.measure.jobs import MeasureJob, PrepareJob
from attention_tuner.tuner.recording import Recording
from attention_tuner.tuner.settings import Settings

TASKS = grid_tasks(SMALL, GPU)
TRIALS = sum(map(len, TASKS.values()))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, cost=0.05)


def record(bench: Bench, seconds: float = math.inf) -> tuple[int, list[str]]:
    told: list[str] = []
    return Recorder(SMALL, bench.run(Settings(), seconds=seconds), told.append).record(), told


def recording(bench: Bench) -> Recording:
    return recording_of(SMALL, GPU, bench.store, bench.run(Settings()).regime, environment)


def measured(worker: FakeWorker) -> list[MeasureJob]:
    return [job for job in worker.jobs if isinstance(job, MeasureJob)]


def test_every_variant_is_measured_once_and_every_code_compiled_once(bench: Bench) -> None:
    missing, told = record(bench)
    assert missing == 0
    jobs = measured(bench.worker)
    assert sorted(repr((j.task, j.variant)) for j in jobs) == sorted(
        repr((task, variant)) for task, variants in TASKS.items() for variant in variants)  # fmt: skip
    codes = [code_of(job.variant) for job in bench.pool.submitted]
    assert len(codes) == len(set(codes)) == len({code_of(v) for variants in TASKS.values() for v in variants})
    # The shared inputs are made first.
    assert [type(job) for job in bench.worker.jobs[:3]] == [PrepareJob] * 3
    assert f"{len(codes)} codes to compile for {TRIALS} trials; 0 of {TRIALS} are stored" in told[0]
    assert f"{TRIALS} trials made ({TRIALS} timed), 0 missing" in told[-1]
    made = recording(bench)
    assert {task: set(made.variants(task)) for task in made.tasks} == {t: set(v) for t, v in TASKS.items()}
    recorded = [one for trials in made.trials.values() for one in trials.values()]
    assert {round(one.seconds, 6) for one in recorded} == {0.05}
    assert {one.compile_s for one in recorded} == {bench.pool.cost}
    assert all(one.facts == FACTS for one in recorded)


def test_later_variants_are_compared_with_the_best_of_their_task(bench: Bench) -> None:
    record(bench)
    for task in TASKS:
        jobs = [job for job in measured(bench.worker) if job.task == task]
        times = [bench.worker.ms(job.variant) for job in jobs]
        best = [min(times[:count], default=None) for count in range(len(jobs))]
        # The best when a job is queued: the last measurements may not have ended.
        assert jobs[0].rival_ms is None
        assert jobs[-1].rival_ms in best[-5:]
        assert best[-1] is not None


def test_every_kind_of_outcome_is_recorded(bench: Bench) -> None:
    fails, exceeds, wrong, hangs = sorted({code_of(v): v for v in TASKS[next(iter(TASKS))]}.values(), key=repr)[:4]

    def facts(variant: Variant) -> StaticFacts | Failed:
        if code_of(variant) == code_of(fails):
            return Failed(variant, "compile", "RuntimeError: no")
        return StaticFacts(10**6, 255, 64) if code_of(variant) == code_of(exceeds) else FACTS

    bench.pool.facts = facts
    bench.worker.faults = lambda v: "wrong" if v == wrong else "killed by SIGSEGV" if v == hangs else ""
    missing, _ = record(bench)
    assert missing == 0
    made = recording(bench)
    task = made.tasks[0]
    kinds = {v: made.outcome(task, v) for v in made.variants(task)}
    for variant, outcome in kinds.items():
        expected = (Failed if code_of(variant) == code_of(fails) or variant == hangs
                    else Skipped if code_of(variant) == code_of(exceeds) else Wrong if variant == wrong else Timed)
        assert isinstance(outcome, expected), variant
        assert outcome.variant == variant
    assert isinstance(kinds[hangs], Failed)
    assert kinds[hangs].stage == "time"  # pyright: ignore
    assert made.recorded(task, fails) is not None


def test_a_recording_that_was_cut_short_goes_on_where_it_ended(bench: Bench) -> None:
    missing, told = record(bench, seconds=0.8)
    assert 0 < missing < TRIALS
    assert f"{missing} missing" in told[-1]
    first = measured(bench.worker)
    assert len(first) >= TRIALS - missing
    kept = recording(bench)
    bench.restart(cost=0.05)
    assert record(bench)[0] == 0
    assert len(measured(bench.worker)) == missing
    whole = recording(bench)
    for task, trials in kept.trials.items():
        assert {v: whole.recorded(task, v) for v in trials} == trials
    assert sum(len(trials) for trials in whole.trials.values()) == TRIALS
    bench.restart()
    assert record(bench)[0] == 0
    assert not bench.worker.jobs
    assert not bench.worker.starts


def test_time_that_is_up_before_the_first_trial_is_no_error(bench: Bench) -> None:
    bench.worker.start_cost = 2.0
    assert record(bench, seconds=1.0)[0] == TRIALS
    assert not bench.worker.jobs


def test_costs_are_noted_when_the_run_is_interrupted(bench: Bench) -> None:
    bench.worker.faults = lambda v: "interrupt" if v.template == "fused" else ""
    with pytest.raises(KeyboardInterrupt):
        record(bench)
    made = recording(bench)
    assert Counter(v.template for task in made.tasks for v in made.variants(task)).keys() == {"unified"}
    assert all(one.seconds > 0 for trials in made.trials.values() for one in trials.values())


def test_through_the_interpreter_nothing_is_compiled(tmp_path: Path) -> None:
    bench = Bench(tmp_path, cost=0.05)
    bench.executor = bench.executor.__class__(bench.worker, None, environment, bench.clock)
    run = bench.run(Settings(), gpu=INTERPRETER)
    assert Recorder(SMALL, run, lambda _: None).record() == 0
    made = recording_of(SMALL, INTERPRETER, bench.store, run.regime, environment)
    assert all(one.facts is None and one.compile_s == 0 for each in made.trials.values() for one in each.values())
    assert not bench.pool.submitted


def test_a_grid_without_a_variant_for_this_gpu_is_refused(bench: Bench) -> None:
    gluon = {"block_n": (64,), "num_stages": (2,), "registers": (240,)}
    whole = {d.name: d.choices[:1] for d in templates()["gluon_hopper"].dimensions} | gluon
    only = Grid("hopper", SMALL.spec, (GridPart(16, SMALL.parts[0].batches, {"gluon_hopper": whole}),))
    with pytest.raises(InputError, match="no variant of grid 'hopper' is valid on sm_80"):
        Recorder(only, bench.run(Settings(), gpu=TARGETS["sm_80"]), lambda _: None).record()
