"""What the commands about recordings show."""

from __future__ import annotations

from ..kernel_templates.outcome import Timed
from .ground_truth import outcomes
from .recording import Recording
from .report import print_table
from .task import Task
from .wording import milliseconds, short

# A variant this much slower than the optimum is as good.
AS_GOOD = 1.02


def print_recording(recording: Recording) -> None:
    """Write a table of what was recorded of each task."""
    counts = dict(outcomes(recording))
    columns = ("batch", "page", "variants", "timed", "wrong", "failed", "skipped", "optimum", "within 2 %")
    rows = [
        (short(task.batch), str(task.page_size), str(counts[task].total()),
         *(str(counts[task][kind]) for kind in ("timed", "wrong", "failed", "skipped")), *_optimum(recording, task))
        for task in recording.tasks
    ]  # fmt: skip
    print_table(f"{recording.grid} on {recording.gpu.name}, regime {recording.regime}", columns, rows)


def _optimum(recording: Recording, task: Task) -> tuple[str, str]:
    best = recording.optimum(task)
    if best is None:
        return "none", "0"
    times = [r.outcome.timing.median_ms for r in recording.trials[task].values() if isinstance(r.outcome, Timed)]
    near = sum(ms <= AS_GOOD * best.timing.median_ms for ms in times)
    return milliseconds(best.timing.median_ms), str(near)
