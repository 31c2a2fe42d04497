from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from cli_samples import H100, SPEC, config

from attention_tuner.db import Store
from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.errors import InputError, NothingValidError
from attention_tuner.kernel_templates.gpu import INTERPRETER, Gpu
from attention_tuner.kernel_templates.outcome import CaseResult, Environment, FullCheck, JobError
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.tuner.full_check import checks as full_checks
from attention_tuner.tuner.full_check import run as full_check_run
from attention_tuner.tuner.full_check.cases import FRESH_PROCESSES, Case, cases_of
from attention_tuner.tuner.full_check.checks import FullCheckJob, SanitizeJob, Subject, run_full_checks, subjects_of
from attention_tuner.tuner.processes.child import Context, Job
from attention_tuner.tuner.processes.compile import CompileJob

ONE = Subject(SPEC, config().variant)
TWO = Subject(SPEC, config().variant.replace(block_n=64))
FUSED = Subject(SPEC, config().variant.replace(block_n=128))
CASE = Case("verification", Batch.parse("1x16@32"))
NOW = Environment("hash", "3.9", "2.13", "")


def never(job: Job[Any]) -> Any:
    raise AssertionError(f"{job} must not run again")


class FakePool:
    """Has compiled at once what is submitted."""

    jobs: ClassVar[list[CompileJob]] = []

    def __init__(self) -> None:
        self.pending = 0
        FakePool.jobs = []

    def submit(self, job: CompileJob) -> None:
        self.jobs.append(job)
        self.pending += 1

    def results(self, wait_s: float) -> list[Any]:
        self.pending -= 1
        return []

    def __enter__(self) -> FakePool:
        return self

    def __exit__(self, *_: object) -> None:
        assert not self.pending


def now(template: str, gpu: Gpu) -> Environment:
    return NOW


class FakeWorker:
    """Passes every case, save those that `failing` names for a variant."""

    def __init__(self) -> None:
        self.jobs: list[Any] = []
        self.failing: dict[Subject, str] = {}
        self.is_started = False

    def run(self, job: Any, timeout_s: float) -> CaseResult:
        self.jobs.append(job)
        name = job.case.name if isinstance(job, FullCheckJob) else "compute-sanitizer"
        if self.failing.get(Subject(job.spec, job.variant)) == name:
            return CaseResult(name, "failed", reason="it hung")
        return CaseResult(name, "passed", 0.5)

    def start(self) -> None:
        self.is_started = True

    def free(self) -> None:
        pass

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[FakeWorker]:
    made: list[FakeWorker] = []
    failing: dict[Subject, str] = {}

    def on(_: Gpu) -> FakeWorker:
        made.append(FakeWorker())
        made[-1].failing = failing
        return made[-1]

    monkeypatch.setattr(full_checks.Worker, "on", on)
    monkeypatch.setattr(full_checks, "CompilePool", FakePool)
    full = FakeWorker()
    full.failing = failing
    made.append(full)
    return made


def test_one_process_runs_each_case_for_all_variants_before_the_next(workers: list[FakeWorker]) -> None:
    started: list[list[Subject]] = []
    checks = list(run_full_checks([ONE, TWO], INTERPRETER, now, starting=lambda s: started.append(list(s))))
    assert started == [[ONE, TWO]]
    jobs = workers[1].jobs
    assert [job.variant for job in jobs] == [ONE.variant, TWO.variant] * (len(jobs) // 2)
    assert [job.case for job in jobs[::2]] == [job.case for job in jobs[1::2]]
    assert [check.variant for check in checks] == [ONE.variant, TWO.variant]
    for check in checks:
        assert (check.passed, check.gpu_name, check.environment) == (True, INTERPRETER.name, NOW)
        expected = [case.name for case in cases_of(SPEC, ONE.variant)]
        assert [case.name for case in check.cases][: len(expected)] == expected
        assert {case.reason for case in check.cases if case.state == "not run"} >= {"it needs a GPU"}
        assert check.cases[-1].name == "compute-sanitizer"


def test_a_variant_that_failed_runs_no_further_case(workers: list[FakeWorker]) -> None:
    workers[0].failing[ONE] = "verification"
    one, two = run_full_checks([ONE, TWO], INTERPRETER, now)
    assert one.failure == one.cases[-1] == CaseResult("verification", "failed", reason="it hung")
    assert two.passed
    assert len(two.cases) > len(one.cases)


def test_on_a_gpu_there_are_fresh_processes_and_a_sample_is_sanitized(workers: list[FakeWorker]) -> None:
    checks = list(run_full_checks([ONE, TWO], H100, now))
    _, worker, *fresh = workers
    assert len(fresh) == FRESH_PROCESSES
    assert all(each.is_started for each in fresh)
    # All code is compiled before, the log-sum-exp's too.
    assert [(job.variant, job.lse) for job in FakePool.jobs] == [
        (ONE.variant, False), (ONE.variant, True), (TWO.variant, False), (TWO.variant, True)]
    assert [[job.variant for job in each.jobs] for each in fresh] == [[ONE.variant, TWO.variant]] * FRESH_PROCESSES
    assert [job.variant for job in worker.jobs if isinstance(job, SanitizeJob)] == [ONE.variant]
    assert [check.cases[-1].state for check in checks] == ["passed", "not run"]
    assert {case.name for case in checks[0].cases if case.state == "not run"} == {
        "offsets past 2^31 in the partial results"}


def test_groups_are_of_one_layer_and_page_size_and_bounded(
    workers: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Subject(AttentionSpec(4, 2, 64), ONE.variant)
    monkeypatch.setattr(full_checks, "GROUP", 2)
    started: list[list[Subject]] = []
    checks = run_full_checks([ONE, other, TWO, FUSED], INTERPRETER, now, starting=lambda s: started.append(list(s)))
    next(checks)
    assert started == [[ONE, TWO]]
    assert len(list(checks)) == 3
    assert started == [[ONE, TWO], [FUSED], [other]]


def test_what_is_too_large_is_refused_before_anything_runs(workers: list[FakeWorker]) -> None:
    large = Subject(AttentionSpec(512, 512, 128), ONE.variant)
    with pytest.raises(InputError, match="too large for Triton's interpreter"):
        list(run_full_checks([ONE, large], INTERPRETER, now))
    assert len(workers) == 1


def test_subjects_are_the_best_that_have_not_passed_here(tmp_path: Path) -> None:
    one = config(full_check=False)
    again = replace(config(batch=Batch.parse("2x1@48"), full_check=False), variant=one.variant)
    other = config(H100)
    with Store.open(tmp_path / "a.db") as store:
        with pytest.raises(NothingValidError, match="tune first"):
            subjects_of(store, INTERPRETER, now)
        store.put_best(one, again, other)
        assert subjects_of(store, INTERPRETER, now) == [ONE]
        assert subjects_of(store, INTERPRETER, now, [SPEC]) == [ONE]
        with pytest.raises(NothingValidError):
            subjects_of(store, INTERPRETER, now, [AttentionSpec(4, 2, 64)])
        passed = (CaseResult("x", "passed"),)
        store.put_full_check(FullCheck(SPEC, one.variant, INTERPRETER.name, one.environment, passed, "2026"))
        assert subjects_of(store, INTERPRETER, now) == [ONE]
        store.put_full_check(FullCheck(SPEC, one.variant, INTERPRETER.name, NOW, passed, "2027"))
        assert subjects_of(store, INTERPRETER, now) == []


def test_a_full_check_job_is_picklable_and_its_variant_is_to_blame() -> None:
    job = FullCheckJob(SPEC, ONE.variant, CASE)
    assert pickle.loads(pickle.dumps(job)) == job
    blamed = JobError("killed by SIGSEGV", "verification", ONE.variant)
    assert job.result_after(blamed, never) == CaseResult("verification", "failed", reason="killed by SIGSEGV")
    with pytest.raises(JobError, match="no reference"):
        job.result_after(JobError("no reference", "reference"), never)


def test_the_reference_of_a_case_is_kept_for_the_next_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Case] = []
    said: list[Any] = []
    monkeypatch.setattr(full_check_run, "make_checker", lambda spec, page, case, device: made.append(case) or object())
    monkeypatch.setattr(full_check_run, "run_case", lambda variant, case, gpu, checker: CaseResult(case.name, "passed"))
    context = Context(True, said.append)
    for variant in (ONE.variant, TWO.variant):
        assert FullCheckJob(SPEC, variant, CASE).run(context).state == "passed"
    assert made == [CASE]
    assert [(stage.name, stage.variant) for stage in said] == [
        ("reference", None), ("verification", ONE.variant), ("reference", None), ("verification", TWO.variant)]
    FullCheckJob(SPEC, ONE.variant, Case("other", CASE.batch)).run(context)
    assert len(made) == 2


def test_a_variant_is_sanitized_with_nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[object] = []
    context = Context(True, lambda _: None)
    context.cached("x", object)
    monkeypatch.setattr(full_check_run, "sanitize",
                        lambda *_: kept.append(dict(context._cache)) or CaseResult("compute-sanitizer", "passed"))
    assert SanitizeJob(SPEC, ONE.variant).run(context).state == "passed"
    assert kept == [{}]
