from __future__ import annotations

import functools
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from cli_samples import BATCH, H100, SPEC, Lines, config
from recording_samples import CHUNK, DECODE, small_recording
from recording_samples import SPEC as RECORDED_SPEC

from attention_tuner.db import ConfigTable, Store, write_misses
from attention_tuner.kernel_templates.batch import BatchBucket
from attention_tuner.kernel_templates.errors import InputError
from attention_tuner.kernel_templates.gpu import INTERPRETER, Gpu
from attention_tuner.kernel_templates.launch import device
from attention_tuner.kernel_templates.outcome import JobError, Wrong
from attention_tuner.kernel_templates.task import Task
from attention_tuner.tuner import costs
from attention_tuner.tuner.console.options import Batches
from attention_tuner.tuner.console.tune import print_results, recorded_tasks
from attention_tuner.tuner.measure.gpu_state import GpuProcess
from attention_tuner.tuner.measure.rates import Rates, RatesJob, floor_ms
from attention_tuner.tuner.processes import compile
from attention_tuner.tuner.processes.worker import Worker
from attention_tuner.tuner.run import Executor
from attention_tuner.tuner.settings import Listener, Settings, TaskResult

LAYER = ("--spec", SPEC.key())


@dataclass
class Search:
    """Stands in for the search: keeps what it was given and finds `result` for every task."""

    result: Callable[[Task, Gpu], TaskResult]
    tasks: Sequence[Task] = ()
    gpu: Gpu | None = None
    settings: Settings = field(default_factory=Settings)
    executor: Executor | None = None

    def __call__(
        self, tasks: Sequence[Task], gpu: Gpu, store: Store, settings: Settings, executor: Executor, listener: Listener
    ) -> list[TaskResult]:
        self.tasks, self.gpu, self.settings, self.executor = tasks, gpu, settings, executor
        return [self.result(task, gpu) for task in tasks]


def found(task: Task, gpu: Gpu) -> TaskResult:
    return TaskResult(task, config(gpu, task.batch, ms=0.5), config().variant, Counter(timed=3), tried=3, seconds=2.0)


def nothing(task: Task, gpu: Gpu) -> TaskResult:
    reasons = Counter({("wrong", "", "wrong result"): 2, ("failed", "time", "hung"): 1})
    return TaskResult(task, outcomes=Counter(wrong=2, failed=1), reasons=reasons, tried=3)


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lines:
    monkeypatch.setenv("ATTENTION_TUNER_DB", str(tmp_path / "tuner.db"))
    monkeypatch.setattr(device, "present_gpu", lambda: None)
    return Lines(capsys)


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Search:
    search = Search(found)
    monkeypatch.setattr("attention_tuner.tuner.tune.tune", search)
    return search


def test_without_a_gpu_small_batches_run_through_the_interpreter_and_it_says_so(lines: Lines, search: Search) -> None:
    assert lines.run("tune", "--model", "llama-3-8b") == 0
    assert search.gpu == INTERPRETER
    assert [str(task.batch) for task in search.tasks] == ["1x16@32,2x1@40", "2x1@48", "1x4@44"]
    assert {task.page_size for task in search.tasks} == {16}
    assert (search.settings.trials, search.settings.seconds) == (12, 120.0)
    assert search.executor is not None
    assert search.executor.pool is None
    assert "regime interpreter" in lines.err
    assert "nothing about a GPU" in lines.out


def test_with_a_gpu_the_suite_of_serving_is_tuned_there(
    lines: Lines, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "present_gpu", lambda: H100)
    monkeypatch.setattr(Worker, "ready", lambda *_: True)
    monkeypatch.setattr(Worker, "run", lambda *_: Rates(4.0, 700.0))
    assert lines.run("tune", *LAYER, "--page-size", "16,128") == 0
    assert search.gpu == H100
    assert len(search.tasks) == 16
    assert (search.settings.trials, search.settings.seconds) == (30, None)
    assert search.executor is not None
    assert search.executor.pool is not None
    assert search.executor.racer is not None
    assert search.executor.racer is not search.executor.worker
    assert "of floor" in lines.out
    assert "interpreter" not in lines.out + lines.err


def test_what_is_asked_for_reaches_the_search(lines: Lines, search: Search) -> None:
    options = ["--trials", "3", "--seconds", "9.5", "--seed", "5", "--sampler", "random", "--page-size", "32"]
    assert lines.run("tune", *LAYER, "--batch", str(BATCH), "--batch", "2x1@48", *options) == 0
    assert search.settings == Settings(trials=3, seconds=9.5, seed=5, sampler="random")
    assert [str(task) for task in search.tasks] == [str(Task(SPEC, b, 32)) for b in (BATCH, BATCH.parse("2x1@48"))]


def test_of_a_mixed_model_both_kinds_are_tuned_and_named(lines: Lines, search: Search) -> None:
    features = ("--kv-dtype", "float8_e4m3fn", "--q-dtype", "float8_e5m2", "--tree")
    options = ("--tp", "8", *features, "--batch", "1x4@44", "--seconds", "9999")
    assert lines.run("tune", "--model", "gpt-oss-20b", *options) == 0
    assert [task.spec.sliding_window for task in search.tasks] == [128, None]
    assert all(task.spec.has_sinks and task.spec.kv_dtype == "float8_e4m3fn" for task in search.tasks)
    assert all(task.spec.q_dtype == "float8_e5m2" and task.spec.has_tree_mask for task in search.tasks)
    windowed, full = (task.spec.key() for task in search.tasks)
    assert (f"gpt-oss-20b has 2 kinds of attention layers, and each is tuned: sliding_attention ({windowed}) and "
            f"full_attention ({full})\n") in lines.err


@pytest.mark.parametrize(("flags", "regime"), [
    ([], "graph-cold-burst"), (["--warm"], "graph-warm-burst"), (["--eager"], "eager-cold-burst"),
    (["--warm", "--eager"], "eager-warm-burst"),
])
def test_the_regime_is_that_of_serving_unless_another_is_asked_for(
    flags: list[str], regime: str, lines: Lines, search: Search
) -> None:
    assert lines.run("tune", *LAYER, "--batch", str(BATCH), *flags) == 0
    assert str(search.settings.regime) == regime
    # Through the interpreter there is only one, and that is what is told.
    assert "regime interpreter-cold-burst" in lines.out


def test_the_end_says_what_was_found_where_it_is_and_how_to_look_it_up(
    lines: Lines, search: Search, tmp_path: Path
) -> None:
    assert lines.run("tune", *LAYER, "--batch", str(BATCH)) == 0
    assert "2.00x" in lines.out
    assert f"stored in {tmp_path / 'tuner.db'}" in lines.out
    command = lines.out.splitlines()[-1].partition("attention-tuner ")[2]
    assert lines.run(*command.split()) == 0
    assert "source" in lines.out


def test_json_holds_the_same_and_nothing_else_is_on_stdout(
    lines: Lines, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "present_gpu", lambda: H100)
    monkeypatch.setattr(Worker, "ready", lambda *_: True)
    monkeypatch.setattr(Worker, "run", lambda *_: Rates(4.0, 700.0))
    assert lines.run("tune", *LAYER, "--batch", str(BATCH), "--json") == 0
    document = json.loads(lines.out)
    (result,) = document["results"]
    assert document["gpu"] == H100.name
    assert document["rates"] == {"read_tb_per_s": 4.0, "matmul_tflops": 700.0}
    assert 0 < result["floor_share"] < 1
    assert result["best"]["speedup"] == 2
    assert result["outcomes"] == {"timed": 3}


def test_foreign_processes_are_told_of_once(lines: Lines, search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, set[int]]] = []

    def foreign(uuid: str, own_pids: set[int]) -> list[GpuProcess]:
        asked.append((uuid, own_pids))
        return [GpuProcess(11, "python3", 520)]

    monkeypatch.setattr(device, "present_gpu", lambda: H100)
    monkeypatch.setattr(Worker, "ready", lambda *_: True)
    monkeypatch.setattr(Worker, "run", lambda *_: Rates(4.0, 700.0))
    monkeypatch.setattr("attention_tuner.tuner.processes.worker.present_uuid", lambda: "GPU-1")
    monkeypatch.setattr("attention_tuner.tuner.measure.gpu_state.foreign_processes", foreign)
    assert lines.run("tune", *LAYER, "--batch", str(BATCH), "--json") == 0
    assert asked == [("GPU-1", {os.getpid()})]
    assert lines.err.count("also used by python3 (pid 11)") == 1
    document = json.loads(lines.out)
    assert document["foreign_processes"] == [{"pid": 11, "name": "python3", "memory_mib": 520}]
    assert search.executor is not None
    assert search.executor.uuid == "GPU-1"


def test_rates_that_cannot_be_measured_only_cost_the_floor(
    lines: Lines, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(_: Worker, job: RatesJob, timeout_s: float, deadline: float) -> Rates:
        raise JobError("out of memory")

    monkeypatch.setattr(device, "present_gpu", lambda: H100)
    monkeypatch.setattr(Worker, "ready", lambda *_: True)
    monkeypatch.setattr(Worker, "run", lose)
    assert lines.run("tune", *LAYER, "--batch", str(BATCH)) == 0
    assert "out of memory" in lines.err
    assert "of floor" not in lines.out


def test_nothing_right_is_status_1_with_the_counts_by_reason(lines: Lines, search: Search) -> None:
    search.result = nothing
    assert lines.run("tune", *LAYER, "--batch", str(BATCH), "--batch", "2x1@48") == 1
    assert ": 4 wrong; " in lines.err.splitlines()[-1]
    assert "2 failed at time: hung" in lines.err.splitlines()[-1]
    assert lines.out == ""


def test_no_time_for_any_trial_is_told_as_such_with_what_is_needed(lines: Lines, search: Search) -> None:
    search.result = lambda task, gpu: TaskResult(task)
    assert lines.run("tune", *LAYER, "--batch", str(BATCH), "--seconds", "7") == 1
    told = lines.err.splitlines()[-1]
    assert "the time ran out before any variant was finished" in told
    assert "7 s were given" in told
    assert "need about 14 s" in told
    assert "no variant was right" not in told


def test_a_password_is_not_told(lines: Lines, search: Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Store.open(tmp_path / "stands-in.db")
    monkeypatch.setattr(Store, "open", lambda where, create: here)
    assert lines.run("tune", *LAYER, "--batch", str(BATCH), "--db", "postgresql+psycopg://u:secret@host/x") == 0
    assert "--db postgresql+psycopg://u:***@host/x" in lines.out
    assert "secret" not in lines.out + lines.err


def test_a_batch_that_no_gpu_holds_is_refused_before_anything_is_written(
    lines: Lines, search: Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "present_gpu", lambda: H100)
    monkeypatch.setattr("attention_tuner.tuner.tune.present_memory_bytes", lambda: 80 << 30)
    for command in ("tune", "check", "bench"):
        assert lines.run(command, *LAYER, "--batch", "1x1@999999999") == 2
        assert "'1x1@999999999' needs 476.8 GiB of GPU memory" in lines.err
    assert list(tmp_path.iterdir()) == []


def test_one_task_without_a_result_does_not_hide_the_others(lines: Lines, search: Search) -> None:
    search.result = lambda task, gpu: found(task, gpu) if task.batch == BATCH else nothing(task, gpu)
    assert lines.run("tune", *LAYER, "--batch", str(BATCH), "--batch", "2x1@48") == 0
    assert "2.00x" in lines.out
    assert "none was right and timed" in lines.out


def test_a_dry_run_forecasts_and_writes_nothing(
    lines: Lines, search: Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "survey", functools.partial(costs.survey, names=("unified",)))
    arguments = ("tune", *LAYER, "--batch", str(BATCH), "--gpu", "sm_90", "--trials", "5", "--sampler", "random",
                 "--dry-run")
    assert lines.run(*arguments) == 0
    assert "the estimate assumes" in lines.out
    assert lines.run(*arguments, "--json") == 0
    document = json.loads(lines.out)
    assert document["tasks"][0]["trials"] == 5
    assert 0 < document["compiles"] <= 5
    assert document["seconds"] > 0
    assert search.tasks == ()
    assert list(tmp_path.iterdir()) == []


def test_a_batch_too_large_for_the_interpreter_is_refused_before_anything_is_written(
    lines: Lines, tmp_path: Path
) -> None:
    assert lines.run("tune", "--model", "llama-3-8b", "--batch", "1x2048@8192") == 2
    assert "1x2048@8192" in lines.err
    assert "about" in lines.err
    assert list(tmp_path.iterdir()) == []


def test_time_before_and_after_the_search_is_part_of_the_budget(
    lines: Lines, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly() -> Gpu:
        time.sleep(0.3)
        return H100

    monkeypatch.setattr(device, "present_gpu", slowly)
    monkeypatch.setattr(Worker, "ready", lambda self, limit_s: limit_s > 0)
    monkeypatch.setattr(Worker, "run", lambda *_: Rates(4.0, 700.0))
    assert lines.run("tune", *LAYER, "--batch", str(BATCH), "--seconds", "10") == 0
    assert search.executor is not None
    assert 0.3 + 1.0 <= search.executor.aside_s < 6
    assert "of floor" in lines.out
    assert lines.run("tune", *LAYER, "--batch", str(BATCH), "--seconds", "0.1") == 0
    assert "there was no time left" in lines.err
    # A process that runs is ready, whatever time there is.
    monkeypatch.setattr(Worker, "ready", lambda *_: True)
    assert lines.run("tune", *LAYER, "--batch", str(BATCH), "--seconds", "0.1") == 0
    assert "there was no time left" in lines.err


def test_the_cache_of_compiled_kernels_is_pruned_at_the_start(
    lines: Lines, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    pruned: list[Path] = []
    monkeypatch.setattr(device, "present_gpu", lambda: H100)
    monkeypatch.setattr(Worker, "ready", lambda *_: False)
    monkeypatch.setattr(compile, "prune", pruned.append)
    assert lines.run("tune", *LAYER, "--batch", str(BATCH)) == 0
    assert pruned == [compile.triton_cache()]


def misses(path: Path, gpu: Gpu) -> str:
    """A file of what a table without configs was asked about `gpu`."""
    table = ConfigTable.of([])
    for batch, times in ((BATCH, 1), (BATCH.parse("2x1@48"), 3)):
        for _ in range(times):
            table.lookup(SPEC, batch, 32, gpu)
    write_misses(table.coverage(), path)
    return str(path)


def test_what_lookups_missed_is_tuned_the_most_frequent_first(lines: Lines, search: Search, tmp_path: Path) -> None:
    assert lines.run("tune", "--from-misses", misses(tmp_path / "misses.json", INTERPRETER)) == 0
    assert [(task.spec, task.page_size) for task in search.tasks] == [(SPEC, 32)] * 2
    assert [BatchBucket.of(task.batch) for task in search.tasks] == [
        BatchBucket.of(batch) for batch in (BATCH.parse("2x1@48"), BATCH)]


@pytest.mark.parametrize("other", [LAYER, ("--model", "llama-3-8b"), ("--batch", "1x1@1"), ("--page-size", "16"),
                                   ("--suite", "decode"), ("--tp", "2")])
def test_misses_say_themselves_what_to_tune(
    lines: Lines, search: Search, tmp_path: Path, other: tuple[str, ...]
) -> None:
    assert lines.run("tune", "--from-misses", misses(tmp_path / "misses.json", INTERPRETER), *other) == 2
    assert "--from-misses says itself" in lines.err
    assert search.tasks == ()


def test_misses_of_another_gpu_are_not_tuned(lines: Lines, search: Search, tmp_path: Path) -> None:
    path = misses(tmp_path / "misses.json", H100)
    assert lines.run("tune", "--from-misses", path) == 2
    assert "holds no miss of Triton interpreter: its misses are of NVIDIA H100" in lines.err
    assert lines.run("tune", "--from-misses", str(tmp_path / "none")) == 2
    assert "expected a file of misses" in lines.err
    assert not (tmp_path / "tuner.db").exists()


def test_results_are_held_against_the_default_and_the_floor(capsys: pytest.CaptureFixture[str]) -> None:
    result = found(Task(SPEC, BATCH, 16), H100)
    result.reasons.update({("failed", "compile", f"Required: {size}"): 1 for size in (131072, 262144)})
    result.outdated["measured with another kernel source"] = 12
    result.measuring_seconds, result.crossed, result.cross_seconds = 1.6, 3, 2.0
    rates = Rates(0.001, 1e9)
    print_results(H100, [result, TaskResult(Task(SPEC, BATCH, 32))], rates)
    out = capsys.readouterr().out
    share = floor_ms(SPEC, BATCH, rates) / 0.5
    assert 0.1 < share < 1
    for told in ("500.0 us", "2.00x", f"{share:.0%}", "none was right and timed", "80% of the time", "3 more trials",
                 "12 stored trials", "TFLOP/s"):
        assert told in out, told
    assert out.splitlines()[-2].split() == ["2", "failed", "compile", "Required:", "N"]
    assert "speed-up on" not in out
    # A variant that replaces the default is named.
    other = config().variant.replace(num_warps=8)
    print_results(H100, [replace(result, baseline=other)], None)
    out = capsys.readouterr().out
    assert f"is over {other.key()}, the default" in out
    assert "floor" not in out


RECORDING = small_recording()
PAGE_128 = replace(DECODE, page_size=128)
TWO_PAGES = replace(RECORDING, trials={**RECORDING.trials, PAGE_128: RECORDING.trials[DECODE]})


@pytest.fixture
def file(tmp_path: Path) -> str:
    RECORDING.save(tmp_path / "small.json.gz")
    return str(tmp_path / "small.json.gz")


def test_a_replay_says_how_far_it_is_from_the_optimum_and_stores_nothing(
    lines: Lines, file: str, tmp_path: Path
) -> None:
    assert lines.run("tune", "--replay", file, "--trials", "54", "--sampler", "random") == 0
    rows = [re.split(r"  +", line.strip()) for line in lines.out.splitlines()]
    against = next(row for row in rows if row[0] == "1x512@4096" and row[2:4] == ["2 ms", "2 ms"])
    assert against[4] == "0.0%"
    assert re.fullmatch(r"\d+ trials", against[6])
    assert "Nothing is stored" in lines.out
    assert "replaying recording by hand of sm_90, 2026-11-30: no GPU is used" in lines.err
    assert [path.name for path in tmp_path.iterdir()] == ["small.json.gz"]


def test_the_document_is_the_same_for_the_same_seed(lines: Lines, file: str) -> None:
    command = ("tune", "--replay", file, "--batch", str(CHUNK.batch), "--sampler", "random", "--seed", "5", "--json")
    assert lines.run(*command) == 0
    document = json.loads(lines.out)
    (result,) = document["results"]
    assert result["batch"] == str(CHUNK.batch)
    assert result["loss"] >= 0
    assert result["trials"] == 30
    assert (document["database"], document["settings"]["seed"], document["settings"]["regime"]) == (
        None, 5, "graph-cold-burst")  # fmt: skip
    assert lines.run(*command) == 0
    assert json.loads(lines.out) == document


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--batch", "1x1@3"), "does not hold batch '1x1@3'"),
        (("--page-size", "16,128"), "does not hold page size 128"),
        (("--suite", "hopper13"), "does not hold any batch of suite 'hopper13'"),
        (("--model", "llama-3-8b"), "does not hold layer 'num_q_heads=32"),
        (("--gpu", "sm_90"), "--gpu does not go with --replay"),
        (("--warm",), "--warm does not go with --replay"),
        (("--dry-run",), "--dry-run does not go with --replay"),
        (("--cross",), "--cross does not go with --replay"),
    ],
)
def test_what_is_not_recorded_is_refused_in_one_sentence(
    arguments: tuple[str, ...], says: str, lines: Lines, file: str, tmp_path: Path
) -> None:
    assert lines.run("tune", "--replay", file, *arguments) == 2
    assert says in lines.err
    assert len(lines.err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["small.json.gz"]


def test_where_nothing_was_timed_the_status_is_1(lines: Lines, tmp_path: Path) -> None:
    wrong = {v: r for v, r in RECORDING.trials[DECODE].items() if isinstance(r.outcome, Wrong)}
    replace(RECORDING, trials={DECODE: wrong}).save(tmp_path / "wrong.json")
    assert lines.run("tune", "--replay", str(tmp_path / "wrong.json"), "--sampler", "random") == 1
    assert "no variant was timed" in lines.err.splitlines()[-1]


def test_options_choose_tasks_of_a_recording(tmp_path: Path) -> None:
    def chosen(*pages: str, **given: Any) -> tuple[Task, ...]:
        layers = given.pop("layers", None)
        return recorded_tasks(TWO_PAGES, layers, Batches(**given), pages)

    assert chosen() == (DECODE, CHUNK, PAGE_128)
    assert chosen("128") == (PAGE_128,)
    assert chosen(layers=(RECORDED_SPEC,), batch=[str(DECODE.batch)]) == (DECODE, PAGE_128)
    # A suite may have batches that are not recorded; a batch that is named may not.
    suite = tmp_path / "suite.json"
    suite.write_text(json.dumps({"name": "suite", "batches": {"chunk": str(CHUNK.batch), "other": "1x1@1"}}))
    assert chosen(suite=str(suite)) == (CHUNK,)
    with pytest.raises(InputError, match="page size 128"):
        chosen("16,128", batch=[str(CHUNK.batch)])
