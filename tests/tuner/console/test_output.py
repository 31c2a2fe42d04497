from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from cli_samples import BATCH, H100, SPEC, config

from attention_tuner.db import ConfigTable
from attention_tuner.kernel_templates.batch import BatchBucket
from attention_tuner.kernel_templates.gpu import INTERPRETER
from attention_tuner.kernel_templates.heuristic import default_variant
from attention_tuner.kernel_templates.outcome import Check, Failed, Regime, Timed, Timing, Wrong
from attention_tuner.kernel_templates.task import Task
from attention_tuner.search_spaces.space import survey
from attention_tuner.tuner.console import output as report
from attention_tuner.tuner.console.doctor import examine
from attention_tuner.tuner.console.progress import TuneProgress
from attention_tuner.tuner.costs import forecast
from attention_tuner.tuner.measure.rates import Rates, floor_ms
from attention_tuner.tuner.settings import TaskResult

TASK = Task(SPEC, BATCH, 16)
VARIANT = default_variant(SPEC, BATCH, 16)

Capture = pytest.CaptureFixture[str]


def test_json_and_lines_are_written_as_they_are(capsys: Capture) -> None:
    document = {"text": "[bold]" + "x" * 500}
    report.print_json(document)
    out, err = capsys.readouterr()
    assert json.loads(out) == document
    assert err == ""
    report.note("[red]aside")
    assert capsys.readouterr() == ("", "[red]aside\n")


def test_variants_stand_alone_on_stdout_and_counts_on_stderr(capsys: Capture) -> None:
    found = survey(SPEC, BatchBucket.of(BATCH), 16, H100)
    report.print_surveys(H100, {TASK: found}, 3)
    out, err = capsys.readouterr()
    assert out.splitlines() == [variant.key() for variant in found.valid[:3]]
    assert f"{len(found.valid)} valid" in err
    for reason, count in found.rejected.items():
        assert f"{count} rejected because {reason}" in err


def test_stored_configs_are_shown_by_gpu_and_regime(capsys: Capture) -> None:
    report.print_configs([config(H100, ms=0.5), config(INTERPRETER, full_check=False)])
    out = capsys.readouterr().out
    assert "NVIDIA H100" in out
    assert "regime graph-cold-burst" in out
    assert "regime interpreter-cold-burst" in out
    assert "500.0 us" in out
    assert "2.00x" in out
    assert "quick" in out
    report.print_configs([])
    assert capsys.readouterr().out == ""


def test_trials_are_counted_by_outcome_and_reason(capsys: Capture) -> None:
    report.print_trials("tuner.db", Counter(timed=3, failed=1), Counter({("failed", "time", "[hung]"): 1}))
    out = capsys.readouterr().out
    assert "tuner.db: 4 trials (3 timed, 1 failed)" in out
    assert "[hung]" in out
    report.print_trials("tuner.db", Counter(), Counter())
    assert "0 trials" in capsys.readouterr().out


def test_an_answer_says_where_it_is_from(capsys: Capture) -> None:
    stored = config(H100)
    report.print_answers(H100, [(SPEC, BATCH, ConfigTable.of([stored]).lookup(SPEC, BATCH, 16, H100))])
    key, *rest = capsys.readouterr().out.splitlines()
    assert key == stored.variant.key()
    assert "source exact" in rest[1]
    assert "2.00x over the default" in rest[1]
    report.print_answers(H100, [(SPEC, BATCH, ConfigTable.of([]).lookup(SPEC, BATCH, 16, H100))])
    assert "source heuristic" in capsys.readouterr().out


def test_outcomes_are_told_in_words(capsys: Capture) -> None:
    timed = Timed(VARIANT, Check(0.25), Timing((1.0, 2.0, 3.0), Regime("interpreter"), 0.1))
    report.print_outcome(TASK, INTERPRETER, timed, timed=True, as_json=False)
    out, err = capsys.readouterr()
    assert "right" in out
    assert "2 ms (quartiles 1.5 ms and 2.5 ms, 3 samples, plan 100.0 us), regime interpreter-cold-burst" in out
    assert "no GPU's" in err
    report.print_outcome(TASK, INTERPRETER, timed, timed=False, as_json=False)
    assert "quartiles" not in capsys.readouterr().out
    report.print_outcome(TASK, H100, Wrong(VARIANT, Check(9.0, detail="row 3")), timed=True, as_json=False)
    assert "wrong; the worst row: row 3" in capsys.readouterr().out
    report.print_outcome(TASK, H100, Failed(VARIANT, "compile", "no"), timed=True, as_json=False)
    assert "failed at compile: no" in capsys.readouterr().out
    report.print_outcome(TASK, H100, timed, timed=False, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["outcome"] == "timed"
    assert "time" not in document


def test_a_machine_is_listed_with_what_was_measured(capsys: Capture, tmp_path: Path) -> None:
    machine = examine(str(tmp_path / "tuner.db"), tmp_path)
    report.print_machine(machine, Rates(4.2, 690.0))
    out = capsys.readouterr().out
    assert f"{tmp_path} (can be written)" in out
    assert "reads 4.20 TB/s, bf16 matmul 690 TFLOP/s" in out


RESULT = TaskResult(TASK, config(H100, ms=0.5), VARIANT, Counter(timed=3, failed=1), tried=3, reused=1, seconds=40.0)


def test_results_are_held_against_the_default_and_the_floor(capsys: Capture) -> None:
    # 192 KiB of keys, values, queries and output at 1 GB/s.
    report.print_results(H100, [RESULT, TaskResult(TASK)], Rates(0.001, 1e9))
    out = capsys.readouterr().out
    assert "500.0 us" in out
    assert "2.00x" in out
    share = floor_ms(SPEC, BATCH, Rates(0.001, 1e9)) / 0.5
    assert 0.1 < share < 1
    assert f"{share:.0%}" in out
    assert "none was right and timed" in out
    assert "3 variants tried and 1 taken over from earlier runs (3 timed, 1 failed) in 40 s" in out
    assert "interpreter" not in out


def test_a_stand_in_for_the_default_is_not_called_the_default(capsys: Capture) -> None:
    stand_in = replace(RESULT, baseline=VARIANT.replace(num_warps=8))
    report.print_results(H100, [RESULT], None)
    assert "speed-up on" not in capsys.readouterr().out
    report.print_results(H100, [stand_in], None)
    assert f"is over {VARIANT.replace(num_warps=8).key()}, the default" in capsys.readouterr().out
    with TuneProgress(H100) as listener:
        listener.finished(stand_in)
    assert f"2.00x over {VARIANT.replace(num_warps=8).key()}, the default" in capsys.readouterr().err


def test_results_of_the_interpreter_say_so_and_have_no_floor(capsys: Capture) -> None:
    report.print_results(INTERPRETER, [replace(RESULT, best=config())], None)
    out = capsys.readouterr().out
    assert "no GPU's" in out
    assert "floor" not in out


def test_a_forecast_is_shown_with_what_it_assumes(capsys: Capture) -> None:
    found = forecast(TASK, H100, 5, "random", 0)
    report.print_forecasts(H100, [found], 3)
    out = capsys.readouterr().out
    assert f"{found.valid_by_template['fused']} fused" in out
    assert f"together {len(found.compiles)} compiles" in out
    assert "3 at a time" in out


def test_the_end_tells_the_shares_what_was_not_used_and_why_trials_have_no_time(capsys: Capture) -> None:
    reasons = Counter({("failed", "compile", f"Required: {size}"): 1 for size in (131072, 262144)})
    outdated = Counter({"measured with another kernel source": 12})
    report.print_results(H100, [replace(RESULT, measuring_seconds=32.0, reasons=reasons, outdated=outdated)], None)
    out = capsys.readouterr().out
    assert "measured or checked for 80% of the time" in out
    assert "12 stored trials were measured with another kernel source and are not used" in out
    *_, last = out.splitlines()[:-1]
    assert last.split() == ["2", "failed", "compile", "Required:", "N"]
    report.print_results(H100, [RESULT], None)
    assert "without a time" not in capsys.readouterr().out


def test_what_a_shape_cost_and_what_was_crossed_is_shown(capsys: Capture) -> None:
    results = [TaskResult(TASK, best=config(H100), tried=8, compiles=8 - 2 * i, shared=2 * i, seconds=9.0 - i)
               for i in range(4)]
    report.print_results(H100, results, None)
    assert "cost of a shape" in (out := capsys.readouterr().out)
    assert "tried on the others" not in out
    assert [line.split() for line in out.splitlines() if line.split()[:1] in (["1"], ["4"])] == [
        ["1", "9.0", "8.0", "8.0", "0.0"], ["4", "6.0", "8.0", "2.0", "6.0"]]
    results[0].crossed, results[0].cross_seconds = 3, 2.0
    report.print_results(H100, results, None)
    assert "tried on the others: 3 more trials in 2 s" in capsys.readouterr().out
