"""A recording in T4 1.0.0, the format in which Kernel Tuner and other tools exchange results.

Its schema: https://github.com/odgaard/TuningSchema, branch T4, results-schema.json. Times are in milliseconds.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from attention_tuner.kernel_templates.outcome import Failed, Outcome, Skipped, Timed, Wrong
from attention_tuner.kernel_templates.task import Task
from attention_tuner.tuner.console.text import batch_text
from attention_tuner.tuner.processes.process import EXCEEDED
from attention_tuner.tuner.recording import Recorded, Recording

T4_VERSION = "1.0.0"
# Characters of the batch in a file name.
NAME_LENGTH = 60


def write_t4(recording: Recording, folder: Path) -> list[Path]:
    """Write one file for each task of `recording` into `folder`, made if missing, and return the paths."""
    folder.mkdir(exist_ok=True)
    paths: list[Path] = []
    for number, task in enumerate(recording.tasks, 1):
        path = folder / f"{number:02}_page={task.page_size},batch={batch_text(task.batch)[:NAME_LENGTH]}.json"
        path.write_text(json.dumps(t4_document(recording, task), indent=1, allow_nan=False) + "\n")
        paths.append(path)
    return paths


def t4_document(recording: Recording, task: Task) -> dict[str, Any]:
    """The outcomes of all variants of `task`; `metadata` holds values without a place in T4."""
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
        # The end of the last trial; single trials have no recorded time.
        "timestamp": recording.recorded_at[1],
        "configuration": {"template": variant.template, "page_size": variant.page_size, **variant.as_dict()},
        "objectives": ["time"],
        "times": {
            "compilation_time": 1e3 * recorded.compile_s,
            "runtimes": samples,
            # The worker's time for setup, check and overhead.
            "validation": max(0.0, 1e3 * recorded.seconds - sum(samples)),
        },
        "invalidity": invalidity(outcome),
        "correctness": float(isinstance(outcome, Timed)),
        "measurements": _measurements(recorded),
    }


def invalidity(outcome: Outcome) -> str:
    """T4's word for the reason that `outcome` has no time; "correct" if it has one."""
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
