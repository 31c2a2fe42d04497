"""Show a recording: outcomes, optima, and the number of variants within 2 % of them.

With `--t4 FOLDER` it also writes the recording in Kernel Tuner's T4 format, for other tools.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from t4 import write_t4

from attention_tuner.kernel_templates.errors import TunerError
from attention_tuner.kernel_templates.task import Task
from attention_tuner.tuner.console.output import print_failures, print_table, say
from attention_tuner.tuner.console.text import batch_text, milliseconds, variant_text
from attention_tuner.tuner.recording import Recording
from attention_tuner.tuner.replay import near
from attention_tuner.tuner.settings import Reason, TaskResult

KINDS = ("timed", "wrong", "failed", "skipped")


def print_recording(recording: Recording) -> None:
    """Print a table of the outcomes of each task."""
    columns = ("batch", "page", "variants", *KINDS, "measured", "optimum", "within 2 %")
    rows = [
        (batch_text(task.batch), str(task.page_size), str(result.outcomes.total()),
         *(str(result.outcomes[kind]) for kind in KINDS), str(recording.measurements(task)),
         *optimum_cells(recording, task))
        for task, result in counted(recording).items()
    ]  # fmt: skip
    print_table(f"{recording.grid} on {recording.gpu.name}, regime {recording.regime}", columns, rows)
    say("measured: timed variants with the same code and raw samples are twins, one of which was measured")


def print_details(recording: Recording) -> None:
    """Print the optimum of each task, the reasons that variants have no time, and the versions."""
    rows = [
        (batch_text(task.batch), str(task.page_size), variant_text(best.variant))
        for task in recording.tasks if (best := recording.optimum(task)) is not None
    ]  # fmt: skip
    print_table("the optima", ("batch", "page", "variant"), rows)
    print_failures(sum((result.reasons for result in counted(recording).values()), Counter[Reason]()))
    first, last = recording.recorded_at
    versions = {(each.triton, each.torch, each.driver) for each in recording.environments.values()}
    made_with = " and ".join(f"Triton {t}, torch {p}, driver {d or 'unknown'}" for t, p, d in sorted(versions))
    say(f"recorded from {first} to {last} with {made_with}")
    if changed := recording.changed_templates():
        say(f"these templates have changed since: {', '.join(changed)}")


def counted(recording: Recording) -> dict[Task, TaskResult]:
    """The outcomes of each task, counted by kind and reason."""
    found = {task: TaskResult(task) for task in recording.tasks}
    for task, result in found.items():
        for recorded in recording.trials[task].values():
            result.count(recorded.outcome)
    return found


def optimum_cells(recording: Recording, task: Task) -> tuple[str, str]:
    """The time of the optimum, and the number of variants within 2 % of it."""
    best = recording.optimum(task)
    if best is None:
        return "none", "0"
    count = near(recording, task)
    return milliseconds(best.timing.median_ms), f"{count} ({count / len(recording.variants(task)):.1%})"


def main(arguments: argparse.Namespace) -> None:
    """Show the recording, and write T4 files if asked."""
    recording = Recording.load(arguments.recording)
    print_recording(recording)
    print_details(recording)
    if arguments.t4 is not None:
        say(f"{len(write_t4(recording, arguments.t4))} files written to {arguments.t4}")


def options() -> argparse.ArgumentParser:
    """The options of the script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recording", metavar="NAME|FILE", help="a shipped recording, or the path of one")
    parser.add_argument("--t4", type=Path, metavar="FOLDER", help="write one T4 file for each task there")
    return parser


if __name__ == "__main__":
    try:
        main(options().parse_args())
    except (TunerError, OSError) as error:
        sys.exit(str(error))
