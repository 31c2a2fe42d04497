"""What `tune --replay` shows beside the results of a search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...kernel_templates.task import Task
from ..recording import Recording
from ..replay import Replayed, near
from .output import print_table, say
from .text import milliseconds, short


def print_changed(recording: Recording) -> None:
    """Name the recorded templates whose kernels have changed since, if there are any."""
    if changed := recording.changed_templates():
        say(f"recorded with other kernel sources than the present ones: {', '.join(changed)}")


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


def _replayed_cells(recording: Recording, each: Replayed) -> tuple[str, ...]:
    task, loss, after = each.result.task, each.loss, each.within()
    optimum_ms = each.optimum.timing.median_ms if each.optimum else 0.0
    found = ("nothing", "") if loss is None else (milliseconds(optimum_ms * (1 + loss)), f"{loss:.1%}")
    share = near(recording, task) / len(recording.variants(task))
    return (short(task.batch), str(task.page_size), found[0], milliseconds(optimum_ms) if each.optimum else "none",
            found[1], str(len(each.trials)), "never" if after is None else f"{after} trials", f"{share:.1%}")


def _optimum_document(recording: Recording, task: Task) -> dict[str, Any]:
    best = recording.optimum(task)
    return {"optimum": best and {"variant": best.variant.key(), "median_ms": best.timing.median_ms}}
