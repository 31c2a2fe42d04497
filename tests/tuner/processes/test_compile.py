from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import DEFAULT, FACTS, GPU, TASK, Clock, FakePool
from job_faults import FaultyCompile, wait_until

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.gpu import TARGETS
from attention_tuner.kernel_templates.heuristic import default_variant
from attention_tuner.kernel_templates.outcome import Failed, StaticFacts
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.task import Task
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.tuner.processes.compile import (
    NICENESS,
    Build,
    Builds,
    CompileJob,
    CompilePool,
    FullTime,
    default_processes,
    prune,
    triton_cache,
)

SPEC, BATCH, SM_90 = AttentionSpec(8, 2, 64), Batch.parse("1x16@32,2x1@40"), TARGETS["sm_90"]
TWIN = DEFAULT.replace(num_segments=2)
SAME_LAYER = Task(SPEC, Batch.parse("3x1@900"), TASK.page_size)
OTHER_LAYER = Task(AttentionSpec(16, 2, 64), TASK.batch, TASK.page_size)


def job(fault: str, number: int = 0) -> FaultyCompile:
    return FaultyCompile(Variant.of("toy", 16, {"fault": fault, "number": number}), SPEC, SM_90, BATCH)


def collect(pool: CompilePool, jobs: Sequence[CompileJob]) -> list[Build]:
    for each in jobs:
        pool.submit(each)
    collected: list[Build] = []
    deadline = time.monotonic() + 120
    while pool.pending:
        assert time.monotonic() < deadline
        collected += pool.results(wait_s=1)
    return collected


def test_every_failure_is_one_variants() -> None:
    jobs = [job("abort"), job("none", 1), job("raise"), job("endless"), job("none", 2)]
    with CompilePool(2, limit_s=2, preload=("job_faults",)) as pool:
        results = {build.job: build.result for build in collect(pool, jobs)}
    outcomes = [results[each] for each in jobs]
    assert [outcome.reason if isinstance(outcome, Failed) else "" for outcome in outcomes] == [
        "killed by SIGABRT: LLVM ERROR: cannot select",
        "",
        "RuntimeError: no such instruction",
        "gave no result within 2 s",
        "",
    ]
    assert all(o.stage == "compile" and o.variant == j.variant
               for o, j in zip(outcomes, jobs, strict=True) if isinstance(o, Failed))


def test_a_compile_that_exceeds_its_limit_once_is_tried_again(tmp_path: Path) -> None:
    slow_once = job(f"hang once {tmp_path / 'begun'}")
    with CompilePool(1, limit_s=3, preload=("job_faults",)) as pool:
        (build,) = collect(pool, [slow_once])
    assert isinstance(build.result, StaticFacts), build
    # Both tries count.
    assert build.seconds >= 3


def test_one_process_compiles_in_the_order_of_submission() -> None:
    jobs = [job("none", number) for number in range(5)]
    with CompilePool(1) as pool:
        assert [build.job for build in collect(pool, jobs)] == jobs


def test_processes_work_side_by_side_at_low_priority(tmp_path: Path) -> None:
    file = tmp_path / "go"
    with CompilePool(2) as pool:
        jobs = [job(f"wait for {file}", number) for number in range(2)]
        for each in jobs:
            pool.submit(each)
        wait_until(lambda: all(child.pid is not None for child in pool._children))
        wait_until(lambda: pool.full_seconds > 0)
        file.touch()
        # Stand-in facts: the process, and its niceness.
        facts = [build.result for build in collect(pool, [])]
        busy_s = pool.full_seconds
        collect(pool, [job("none")])
        assert pool.full_seconds == busy_s
    assert all(isinstance(one, StaticFacts) and one.registers == min(19, os.nice(0) + NICENESS) for one in facts)
    assert len({one.shared_bytes for one in facts if isinstance(one, StaticFacts)}) == 2


def test_no_result_is_waited_for_longer_than_asked_and_closing_waits_for_none() -> None:
    with CompilePool(2) as pool:
        assert pool.results(wait_s=5) == []
        pool.submit(job("endless"))
        assert pool.results(wait_s=0.1) == []
        pool.submit(job("none"))
        assert [build.job for build in pool.results(wait_s=60)] == [job("none")]
        assert pool.pending == 1
        pool.submit(job("endless", 1))


@pytest.mark.parametrize(("cores", "processes"), [(1, 1), (2, 1), (16, 14)])
def test_two_of_the_cores_that_the_process_may_use_are_left(
    cores: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert default_processes() == processes


def test_a_variant_is_compiled_into_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    variant = default_variant(SPEC, BATCH, 16)
    with CompilePool(1) as pool:
        (build,) = collect(pool, [CompileJob(variant, SPEC, SM_90, BATCH)])
    facts = build.result
    assert isinstance(facts, StaticFacts), facts
    assert facts.registers
    assert facts.stack_bytes is not None
    assert list(triton_cache().glob("*/*.cubin"))


def test_a_queued_job_can_be_cancelled_and_a_begun_one_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "go"
    with CompilePool(1) as pool:
        begun = job(f"wait for {file}")
        pool.submit(begun)
        wait_until(pool._idle.empty)
        for number in range(3):
            pool.submit(job("none", number))
        assert pool.cancel_queued() == [job("none", number) for number in range(3)]
        assert pool.pending == 1
        file.touch()
        assert [build.job for build in collect(pool, [job("none", 9)])] == [begun, job("none", 9)]


def test_as_many_processes_start_as_there_is_work() -> None:
    with CompilePool(14, preload=("sqlite3",)) as pool:
        pool.start(2)
        pids = [child.pid for child in pool._children]
        assert len(set(pids) - {None}) == 2
        collect(pool, [job("none", number) for number in range(2)])
        assert [child.pid for child in pool._children] == pids
    with CompilePool(14) as pool:
        for number in range(3):
            collect(pool, [job("none", number)])
        # One after the other, they need one process.
        assert len({child.pid for child in pool._children} - {None}) == 1


def test_the_time_during_which_all_are_busy_is_added_up() -> None:
    now = 0.0
    full = FullTime(2, lambda: now)
    with full.one_busy():
        now += 1
        with full.one_busy():
            now += 2
            assert full.seconds == 2
            now += 3
        now += 4
        with full.one_busy():
            now += 5
    now += 6
    assert full.seconds == 10


def test_code_is_compiled_once_for_all_batches_of_a_layer_and_for_each_layer() -> None:
    pool = FakePool(Clock())
    builds = Builds(pool, GPU)
    builds.request(TASK, DEFAULT)
    builds.request(TASK, TWIN)
    builds.request(SAME_LAYER, TWIN)
    assert [job.variant for job in pool.submitted] == [DEFAULT]
    assert builds.result(SAME_LAYER, TWIN) is None
    builds.collect(1.0)
    assert builds.result(SAME_LAYER, TWIN) == FACTS
    assert builds.result(OTHER_LAYER, DEFAULT) is None
    builds.request(SAME_LAYER, DEFAULT)
    assert len(pool.submitted) == 1
    builds.request(OTHER_LAYER, DEFAULT)
    assert pool.submitted[1].spec == OTHER_LAYER.spec
    pool.facts = lambda variant: replace(FACTS, registers=7)
    builds.collect(1.0)
    assert builds.result(OTHER_LAYER, TWIN) == replace(FACTS, registers=7)
    assert builds.result(TASK, TWIN) == FACTS


def test_a_failure_is_of_the_variant_that_is_asked_about() -> None:
    pool = FakePool(Clock())
    pool.facts = lambda variant: Failed(variant, "compile", "abort")
    builds = Builds(pool, GPU)
    builds.request(TASK, DEFAULT)
    builds.collect(1.0)
    assert builds.result(TASK, TWIN) == Failed(TWIN, "compile", "abort")


def test_a_cancelled_compile_can_be_requested_again_and_a_begun_one_is_not_repeated() -> None:
    pool = FakePool(Clock(), processes=1)
    builds = Builds(pool, GPU)
    other = DEFAULT.replace(num_warps=8)
    builds.request(TASK, DEFAULT)
    builds.request(TASK, other)
    pool.clock.spend(0.1)
    builds.cancel_queued()
    builds.request(TASK, DEFAULT)
    builds.request(TASK, other)
    assert [job.variant for job in pool.submitted] == [DEFAULT, other, other]
    pool.clock.spend(1)
    builds.collect(0)
    assert builds.result(TASK, DEFAULT) == builds.result(TASK, other) == FACTS


def test_only_the_first_request_for_a_code_is_new() -> None:
    builds = Builds(FakePool(Clock()), GPU)
    assert builds.request(TASK, DEFAULT)
    assert not builds.request(TASK, DEFAULT)
    assert not builds.request(SAME_LAYER, TWIN)
    assert builds.request(OTHER_LAYER, DEFAULT)


def entry(folder: Path, name: str, size: int, age: int) -> Path:
    path = folder / name
    path.mkdir()
    (path / "kernel.cubin").write_bytes(b"x" * size)
    os.utime(path, (1_000_000 - age, 1_000_000 - age))
    return path


def test_the_oldest_entries_go_until_half_is_left(tmp_path: Path) -> None:
    entries = [entry(tmp_path, name, 100, age) for name, age in (("new", 1), ("oldest", 9), ("old", 5), ("older", 7))]
    assert prune(tmp_path, limit_bytes=399) == 300
    assert [path.exists() for path in entries] == [True, False, False, False]


def test_a_cache_within_its_bound_is_left_alone(tmp_path: Path) -> None:
    path = entry(tmp_path, "one", 100, 1)
    assert prune(tmp_path, limit_bytes=100) == 0
    assert path.exists()


def test_a_cache_that_is_not_there_needs_no_pruning(tmp_path: Path) -> None:
    assert prune(tmp_path / "none") == 0


def test_files_that_are_no_entries_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "lock").write_bytes(b"x" * 100)
    assert prune(tmp_path, limit_bytes=1) == 0
    assert (tmp_path / "lock").exists()


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert triton_cache() == tmp_path / "attention-tuner" / "triton"
