from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from cli_samples import BATCH, H100, SPEC, config

from attention_tuner.db import ConfigTable
from attention_tuner.kernel_templates.batch import Batch, BatchBucket
from attention_tuner.kernel_templates.default import default_variant
from attention_tuner.kernel_templates.gpu import INTERPRETER
from attention_tuner.kernel_templates.outcome import Check, Failed, Regime, Timed, Timing, Wrong
from attention_tuner.search_spaces.space import survey
from attention_tuner.search_spaces.suites import suite
from attention_tuner.tuner import report
from attention_tuner.tuner.doctor import examine
from attention_tuner.tuner.jobs import Rates
from attention_tuner.tuner.task import Task

TASK = Task(SPEC, BATCH, 16)
VARIANT = default_variant(SPEC, BATCH, 16)

Capture = pytest.CaptureFixture[str]


def test_a_batch_of_many_lengths_is_shortened_to_their_range() -> None:
    assert report.short(BATCH) == str(BATCH)
    many = Batch(((512, 16384), *((1, 4096 + 7 * i) for i in range(64))))
    assert report.short(many) == "1x512@16384,64x1@4096..4537"
    assert report.short(Batch.parse("7x6@20000," * 9 + "1x6@20000")) == "64x6@20000"
    assert all(len(report.short(batch)) < 80 for batch in suite("hopper13"))


@pytest.mark.parametrize(
    ("ms", "text"), [(0.0123, "12.3 us"), (0.9, "900.0 us"), (1.5, "1.5 ms"), (123.4, "123 ms"), (2500.0, "2.5 s")])
def test_times_have_a_unit_that_reads_well(ms: float, text: str) -> None:
    assert report.milliseconds(ms) == text


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
