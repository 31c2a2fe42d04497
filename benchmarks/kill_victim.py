"""The process that `random_kills.py` kills: tunes two tiny batches in Triton's interpreter and keeps a journal.

It writes a line before each measurement and race, and after each trial and result that the search reports as stored.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from attention_tuner.db.store import Store
from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.gpu import INTERPRETER
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.task import Task
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.tuner.measure.jobs import MeasureJob
from attention_tuner.tuner.processes.worker import Worker
from attention_tuner.tuner.run import Executor
from attention_tuner.tuner.settings import Listener, Progress, Settings, TaskResult
from attention_tuner.tuner.tune import tune

SPEC = AttentionSpec(2, 1, 64, dtype="float16")
TASKS = (Task(SPEC, Batch.parse("1x9@20,1x1@24"), 16), Task(SPEC, Batch.parse("2x1@20"), 16))
TRIALS = 8
# One before and one after each trial, one before and one after the race.
LINES_PER_TASK = 2 * TRIALS + 2
JOURNAL = "journal.txt"
DATABASE = "tuner.db"


class Journal(Listener):
    """Appends lines to a file in `folder`; a written line survives a kill."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / JOURNAL, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def line(self, event: str, task: Task, text: str) -> None:
        """Append the line of an event."""
        os.write(self._file, f"{event} {TASKS.index(task)} {text}\n".encode())

    def tried(self, progress: Progress) -> None:
        """Note a stored trial."""
        self.line("stored", progress.task, progress.outcome.variant.key())

    def racing(self, task: Task, variants: tuple[Variant, ...]) -> None:
        """Note the start of a race."""
        self.line("race", task, str(len(variants)))

    def finished(self, result: TaskResult) -> None:
        """Note a stored result."""
        self.line("finished", result.task, str(result.task.batch))


class JournalingWorker(Worker):
    """Writes a line to the journal before each measurement."""

    def __init__(self, journal: Journal) -> None:
        super().__init__(interpret=True)
        self._journal = journal

    def run(self, job: Any, timeout_s: float, *rest: float) -> Any:
        """Note a measurement, then run the job."""
        if isinstance(job, MeasureJob):
            self._journal.line("measure", job.task, job.variant.key())
        return super().run(job, timeout_s, *rest)


def main(folder: Path) -> None:
    """Tune into the database of `folder`."""
    journal = Journal(folder)
    with JournalingWorker(journal) as worker, Store.open(folder / DATABASE) as store:
        tune(TASKS, INTERPRETER, store, Settings(trials=TRIALS, finalists=1), Executor(worker), journal)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
