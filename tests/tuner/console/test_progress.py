from __future__ import annotations

import io
import math
from collections import Counter

import pytest
from cli_samples import BATCH, H100, SPEC, config
from rich.console import Console

from attention_tuner.kernel_templates.heuristic import default_variant
from attention_tuner.kernel_templates.outcome import Check, Regime, Timed, Timing
from attention_tuner.kernel_templates.task import Task
from attention_tuner.tuner.console import progress
from attention_tuner.tuner.console.progress import TuneProgress
from attention_tuner.tuner.settings import Progress, TaskResult

TASK = Task(SPEC, BATCH, 16)
VARIANT = default_variant(SPEC, BATCH, 16)
RESULT = TaskResult(TASK, config(H100, ms=0.5), VARIANT, Counter(timed=3, failed=1), tried=3, reused=1, seconds=40.0)

Capture = pytest.CaptureFixture[str]


def test_progress_without_a_terminal_is_a_line_for_what_is_new(capsys: Capture) -> None:
    def after(done: int, best_ms: float) -> Progress:
        return Progress(TASK, timed, done, 30, best_ms, 2.0, Counter(timed=done, failed=2), 50.0)

    timed = Timed(VARIANT, Check(0.1), Timing((2.0,), Regime("graph")))
    with TuneProgress(H100) as listener:
        listener.started(TASK, 100, 0)
        listener.tried(after(1, 2.0))
        listener.tried(after(2, 2.0))
        listener.tried(after(3, 1.0))
        listener.tried(after(10, 1.0))
        listener.racing(TASK, (VARIANT,))
        listener.finished(RESULT)
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.strip().partition(":")[0] for line in err.splitlines() if "trial " in line] == [
        "trial 1 of 30", "trial 3 of 30", "trial 10 of 30"]
    assert "best 1 ms, 2.00x over the default; 2 failed; at most 50 s left" in err
    assert "final race of 1 variants" in err
    assert "2.00x over the default" in err.splitlines()[-1]


def test_progress_on_a_terminal_is_live(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=150)
    monkeypatch.setattr(progress, "stderr", lambda: console)
    with TuneProgress(H100) as listener:
        listener.started(TASK, 100, 0)
        timed = Timed(VARIANT, Check(0.1), Timing((2.0,), Regime("graph")))
        listener.tried(Progress(TASK, timed, 7, 30, 1.0, 3.0, Counter(timed=7), math.inf))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "7/30" in shown
    assert "3.00x over the default" in shown
    assert "trial 7" not in shown
