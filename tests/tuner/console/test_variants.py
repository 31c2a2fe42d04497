from __future__ import annotations

import functools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from cli_samples import BATCH, SMALL_GPU, SPEC, WIDE_SPEC, Lines, config, database

from attention_tuner.db import Store
from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.gpu import INTERPRETER
from attention_tuner.kernel_templates.heuristic import default_variant
from attention_tuner.kernel_templates.launch import device
from attention_tuner.kernel_templates.outcome import CaseResult, Check, Failed, Regime, Timed, Timing, Wrong
from attention_tuner.kernel_templates.sources import environment
from attention_tuner.search_spaces import space
from attention_tuner.tuner.full_check.checks import FullCheckJob
from attention_tuner.tuner.measure.jobs import MeasureJob
from attention_tuner.tuner.processes.worker import Worker

SHAPE = ("--spec", SPEC.key(), "--batch", str(BATCH))
DEFAULT = default_variant(SPEC, BATCH, 16)
TIMING = Timing((1.0, 2.0, 3.0), Regime("interpreter"))


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Lines:
    return Lines(capsys)


@pytest.fixture
def small_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two templates of the installed ones: all together have 86,000 variants."""
    few = functools.partial(space.survey, names=("unified", "two_launch"))
    monkeypatch.setattr(space, "survey", few)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[MeasureJob]:
    """The jobs that reach the worker, which answers that the variant is right and took 2 ms."""
    given: list[MeasureJob] = []

    def run(_: Worker, job: MeasureJob, timeout_s: float) -> Timed:
        given.append(job)
        return Timed(job.variant, Check(0.5, detail="row 1"), TIMING)

    monkeypatch.setattr(Worker, "run", run)
    return given


@pytest.mark.usefixtures("small_space")
def test_generate_lists_the_variants_and_counts_the_rest(lines: Lines) -> None:
    assert lines.run("generate", *SHAPE, "--gpu", "sm_90", "--limit", "4") == 0
    assert len(lines.out.splitlines()) == 4
    assert all(line.startswith("unified:page_size=16,") for line in lines.out.splitlines())
    assert "rejected because TMA needs pages that its key tiles divide" in lines.err


@pytest.mark.parametrize("command", ["check", "bench"])
def test_a_default_that_cannot_run_is_told_with_the_reason(
    command: str, lines: Lines, jobs: list[MeasureJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "present_gpu", lambda: SMALL_GPU)
    assert lines.run(command, "--spec", WIDE_SPEC.key(), "--batch", str(BATCH)) == 2
    assert f"cannot run layer {WIDE_SPEC.key()!r} on NVIDIA L40S" in lines.err
    assert "its tiles exceed the GPU's shared memory; name another with --variant" in lines.err
    assert lines.err.count("\n") == 1
    assert jobs == []


@pytest.mark.usefixtures("small_space")
def test_generate_covers_every_page_size_and_batch(lines: Lines) -> None:
    more = ("--batch", "2x1@48", "--page-size", "16,64")
    assert lines.run("generate", *SHAPE, *more, "--gpu", "sm_90", "--json", "--limit", "1") == 0
    shapes = json.loads(lines.out)["shapes"]
    assert [(shape["batch"], shape["page_size"]) for shape in shapes] == [
        (str(BATCH), 16), (str(BATCH), 64), ("2x1@48", 16), ("2x1@48", 64)]
    assert shapes[0]["valid"] < shapes[1]["valid"]


def test_generate_with_nothing_valid_is_status_1_with_the_reasons(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = space.Survey((), Counter({"it is too large": 3}))
    monkeypatch.setattr(space, "survey", lambda *_: nothing)
    assert lines.run("generate", *SHAPE) == 1
    assert "rejected were 3 because it is too large" in lines.err
    assert lines.err.count("\n") == 1


def test_check_runs_the_default_once(lines: Lines, jobs: list[MeasureJob]) -> None:
    assert lines.run("check", *SHAPE, "--seed", "7", "--gpu", "interpreter") == 0
    (job,) = jobs
    assert (job.variant, job.samples, job.seed) == (DEFAULT, 1, 7)
    assert "right; the worst row: row 1" in lines.out
    assert "ms" not in lines.out


def test_bench_times_the_variant_that_is_named(lines: Lines, jobs: list[MeasureJob]) -> None:
    named = DEFAULT.replace(block_n=64)
    assert lines.run("bench", *SHAPE, "--variant", named.key(), "--samples", "3", "--gpu", "interpreter") == 0
    assert (jobs[0].variant, jobs[0].samples) == (named, 3)
    assert "2 ms" in lines.out
    assert "nothing about a GPU" in lines.err


def test_bench_times_in_the_regime_that_is_asked_for(lines: Lines, jobs: list[MeasureJob]) -> None:
    for flags in ([], ["--warm"], ["--eager"], ["--eager", "--warm"]):
        assert lines.run("bench", *SHAPE, *flags, "--gpu", "interpreter") == 0
    assert [str(job.regime) for job in jobs] == [
        "graph-cold-burst", "graph-warm-burst", "eager-cold-burst", "eager-warm-burst"]


def test_bench_times_the_best_that_is_stored(lines: Lines, jobs: list[MeasureJob], tmp_path: Path) -> None:
    path = database(tmp_path, config())
    arguments = (*SHAPE, "--stored", "--db", path, "--gpu", "interpreter")
    assert lines.run("bench", *arguments, "--json") == 0
    assert jobs[0].variant == config().variant
    assert json.loads(lines.out)["time"]["median_ms"] == 2.0


def test_bench_refuses_when_nothing_is_stored(lines: Lines, jobs: list[MeasureJob], tmp_path: Path) -> None:
    path = database(tmp_path, config())
    arguments = ("--spec", SPEC.key(), "--batch", "64x1@9000", "--stored", "--db", path, "--gpu", "interpreter")
    assert lines.run("bench", *arguments) == 2
    assert "tune it first" in lines.err
    assert jobs == []


@pytest.mark.parametrize("outcome", [Wrong(DEFAULT, Check(9.0, detail="row 3")), Failed(DEFAULT, "check", "it died")])
@pytest.mark.parametrize("command", ["check", "bench"])
def test_a_variant_that_is_wrong_or_fails_is_status_1(
    command: str, outcome: Wrong | Failed, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Worker, "run", lambda *_: outcome)
    assert lines.run(command, *SHAPE, "--gpu", "interpreter", "--json") == 1
    assert json.loads(lines.out)["outcome"] == type(outcome).__name__.lower()
    assert lines.run(command, *SHAPE, "--gpu", "interpreter") == 1
    assert ("row 3" in lines.out) != ("it died" in lines.out)


def test_a_model_of_several_layers_needs_one_of_them(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    both = (SPEC, config().shape.spec.parse("num_q_heads=4,num_kv_heads=4,head_dim=64"))
    monkeypatch.setattr("attention_tuner.search_spaces.models.model_layers", lambda *_: dict.fromkeys(both, 1))
    assert lines.run("check", "--model", "two-kinds") == 2
    assert all(layer.key() in lines.err for layer in both)


def test_what_the_interpreter_would_take_too_long_for_is_refused_with_the_estimate(
    lines: Lines, jobs: list[MeasureJob]
) -> None:
    arguments = ("--model", "llama-3-8b", "--batch", "1x8192@0", "--gpu", "interpreter")
    for command in ("check", "bench"):
        assert lines.run(command, *arguments) == 2
        assert "1x8192@0" in lines.err
        assert "about" in lines.err
    assert jobs == []


def test_the_real_worker_checks_and_times(lines: Lines) -> None:
    assert INTERPRETER.is_interpreter
    assert lines.run("bench", *SHAPE, "--samples", "2", "--gpu", "interpreter", "--json") == 0
    document = json.loads(lines.out)
    assert document["outcome"] == "timed"
    assert document["check"]["worst_ratio"] <= 1
    assert len(document["time"]["samples_ms"]) == 2
    assert document["time"]["regime"]["capture"] == "interpreter"


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> list[FullCheckJob]:
    """The cases that reach the worker, where variants with 64 keys a tile fail one."""
    given: list[FullCheckJob] = []

    def run(_: Worker, job: FullCheckJob, timeout_s: float) -> CaseResult:
        given.append(job)
        is_wrong = job.case.name == "verification" and job.variant.number("block_n") == 64
        return CaseResult(job.case.name, "failed" if is_wrong else "passed", 0.5, "row 3" if is_wrong else "")

    monkeypatch.setattr(Worker, "run", run)
    return given


def test_the_full_check_of_the_default_is_run_and_stored(
    lines: Lines, cases: list[FullCheckJob], tmp_path: Path
) -> None:
    path = str(tmp_path / "a.db")
    assert lines.run("check", "--full", "--spec", SPEC.key(), "--gpu", "interpreter", "--db", path, "--json") == 0
    (document,) = json.loads(lines.out)["checks"]
    assert document["passed"]
    states = {case["name"]: case["state"] for case in document["cases"]}
    assert states["large logits"] == "passed"
    assert states["thousands of sequences"] == "not run"
    with Store.open(path, create=False) as store:
        (stored,) = store.full_checks()
    assert stored.passed
    assert stored.variant.key() == document["variant"]


def test_best_configs_are_checked_once_and_are_provisional_no_longer(
    lines: Lines, cases: list[FullCheckJob], tmp_path: Path
) -> None:
    fresh = environment(DEFAULT.template, INTERPRETER)
    path = database(tmp_path, *(
        replace(config(batch=Batch.parse(batch), full_check=False), environment=fresh, variant=DEFAULT)
        for batch in (str(BATCH), "2x1@48")))
    arguments = ("check", "--full", "--best", "--gpu", "interpreter", "--db", path)
    assert lines.run(*arguments) == 0
    assert "1 of 1 variant passed" in lines.out
    assert {job.variant for job in cases} == {DEFAULT}
    with Store.open(path, create=False) as store:
        assert [best.full_check for best in store.best_configs()] == [True, True]
    cases.clear()
    assert lines.run(*arguments) == 0
    assert "has passed" in lines.out
    assert cases == []


def test_a_full_check_that_fails_is_status_1_and_names_the_case(
    lines: Lines, cases: list[FullCheckJob], tmp_path: Path
) -> None:
    path = database(tmp_path)
    bad = DEFAULT.replace(block_n=64)
    arguments = ("--full", "--spec", SPEC.key(), "--variant", bad.key(), "--gpu", "interpreter", "--db", path)
    assert lines.run("check", *arguments) == 1
    assert f"{bad.key()} failed 'verification': row 3" in lines.out
    with Store.open(path, create=False) as store:
        assert [check.passed for check in store.full_checks()] == [False]


def test_seeds_of_a_full_check_can_be_others(lines: Lines, cases: list[FullCheckJob], tmp_path: Path) -> None:
    arguments = ("--full", "--spec", SPEC.key(), "--gpu", "interpreter", "--db", str(tmp_path / "a.db"))
    assert lines.run("check", *arguments, "--seed", "7") == 0
    assert {job.case.seed for job in cases} == {7, 8, 9}
