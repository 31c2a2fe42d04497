"""What the commands about recordings show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ...kernel_templates.registry import templates
from ...kernel_templates.sources import kernel_hash
from ...kernel_templates.task import Task
from ..recording import Recording
from ..replay import Replayed, near
from ..settings import Reason, TaskResult
from .output import print_failures, print_table, say
from .text import milliseconds, short, values

_KINDS = ("timed", "wrong", "failed", "skipped")


def print_recording(recording: Recording) -> None:
    """Write a table of what was recorded of each task."""
    counted = _counted(recording)
    columns = ("batch", "page", "variants", *_KINDS, "measured", "optimum", "within 2 %")
    rows = [
        (short(task.batch), str(task.page_size), str(result.outcomes.total()),
         *(str(result.outcomes[kind]) for kind in _KINDS), str(recording.measurements(task)),
         *_optimum(recording, task))
        for task, result in counted.items()
    ]  # fmt: skip
    print_table(f"{recording.grid} on {recording.gpu.name}, regime {recording.regime}", columns, rows)
    say("measured: timed variants with the same code and raw samples are twins, of which one was measured")


def print_details(recording: Recording) -> None:
    """Write the optimum of each task, why variants have no time, and what the recording was made with."""
    rows = [
        (short(task.batch), str(task.page_size), values(best.variant))
        for task in recording.tasks if (best := recording.optimum(task)) is not None
    ]  # fmt: skip
    print_table("the optima", ("batch", "page", "variant"), rows)
    print_failures(sum((result.reasons for result in _counted(recording).values()), Counter[Reason]()))
    first, last = recording.recorded_at
    versions = {(each.triton, each.torch, each.driver) for each in recording.environments.values()}
    made_with = " and ".join(f"Triton {t}, torch {p}, driver {d or 'unknown'}" for t, p, d in sorted(versions))
    say(f"recorded from {first} to {last} with {made_with}")
    print_changed(recording)


def changed_templates(recording: Recording) -> list[str]:
    """The recorded templates whose kernel source is another one now, or that are not installed."""
    return [name for name, environment in recording.environments.items()
            if name not in templates() or kernel_hash(name) != environment.kernel_hash]


def print_changed(recording: Recording) -> None:
    """Say in a line that kernels are not those that were recorded, where that is so."""
    if changed := changed_templates(recording):
        say(f"recorded with other kernel sources than the present ones: {', '.join(changed)}")


def recording_document(recording: Recording) -> dict[str, Any]:
    """What a recording holds: for each task the outcomes by kind, the optimum, and how many variants are as good."""
    return {
        "grid": recording.grid,
        "gpu": recording.gpu.name,
        "regime": str(recording.regime),
        "recorded_at": list(recording.recorded_at),
        "changed_templates": changed_templates(recording),
        "tasks": [
            {"spec": task.spec.key(), "batch": str(task.batch), "page_size": task.page_size,
             "outcomes": dict(result.outcomes), "measured": recording.measurements(task),
             **_optimum_document(recording, task), "within_2_percent": near(recording, task)}
            for task, result in _counted(recording).items()
        ],
    }  # fmt: skip


def print_replayed(recording: Recording, found: Sequence[Replayed]) -> None:
    """Write how far what was found is from the optimum, and when the search came near it."""
    rows = [_replayed_cells(recording, each) for each in found]
    columns = ("batch", "page", "found", "optimum", "slower by", "trials", "within 2 % after", "variants within 2 %")
    print_table("as recorded, against the optimum", columns, rows)


def replayed_document(each: Replayed) -> dict[str, Any]:
    """What `print_replayed` shows of one task."""
    return {
        **_optimum_document(each.recording, each.result.task),
        "loss": each.loss,
        "trials": len(each.trials),
        "trials_to_2_percent": each.within(),
    }


def _counted(recording: Recording) -> dict[Task, TaskResult]:
    counted = {task: TaskResult(task) for task in recording.tasks}
    for task, result in counted.items():
        for recorded in recording.trials[task].values():
            result.count(recorded.outcome)
    return counted


def _replayed_cells(recording: Recording, each: Replayed) -> tuple[str, ...]:
    task, loss, after = each.result.task, each.loss, each.within()
    optimum_ms = each.optimum.timing.median_ms if each.optimum else 0.0
    found = ("nothing", "") if loss is None else (milliseconds(optimum_ms * (1 + loss)), f"{loss:.1%}")
    share = near(recording, task) / len(recording.variants(task))
    return (short(task.batch), str(task.page_size), found[0], milliseconds(optimum_ms) if each.optimum else "none",
            found[1], str(len(each.trials)), "never" if after is None else f"{after} trials", f"{share:.1%}")


def _optimum(recording: Recording, task: Task) -> tuple[str, str]:
    best = recording.optimum(task)
    if best is None:
        return "none", "0"
    count = near(recording, task)
    return milliseconds(best.timing.median_ms), f"{count} ({count / len(recording.variants(task)):.1%})"


def _optimum_document(recording: Recording, task: Task) -> dict[str, Any]:
    best = recording.optimum(task)
    return {"optimum": best and {"variant": best.variant.key(), "median_ms": best.timing.median_ms}}
