from __future__ import annotations

import io
import json
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from cli_samples import BATCH, H100, SPEC, config
from rich.console import Console

from attention_tuner.kernel_templates.heuristic import default_variant
from attention_tuner.kernel_templates.outcome import Check, Failed, Regime, Timed, Timing, Wrong
from attention_tuner.kernel_templates.task import Task
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.tuner.console import output
from attention_tuner.tuner.settings import Progress, TaskResult

TASK = Task(SPEC, BATCH, 16)
VARIANT = default_variant(SPEC, BATCH, 16)
RESULT = TaskResult(TASK, config(H100, ms=0.5), VARIANT, Counter(timed=3, failed=1), tried=3, reused=1, seconds=40.0)
TIMED = Timed(VARIANT, Check(0.1), Timing((2.0,), Regime("graph")))

Capture = pytest.CaptureFixture[str]


def encoded(record: object) -> Any:
    """The record as a strict reader of JSON sees it."""
    return json.loads(json.dumps(output.encode(record), allow_nan=False))


def test_json_and_lines_are_written_as_they_are(capsys: Capture) -> None:
    document = {"text": "[bold]" + "x" * 500}
    output.print_json(document)
    out, err = capsys.readouterr()
    assert json.loads(out) == document
    assert err == ""
    output.note("[red]aside")
    assert capsys.readouterr() == ("", "[red]aside\n")
    output.print_table("[title]", ("a",), [("[b]",)])
    assert [line.strip() for line in capsys.readouterr().out.splitlines() if "[" in line] == ["[title]", "[b]"]


def test_a_record_is_encoded_by_its_fields_and_a_task_joins_the_record_around_it() -> None:
    @dataclass
    class Holder:
        task: Task
        timing: Timing
        reasons: Counter[tuple[str, str, str]]
        shares: dict[Regime, tuple[float, ...]]

    reasons = Counter({("failed", "time", "hung"): 1, ("wrong", "", "wrong result"): 3})
    holder = Holder(TASK, Timing((1.0, 2.0, 4.0), Regime("graph"), 0.5), reasons, {Regime("eager"): (math.inf, 0.5)})
    assert encoded(holder) == {
        "spec": SPEC.key(), "batch": str(BATCH), "page_size": 16,
        "time": {"median_ms": 2.0, "quartiles_ms": [1.5, 3.0], "samples_ms": [1.0, 2.0, 4.0], "plan_ms": 0.5,
                 "regime": {"capture": "graph", "l2": "cold", "load": "burst"}},
        "failures": [{"outcome": "wrong", "stage": "", "reason": "wrong result", "count": 3},
                     {"outcome": "failed", "stage": "time", "reason": "hung", "count": 1}],
        "shares": {"eager-cold-burst": [None, 0.5]},
    }  # fmt: skip


def test_a_best_config_is_encoded_as_exports_hold_it_with_its_gpu_and_environment() -> None:
    document = encoded(config(H100))
    assert document["gpu"]["name"] == H100.name
    assert document["environment"]["triton"] == "3.9.0"
    assert Variant.parse(document["variant"]["key"]) == VARIANT
    assert document["speedup"] == 2


def test_outcomes_are_encoded_without_what_json_cannot_hold() -> None:
    wrong = encoded(Wrong(VARIANT, Check(math.nan, detail="row 3")))
    assert wrong == {"variant": VARIANT.key(), "check": {"worst_ratio": None, "level": "quick", "detail": "row 3"}}
    failed = encoded(Failed(VARIANT, "compile", "it does not"))
    assert failed == {"variant": VARIANT.key(), "stage": "compile", "reason": "it does not"}


def test_progress_without_a_terminal_is_a_line_for_each_news(capsys: Capture) -> None:
    def after(done: int, best_ms: float) -> Progress:
        return Progress(TASK, TIMED, done, 30, best_ms, 2.0, Counter(timed=done, failed=2), 50.0)

    with output.TuneProgress(H100) as listener:
        listener.started(TASK, 100, 0)
        for done, best_ms in ((1, 2.0), (2, 2.0), (3, 1.0), (10, 1.0)):
            listener.tried(after(done, best_ms))
        listener.racing(TASK, (VARIANT,))
        listener.finished(RESULT)
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.strip().partition(":")[0] for line in err.splitlines() if "trial " in line] == [
        "trial 1 of 30", "trial 3 of 30", "trial 10 of 30"]
    assert "final race of 1 variants" in err
    assert "2.00x over the default" in err.splitlines()[-1]


def test_progress_on_a_terminal_is_live() -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=150)
    with output.TuneProgress(H100, console=console) as listener:
        listener.started(TASK, 100, 0)
        listener.tried(Progress(TASK, TIMED, 7, 30, 1.0, 3.0, Counter(timed=7), math.inf))
    assert "7/30" in shown.getvalue()
    assert "3.00x over the default" in shown.getvalue()
    assert "trial 7" not in shown.getvalue()
