"""How a tuning run gets on, shown on stderr while it goes on."""

from __future__ import annotations

import math

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from ...kernel_templates.gpu import Gpu
from ...kernel_templates.task import Task
from ...kernel_templates.variant import Variant
from ..settings import Listener, Progress, TaskResult
from .output import NO_GPU_TIMES, stderr
from .text import milliseconds, progress_text, rival, short

# Without a terminal, a line of progress is written at least this often, in trials.
LINE_EVERY = 10


class TuneProgress(Listener):
    """Shows on stderr how a run gets on: live on a terminal, and elsewhere in a line for each thing worth one."""

    def __init__(self, gpu: Gpu, heading: str | None = None) -> None:
        self._gpu = gpu
        self._heading = heading or f"tuning on {gpu.name}" + (f"; {NO_GPU_TIMES}" if gpu.is_interpreter else "")
        self._console = stderr()
        self._bar = Bar(
            TextColumn("{task.description}"), BarColumn(16), MofNCompleteColumn(), TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(), console=self._console, disable=not self._console.is_terminal)
        self._row = self._bar.add_task("", total=None, visible=False)
        self._best_ms = math.inf

    def __enter__(self) -> TuneProgress:
        self._log(self._heading)
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def started(self, task: Task, valid: int, reused: int) -> None:
        """A row for the task."""
        self._best_ms = math.inf
        self._row = self._bar.add_task(f"{short(task.batch)} page {task.page_size}", total=None, text="")
        self._log(f"{task.spec.key()}, {short(task.batch)}, pages of {task.page_size}: {valid} valid variants, "
                  f"{reused} trials taken over")

    def tried(self, progress: Progress) -> None:
        """The row is brought up to date; elsewhere a line for a new best, and for every tenth trial."""
        text = progress_text(progress)
        self._bar.update(self._row, completed=progress.done, total=progress.planned, text=text)
        best_ms = math.inf if progress.best_ms is None else progress.best_ms
        if not self._console.is_terminal and (best_ms < self._best_ms or progress.done % LINE_EVERY == 0):
            self._log(f"  trial {progress.done} of {progress.planned}: {text}")
        self._best_ms = best_ms

    def racing(self, task: Task, variants: tuple[Variant, ...]) -> None:
        """The row says so."""
        text = f"final race of {len(variants)} variants"
        self._bar.update(self._row, text=text)
        if not self._console.is_terminal:
            self._log(f"  {text}")

    def finished(self, result: TaskResult) -> None:
        """The row says what was found."""
        best = result.best
        text = "nothing was right and timed" if best is None else (
            f"best {milliseconds(best.timing.median_ms)}, {best.speedup:.2f}x over {rival(result, self._gpu)}")
        self._bar.update(self._row, text=text, total=max(1, result.tried + result.reused))
        if not self._console.is_terminal:
            self._log(f"  {text}")

    def _log(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
