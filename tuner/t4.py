"""A recording in the form that Kernel Tuner and others exchange results in: T4, version 1.0.0.

Its schema: https://github.com/odgaard/TuningSchema, branch T4, results-schema.json. Times are in milliseconds.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ..kernel_templates.outcome import Failed, Outcome, Skipped, Timed, Wrong
from ..kernel_templates.task import Task
from .console.text import short
from .processes.limit import EXCEEDED
from .recording import Recorded, Recording

T4_VERSION = "1.0.0"
# Of a batch, so many characters are in the name of a file.
NAME_LENGTH = 60


def write_t4(recording: Recording, folder: Path) -> list[Path]:
    """Write a file for each task of `recording` into `folder`, which is made where it is missing; the paths."""
    folder.mkdir(exist_ok=True)
    paths: list[Path] = []
    for number, task in enumerate(recording.tasks, 1):
        path = folder / f"{number:02}_page={task.page_size},batch={short(task.batch)[:NAME_LENGTH]}.json"
        path.write_text(json.dumps(t4_document(recording, task), indent=1, allow_nan=False) + "\n")
        paths.append(path)
    return paths


def t4_document(recording: Recording, task: Task) -> dict[str, Any]:
    """What came of every variant recorded for `task`; what is specific to this project is under `metadata`."""
    return {
        "schema_version": T4_VERSION,
        "metadata": {
            "timeunit": "milliseconds",
            "grid": recording.grid,
            "spec": task.spec.key(),
            "batch": str(task.batch),
            "gpu": recording.gpu.name,
            "regime": str(recording.regime),
        },
        "results": [_result(recording, recorded) for recorded in recording.trials[task].values()],
    }


def _result(recording: Recording, recorded: Recorded) -> dict[str, Any]:
    outcome, variant = recorded.outcome, recorded.outcome.variant
    samples = list(outcome.timing.samples_ms) if isinstance(outcome, Timed) else []
    return {
        # When the last trial ended: that of each is not recorded.
        "timestamp": recording.recorded_at[1],
        "configuration": {"template": variant.template, "page_size": variant.page_size, **variant.as_dict()},
        "objectives": ["time"],
        "times": {
            "compilation_time": 1e3 * recorded.compile_s,
            "runtimes": samples,
            # Of the process that measures: checking and timing, setting up among them.
            "validation": max(0.0, 1e3 * recorded.seconds - sum(samples)),
        },
        "invalidity": invalidity(outcome),
        "correctness": float(isinstance(outcome, Timed)),
        "measurements": _measurements(recorded),
    }


def invalidity(outcome: Outcome) -> str:
    """What T4 calls the reason why `outcome` has no time, "correct" where it has one."""
    match outcome:
        case Timed():
            return "correct"
        case Wrong():
            return "correctness"
        case Skipped():
            return "constraints"
        case Failed(_, "compile", _):
            return "compile"
        case Failed(_, _, reason):
            return "timeout" if reason.startswith(EXCEEDED) else "runtime"


def _measurements(recorded: Recorded) -> list[dict[str, Any]]:
    outcome, facts, found = recorded.outcome, recorded.facts, list[tuple[str, float | str, str]]()
    if isinstance(outcome, Timed):
        found += [("time", outcome.timing.median_ms, "ms"), ("plan_time", outcome.timing.plan_ms, "ms")]
    if isinstance(outcome, Timed | Wrong) and math.isfinite(outcome.check.worst_ratio):
        found.append(("worst_ratio", outcome.check.worst_ratio, ""))
    if isinstance(outcome, Failed | Skipped):
        found.append(("reason", outcome.reason, ""))
    if facts is not None:
        numbers = {"shared_memory": (facts.shared_bytes, "B"), "registers": (facts.registers, ""),
                   "stack": (facts.stack_bytes, "B")}
        found += [(name, value, unit) for name, (value, unit) in numbers.items() if value is not None]
    return [{"name": name, "value": value, "unit": unit} for name, value, unit in found]
