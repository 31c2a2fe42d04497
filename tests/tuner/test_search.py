from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fakes import DEFAULT, FACTS, GPU, SPEC, TASK, Bench, FakePool, landscape, warps

from attention_tuner.db.records import Setting, utc_now
from attention_tuner.kernel_templates.batch import Batch, BatchBucket, Shape
from attention_tuner.kernel_templates.gpu import INTERPRETER
from attention_tuner.kernel_templates.heuristic import candidates, heuristic_variant
from attention_tuner.kernel_templates.outcome import (
    BestConfig,
    Check,
    Environment,
    Failed,
    JobError,
    Outcome,
    Regime,
    Timed,
    Timing,
    Verdict,
)
from attention_tuner.kernel_templates.registry import template_of
from attention_tuner.kernel_templates.task import Task
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.search_spaces.space import survey
from attention_tuner.tuner.costs import HANG_FACTOR, HANG_S, Costs
from attention_tuner.tuner.leads import proven
from attention_tuner.tuner.measure.jobs import MeasureJob, PrepareJob
from attention_tuner.tuner.run import Executor
from attention_tuner.tuner.search import (
    EXCEEDS_SHARED_MEMORY,
    FEWEST_TIMED,
    INTERPRETED_SAMPLES,
    PROVEN_SHARE,
    PendingMeasurement,
    Search,
)
from attention_tuner.tuner.settings import Budget, Listener, Progress, Settings

# The sampler that chooses in the least time; these tests are not about samplers.
randomly = functools.partial(Settings, sampler="random")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def searched(bench: Bench, settings: Settings | None = None, deadline: float = math.inf, task: Task = TASK) -> Search:
    """A search that has as much time as the whole run."""
    search = Search(task, replace(bench.run(settings or randomly(trials=20)), budget=Budget(deadline)))
    search.reuse()
    search.try_variants(deadline)
    return search


def test_the_default_then_neighbours_then_the_likely_come_first(bench: Bench) -> None:
    near = survey(SPEC, BatchBucket.of(TASK.batch), TASK.page_size, GPU).valid[77]
    timing = Timing((1.0,), Regime("graph"))
    shape = Shape.of(SPEC, Batch.parse("3x1@900"))
    bench.store.put_best(
        BestConfig(shape, GPU, near, timing, timing, Verdict.FAST, True, Environment("old", "", "", ""), "3x1@900",
                   utc_now())
    )  # fmt: skip
    searched(bench)
    likely = [v for v in candidates(SPEC, BatchBucket.of(TASK.batch), TASK.page_size, GPU) if v != near]
    valid = survey(SPEC, BatchBucket.of(TASK.batch), TASK.page_size, GPU).valid
    expected = [DEFAULT, near, *(v for v in dict.fromkeys(likely) if v in valid and v != DEFAULT)]
    assert bench.worker.measured[:2] == expected[:2]
    # All are compiled at once, and what is compiled first is measured first.
    assert set(bench.worker.measured[: len(expected)]) == set(expected[:20])


def test_each_variant_is_measured_once_and_stored_with_what_the_compiler_said(bench: Bench) -> None:
    search = searched(bench)
    assert len(bench.worker.measured) == len(set(bench.worker.measured)) == 20
    setting = Setting(SPEC, TASK.batch, TASK.page_size, GPU, Regime("graph"))
    records = bench.store.known_trials(setting, bench.executor.environment_of).reusable
    assert {record.outcome.variant for record in records} == set(bench.worker.measured) == set(search.timed)
    assert all(record.facts == FACTS for record in records)
    assert (search.result.tried, search.result.reused, search.result.outcomes["timed"]) == (20, 0, 20)


def test_a_search_that_goes_on_measures_nothing_again(bench: Bench) -> None:
    first = searched(bench, randomly(trials=12))
    bench.restart()
    second = searched(bench, randomly(trials=20))
    assert not set(first.timed) & set(bench.worker.measured)
    assert (second.result.reused, second.result.tried) == (12, 8)
    bench.restart()
    third = searched(bench, randomly(trials=20))
    assert bench.worker.measured == []
    assert third.timed == second.timed
    assert third.baseline == DEFAULT


def test_trials_of_another_environment_are_reported_and_measured_again(bench: Bench) -> None:
    searched(bench, randomly(trials=6))
    bench.restart()
    newer = lambda template, gpu: Environment("other", "3.9", "2.13", "")  # noqa: E731
    bench.executor = replace(bench.executor, environment_of=newer)
    search = searched(bench, randomly(trials=6))
    assert search.result.reused == 0
    assert search.result.outdated.total() == 6
    assert len(bench.worker.measured) == 6


def test_variants_that_share_code_are_compiled_once(bench: Bench) -> None:
    searched(bench, randomly(trials=150))
    codes = [template_of(v).code_key(v) for v in bench.worker.measured]
    assert len(set(codes)) < len(codes)
    assert len(bench.pool.submitted) == len({template_of(j.variant).code_key(j.variant) for j in bench.pool.submitted})


def test_a_variant_that_exceeds_the_shared_memory_is_skipped_and_is_no_trial(bench: Bench) -> None:
    big = GPU.shared_memory_bytes + 1
    bench.pool.facts = lambda v: replace(FACTS, shared_bytes=big) if v.number("block_n") == 128 else FACTS
    search = searched(bench, randomly(trials=40))
    assert search.result.skipped > 0
    assert search.result.reasons["skipped", "", EXCEEDS_SHARED_MEMORY] == search.result.skipped
    assert all(v.number("block_n") != 128 for v in bench.worker.measured)
    assert search.result.tried == len(bench.worker.measured) == 40


def test_a_failed_compile_counts_for_every_variant_that_shares_the_code(bench: Bench) -> None:
    bench.pool.facts = lambda v: Failed(v, "compile", "abort") if warps(v) == 1 else FACTS
    search = searched(bench, randomly(trials=60))
    assert search.result.reasons["failed", "compile", "abort"] == search.result.outcomes["failed"] > 0
    assert all(warps(v) > 1 for v in bench.worker.measured)
    assert search.result.tried == 60


def test_outcomes_are_counted_by_reason_and_reported(bench: Bench) -> None:
    faults = {1: "wrong", 2: "illegal address"}
    bench.worker.faults = lambda v: faults.get(v.number("num_stages"), "")
    told: list[Progress] = []

    class Told(Listener):
        def tried(self, progress: Progress) -> None:
            told.append(progress)

    search = Search(TASK, bench.run(randomly(trials=30), listener=Told()))
    search.reuse()
    search.try_variants(math.inf)
    stages = Counter(v.number("num_stages") for v in bench.worker.measured)
    assert search.result.reasons == {
        key: count
        for key, count in {
            ("wrong", "", "wrong result"): stages[1],
            ("failed", "time", "illegal address"): stages[2],
        }.items()
        if count
    }
    assert [progress.done for progress in told] == list(range(1, 31))
    assert told[-1].best_ms == min(map(landscape, search.timed))
    assert told[-1].default_ms == landscape(DEFAULT)
    assert told[-1].outcomes == search.result.outcomes


def test_it_ends_before_a_trial_that_would_end_late(bench: Bench) -> None:
    start = bench.clock()
    searched(bench, randomly(trials=1000), start + 10)
    assert 9 <= bench.clock() - start <= 10
    assert len(bench.worker.measured) >= 17


def test_a_variant_is_not_blamed_for_a_budget_that_ran_out(bench: Bench) -> None:
    bench.worker.faults = lambda v: "hang" if len(bench.worker.measured) == 5 else ""
    start = bench.clock()
    search = searched(bench, randomly(trials=1000), start + 10)
    assert bench.clock() - start == pytest.approx(10)
    assert search.result.outcomes == {"timed": 4}


def test_a_task_whose_share_is_short_still_times_a_few(bench: Bench) -> None:
    bench.worker.start_cost = 4.0
    run = replace(bench.run(randomly(trials=1000)), budget=Budget(bench.clock() + 100))
    search = Search(TASK, run)
    search.reuse()
    start = bench.clock()
    search.try_variants(start + 1)
    # One more was under way.
    assert FEWEST_TIMED <= search.result.outcomes["timed"] <= FEWEST_TIMED + 1
    assert search.baseline == DEFAULT
    assert bench.clock() - start <= 1 + Budget().overrun_s


def test_a_hang_in_a_short_share_does_not_take_much_longer(bench: Bench) -> None:
    bench.worker.faults = lambda v: "hang"
    search = Search(TASK, replace(bench.run(randomly(trials=1000)), budget=Budget(bench.clock() + 100)))
    search.reuse()
    start = bench.clock()
    search.try_variants(start + 1)
    assert bench.clock() - start == pytest.approx(1 + Budget().overrun_s)
    assert search.result.outcomes == {}


def test_a_variant_that_hangs_is_blamed(bench: Bench) -> None:
    bench.worker.faults = lambda v: "hang" if v == DEFAULT else ""
    search = searched(bench, randomly(trials=5))
    assert search.result.outcomes == {"timed": 4, "failed": 1}
    # Then what was to be tried next stands in for the default.
    assert search.baseline == heuristic_variant(SPEC, BatchBucket.of(TASK.batch), TASK.page_size, GPU)


def test_a_hang_is_recognised_by_the_time_of_other_trials(bench: Bench) -> None:
    bench.worker.faults = lambda v: "hang" if len(bench.worker.measured) == 3 else ""
    start = bench.clock()
    search = searched(bench, randomly(trials=10, ahead=8))
    assert search.result.outcomes == {"timed": 9, "failed": 1}
    # Half a second each, and the one that hangs.
    assert bench.clock() - start == pytest.approx(9 * 0.5 + HANG_S + HANG_FACTOR * 0.5, abs=1)


def test_compiling_and_measuring_overlap(bench: Bench) -> None:
    start = bench.clock()
    search = searched(bench, randomly(trials=40))
    seconds = bench.clock() - start
    # 40 trials of half a second, and only the first compile is waited for.
    assert seconds == pytest.approx(20.2, abs=0.5)
    assert search.result.measuring_seconds == pytest.approx(20)
    bench.restart(cost=0.01)
    bench.pool.cost = 2.0
    searched(bench, randomly(trials=120))
    assert bench.pool.full_seconds >= 0.8 * (bench.clock() - 100.0)


def test_the_interpreter_compiles_nothing_ahead_and_takes_few_samples(bench: Bench) -> None:
    bench.executor = replace(bench.executor, pool=None)
    search = Search(TASK, bench.run(randomly(trials=6), INTERPRETER))
    search.reuse()
    search.try_variants(math.inf)
    assert bench.pool.submitted == []
    assert search.result.outcomes == {"timed": 6}
    assert all(t.regime == Regime("interpreter") for t in search.timed.values())
    assert all(len(t.samples_ms) == INTERPRETED_SAMPLES for t in search.timed.values())
    others: set[Variant] = set(search.timed) - {DEFAULT}
    assert DEFAULT in search.timed
    assert others


def test_the_gpu_measures_the_next_while_a_trial_is_stored(bench: Bench) -> None:
    begun: list[int] = []

    class Told(Listener):
        def tried(self, progress: Progress) -> None:
            begun.append(len(bench.worker.measured))

    bench.pool.cost = 0.01
    Search(TASK, bench.run(randomly(trials=6, ahead=6), listener=Told())).try_variants(math.inf)
    assert begun == [2, 3, 4, 5, 6, 6]


def test_shared_inputs_are_prepared_while_the_first_variants_are_compiled(bench: Bench) -> None:
    waiting: list[Variant] = []
    submitted: list[Variant] = []
    run = bench.worker.run

    def noted(job: Any, timeout_s: float, deadline: float = math.inf) -> Any:
        if isinstance(job, PrepareJob):
            waiting.extend(search._compiling)
            submitted.extend(job.variant for job in bench.pool.submitted)
        return run(job, timeout_s, deadline)

    bench.worker.run = noted
    search = Search(TASK, bench.run(randomly(trials=30, seed=7)))
    search.try_variants(math.inf)
    assert bench.worker.jobs[0] == PrepareJob(TASK, 7, Regime("graph"))
    assert len(waiting) == min(search.run.most_ahead, len(search._first))
    assert {template_of(v).code_key(v) for v in submitted} == {template_of(v).code_key(v) for v in waiting}


def test_a_worker_that_does_not_start_in_time_ends_the_search(bench: Bench) -> None:
    bench.worker.start_cost = 30.0
    start = bench.clock()
    search = searched(bench, randomly(trials=5), start + 10)
    assert bench.clock() - start == pytest.approx(10)
    assert bench.worker.jobs == []
    assert search.result.outcomes == {}


@pytest.mark.parametrize(("settings", "expected"), [(randomly(trials=100), 14), (randomly(trials=100, ahead=3), 3)])
def test_as_many_variants_are_compiled_ahead_as_the_run_says(bench: Bench, settings: Settings, expected: int) -> None:
    bench.pool = FakePool(bench.clock, processes=7)
    bench.executor = replace(bench.executor, pool=bench.pool)
    search = Search(TASK, bench.run(settings))
    search.choose_ahead()
    assert len(search._compiling) == expected


def test_each_trial_knows_the_best_so_far_and_the_code(bench: Bench) -> None:
    bench.pool.facts = lambda v: replace(FACTS, code_hash=f"code {warps(v)}")
    searched(bench, randomly(trials=12))
    jobs = [job for job in bench.worker.jobs if isinstance(job, MeasureJob)]
    assert jobs[0].rival_ms is None
    best = math.inf
    for job, after in itertools.pairwise(jobs):
        # The outcome of the one before is not yet noted when the next one begins.
        assert after.rival_ms in (None, best, min(best, landscape(job.variant)))
        best = min(best, landscape(job.variant))
    assert jobs[-1].rival_ms == min(landscape(job.variant) for job in jobs[:-2])
    assert {job.code for job in jobs} == {f"code {warps(job.variant)}" for job in jobs}


def test_variants_with_one_result_are_counted(bench: Bench) -> None:
    bench.worker.twin_of = DEFAULT
    search = searched(bench, randomly(trials=16))
    twins = [v for v in bench.worker.measured if warps(v) == warps(DEFAULT) and v != DEFAULT]
    assert search.result.repeated == len(twins) > 0
    assert search.same_as == dict.fromkeys(twins, DEFAULT)
    assert search.result.outcomes == {"timed": 16}


NEAR = Task(SPEC, Batch.parse("2x1@60"), TASK.page_size)


def test_proven_variants_keep_the_gpu_busy_while_the_rest_is_compiled(bench: Bench) -> None:
    run = bench.run(randomly(trials=60))
    first = Search(NEAR, run)
    first.try_variants(math.inf)
    measured = list(bench.worker.measured)
    bench.pool.cost = 5.0
    start, submitted = bench.clock(), len(bench.pool.submitted)
    second = Search(TASK, run)
    second.try_variants(math.inf)
    again = bench.worker.measured[len(measured) :]
    assert second.result.tried == len(again) == len(set(again)) == 60
    shared = [v for v in again if v in measured]
    assert 20 <= len(shared) < 60
    assert max(map(again.index, shared[:20])) < 25
    # The rest is what the sampler chose, and had to be compiled.
    assert len(bench.pool.submitted) > submitted
    assert second.result.measuring_seconds >= 0.6 * (bench.clock() - start)


def with_many_processes(bench: Bench) -> Bench:
    bench.pool = FakePool(bench.clock, processes=14)
    bench.executor = replace(bench.executor, pool=bench.pool)
    return bench


def test_choosing_ahead_leaves_trials_to_proven_variants(bench: Bench) -> None:
    run = with_many_processes(bench).run(randomly(trials=30))
    Search(NEAR, run).try_variants(math.inf)
    search = Search(TASK, run)
    search.learn()
    search.choose_ahead()
    left = int(PROVEN_SHARE * (30 - len(search._first)))
    assert len(search._proven) == left > 0
    assert len(search._compiling) == min(len(search._first), 30 - left)
    search.try_variants(math.inf)
    assert search.result.tried == 30


def test_proven_variants_get_no_trials_that_are_used_already(bench: Bench) -> None:
    run = with_many_processes(bench).run(randomly(trials=30))
    Search(NEAR, run).try_variants(math.inf)
    # Another seed, so that not the same variants are asked for.
    search = Search(TASK, replace(run, settings=replace(run.settings, seed=1)))
    search.choose_ahead()
    assert len(search._compiling) == len(search._first) > run.ahead == 7
    search.try_variants(math.inf)
    assert search.result.tried == 30


def test_a_stored_winner_that_was_found_meanwhile_is_tried_next(bench: Bench) -> None:
    search = Search(TASK, bench.run(randomly(trials=30, ahead=4)))
    search.choose_ahead()
    winner = survey(SPEC, BatchBucket.of(TASK.batch), TASK.page_size, GPU).valid[-1]
    timing = Timing((1.0,), Regime("graph"))
    search.run.history.put_best(NEAR,
        BestConfig(Shape.of(SPEC, NEAR.batch), GPU, winner, timing, timing, Verdict.FAST, True,
                   Environment("old", "", "", ""), str(NEAR.batch), utc_now()))  # fmt: skip
    search.try_variants(math.inf)
    assert bench.worker.measured.index(winner) == 4
    assert search.neighbours == (winner,)


def test_a_search_leaves_nothing_queued_for_the_next(bench: Bench) -> None:
    bench.pool.cost = 1.0
    searched(bench, randomly(trials=100, ahead=40), bench.clock() + 5)
    assert len(bench.pool.queue) <= bench.pool.processes


def test_a_crash_is_stored_before_another_process_is_waited_for(bench: Bench) -> None:
    bench.worker.faults = lambda v: "crash" if len(bench.worker.measured) == 3 else ""
    search = Search(TASK, bench.run(randomly(trials=6)))
    ready, seen = bench.worker.ready, list[int]()

    def noted(limit_s: float) -> bool:
        seen.append(bench.store.trial_counts()["failed"])
        return ready(limit_s)

    bench.worker.ready = noted
    search.try_variants(math.inf)
    # The preparation, and then six trials.
    assert seen == [0, 0, 0, 0, 1, 1, 1]


def test_waiting_for_a_process_or_the_gpu_does_not_count_as_measuring(bench: Bench) -> None:
    bench.worker.start_cost = 5.0
    bench.worker.wait_cost = 3.0
    assert searched(bench, randomly(trials=10)).result.measuring_seconds == pytest.approx(5.0)


def test_a_result_that_is_there_before_its_callback_is_timed(bench: Bench) -> None:
    submit = bench.worker.submit

    def late(job: Any, timeout_s: float, deadline: float = math.inf) -> Any:
        future = submit(job, timeout_s, deadline)
        future.add_done_callback = lambda call: None
        return future

    bench.worker.submit = late
    assert searched(bench, randomly(trials=4)).costs.trial_s == pytest.approx(0.5)


def test_only_new_trials_count_as_repeated(bench: Bench) -> None:
    bench.worker.twin_of = DEFAULT
    first = searched(bench, randomly(trials=16))
    bench.restart()
    again = searched(bench, randomly(trials=16))
    assert (first.result.repeated > 0, again.result.repeated) == (True, 0)
    assert again.result.reused == 16


def test_the_cost_of_a_trial_ignores_variants_that_take_over_a_time(bench: Bench) -> None:
    bench.worker.twin_of = DEFAULT
    search = searched(bench, randomly(trials=16))
    assert search.result.repeated > 0
    assert list(search.costs._recent) == pytest.approx([0.5] * len(search.costs._recent))


def test_no_trials_are_kept_for_first_variants_that_are_stored(bench: Bench) -> None:
    run = bench.run(randomly(trials=60))
    Search(NEAR, run).try_variants(math.inf)
    few = Search(TASK, replace(run, settings=randomly(trials=20)))
    few.try_variants(math.inf)
    more = Search(TASK, run)
    more.reuse()
    assert set(more._first) <= set(more.timed)
    run.timed.pop(TASK)
    more.learn()
    known = proven(TASK, run)
    assert len(more._proven) == min(len(known), int(PROVEN_SHARE * 40)) > PROVEN_SHARE * (40 - len(more._first))


def test_kernels_are_counted_for_the_task_that_they_are_compiled_for(bench: Bench) -> None:
    run = bench.run(randomly(trials=12))
    counts: list[tuple[int, int]] = []
    for task in (TASK, replace(TASK, batch=Batch.parse("3x1@90"))):
        search = Search(task, run)
        search.try_variants(math.inf)
        result = search.result
        assert result.compiles + result.shared == result.tried == 12
        counts.append((result.compiles, result.shared))
    assert counts[1][0] < counts[0][0]
    assert counts[0][0] + counts[1][0] == len(bench.pool.submitted)


def test_a_search_over_some_variants_tries_these_in_their_order_and_ends(bench: Bench) -> None:
    valid = survey(SPEC, BatchBucket.of(TASK.batch), TASK.page_size, GPU).valid
    only = [valid[500], valid[3], valid[77]]
    search = Search(TASK, bench.run(randomly(trials=9)), only)
    search.try_variants(math.inf)
    assert bench.worker.measured == only
    assert set(search.timed) == set(only)
    assert search.baseline == only[0]


def test_when_the_time_of_the_run_is_over_no_space_is_searched(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    first = searched(bench, randomly(trials=12))
    # It may take a second, which many batches of a run whose time is over would add up.
    monkeypatch.setattr("attention_tuner.tuner.search.survey", None)
    late = searched(bench, randomly(trials=20), deadline=-math.inf)
    assert (late.result.tried, late.result.reused) == (0, 12)
    assert set(late.timed) == set(first.timed)


TIMED = Timed(DEFAULT, Check(0.5), Timing((1.0,), Regime("graph")))
FAILED = Failed(DEFAULT, "time", "it hung")
TOOK_S, BUSY_S = 4.0, 3.0


def measured(end: Callable[[Future[Outcome]], None], deadline: float = math.inf) -> PendingMeasurement:
    """One whose job ended after `TOOK_S` seconds, as `end` says."""
    worker = SimpleNamespace(busy_s=1.0)
    executor = SimpleNamespace(worker=worker, clock=lambda: 10.0)
    future: Future[Outcome] = Future()
    worker.submit = lambda *_: future
    made = PendingMeasurement(cast(Executor, executor), MeasureJob(TASK, DEFAULT, 3), 60.0, deadline)
    worker.busy_s += BUSY_S
    executor.clock = lambda: 10.0 + TOOK_S
    end(future)
    # What the search does until it looks is not the trial's.
    executor.clock = lambda: 100.0
    return made


def test_a_measurement_finishes_with_its_outcome_and_its_cost() -> None:
    noted: list[Any] = []
    costs = cast(Costs, SimpleNamespace(note=lambda *values: noted.append(values)))
    finished = measured(lambda future: future.set_result(TIMED))
    assert finished.finish(costs) is TIMED
    assert noted == [(TIMED, TOOK_S, BUSY_S)]
    assert finished.busy_s == BUSY_S


@pytest.mark.parametrize(("deadline", "expected"), [(10.0 + TOOK_S, None), (10.1 + TOOK_S, FAILED)])
def test_no_variant_is_to_blame_for_a_budget_that_ran_out(deadline: float, expected: Failed | None) -> None:
    assert measured(lambda future: future.set_result(FAILED), deadline).finish(Costs(TASK, False)) is expected


def test_a_job_that_never_got_the_gpu_has_no_outcome() -> None:
    ended = measured(lambda future: future.set_exception(JobError("the GPU was taken")))
    with pytest.raises(JobError):
        ended.finish(Costs(TASK, False))
    assert ended.busy_s == BUSY_S
