"""What each feature of a layer costs: the batches of a suite with one feature on at a time, checked and timed.

The variant is the likeliest of template `fused`, the same for every feature where it is valid, so that what differs is
the feature. A window that hides nothing shows what windows cost, one of 1,024 keys what they save.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import record
import torch
from peerbench.ours import Candidate, compile_ahead
from peerbench.workloads import Workload, workloads

from attention_tuner.kernel_templates.batch import BatchBucket
from attention_tuner.kernel_templates.gpu import Gpu
from attention_tuner.kernel_templates.heuristic import candidates
from attention_tuner.kernel_templates.launch import Tensors
from attention_tuner.kernel_templates.outcome import Regime
from attention_tuner.tuner.check import Checker
from attention_tuner.tuner.task import Task
from attention_tuner.tuner.timing import Stopwatch
from attention_tuner.tuner.workbench import Workbench

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "log-sum-exp": {},
    "window that hides nothing": {"sliding_window": 2**20},
    "window of 1024": {"sliding_window": 1024},
    "soft cap": {"logits_soft_cap": 50.0},
    "sinks": {"has_sinks": True},
    "ALiBi": {"has_alibi": True},
    "tree mask": {"has_tree_mask": True},
    "KV in e4m3": {"kv_dtype": "float8_e4m3fn"},
    "KV in e5m2": {"kv_dtype": "float8_e5m2"},
    "q and KV in e4m3": {"kv_dtype": "float8_e4m3fn", "q_dtype": "float8_e4m3fn"},
    "float16": {"dtype": "float16"},
    "float32": {"dtype": "float32"},
}
SAMPLES = 7
GRAPH = Regime("graph")


@dataclass(frozen=True, slots=True)
class Cell:
    """One feature on one batch, and the variant to run."""

    feature: str
    name: str
    task: Task
    candidate: Candidate

    @property
    def lse(self) -> bool:
        """Whether the log-sum-exp is asked for."""
        return self.feature == "log-sum-exp"


def cells(loads: Iterable[Workload], features: Iterable[str], page_size: int, gpu: Gpu) -> Iterator[Cell]:
    """Every one of `features` on every batch."""
    for load in loads:
        for feature in features:
            fields = FEATURES[feature]
            spec = replace(load.spec, **fields)
            likely = candidates(spec, BatchBucket.of(load.batch), page_size, gpu)
            fused = next(variant for variant in likely if variant.template == "fused")
            yield Cell(feature, load.name, Task(spec, load.batch, page_size), Candidate(fused, "heuristic"))


def measure(cell: Cell, gpu: Gpu) -> dict[str, Any]:
    """The time of a cell's variant where it is right, and its worst error as a share of what is tolerated."""
    task, variant = cell.task, cell.candidate.variant
    bench = Workbench(task, gpu)
    checker = Checker(task.spec, task.batch, task.page_size, bench.device, lse=cell.lse)
    launcher, _ = bench.planned(variant, GRAPH)
    check = checker.check(launcher)
    ms = statistics.median(_stopwatch(bench, launcher, cell).samples(SAMPLES)) if check.passed else None
    return {"feature": cell.feature, "batch": cell.name, "spec": task.spec.key(), "page_size": task.page_size,
            "variant": variant.key(), "error_of_tolerance": check.worst_ratio, "ms": ms}  # fmt: skip


def _stopwatch(bench: Workbench, launcher: Any, cell: Cell) -> Stopwatch[Tensors]:
    watch = bench.stopwatch(launcher, GRAPH)
    if not cell.lse:
        return watch
    buffers = [replace(t, lse=torch.empty(t.q.shape[:2], device=bench.device)) for t in bench.buffers(watch.regime)]
    return Stopwatch(launcher.run, buffers, watch.regime, bench.flush(len(buffers), watch.regime))


def main(arguments: argparse.Namespace) -> None:
    """Measure every cell until the time is up, write the JSON and print the table."""
    start = time.monotonic()
    gpu = record.machine(arguments.interpreter)
    asked = [load for load in workloads(arguments.interpreter) if load.name in (arguments.batches or [load.name])]
    features = ["plain", *(name for name in FEATURES if name in (arguments.features or FEATURES) and name != "plain")]
    asked_cells = list(cells(asked, features, arguments.page_size, gpu))
    if not gpu.is_interpreter:
        compile_ahead({cell.task: [cell.candidate] for cell in asked_cells}, gpu)
    compiled_s = time.monotonic() - start
    rows: list[dict[str, Any]] = []
    for cell in asked_cells:
        if time.monotonic() - start > arguments.seconds:
            break
        rows.append(measure(cell, gpu))
    plain = {row["batch"]: row["ms"] for row in rows if row["feature"] == "plain"}
    for row in rows:
        row["of_plain"] = None if row["ms"] is None else row["ms"] / plain[row["batch"]]
    record.write(arguments.out, {"compile_s": compiled_s, "seconds": time.monotonic() - start,
                                 "left_out": len(asked_cells) - len(rows), "cells": rows})  # fmt: skip
    names = list(dict.fromkeys(row["batch"] for row in rows))
    found = {(row["feature"], row["batch"]): row for row in rows}
    table = [[feature, *(_cell(found.get((feature, name))) for name in names)] for feature in features]
    record.print_table(("feature, time of plain", *names), table)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not run"
    if row["ms"] is None:
        return f"wrong ({row['error_of_tolerance']:.2g})"
    return f"{row['of_plain']:.2f}" if row["feature"] != "plain" else f"{row['ms']:.4f} ms"


if __name__ == "__main__":
    parser = record.parser(__doc__)
    parser.add_argument("--interpreter", action="store_true", help="a tiny batch through Triton's interpreter "
                        "(TRITON_INTERPRET=1), to try the script out")  # fmt: skip
    parser.add_argument("--page-size", type=int, default=16, metavar="TOKENS")
    parser.add_argument("--batches", nargs="+", metavar="NAME", help="of the suite hopper13 (default: all)")
    parser.add_argument("--features", nargs="+", choices=list(FEATURES), metavar="NAME",
                        help="beside plain (default: all)")
    parser.add_argument("--seconds", type=float, default=600.0, help="start no cell after that")
    main(parser.parse_args())
