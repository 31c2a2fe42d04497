"""Measure the cost of each feature of a layer: run the batches of a suite with one feature at a time.

Each layer runs two variants. "Fused" is the likeliest variant of template `fused`, mostly the same for all features, so
that only the feature differs. "Served" is the config of a lookup, as in an engine. The tables show both times as
multiples of the plain layer's time. For "served" they also show the share of the floor, because layers with other heads
do other work. A window that hides nothing shows the cost of windows; one of 1,024 keys shows the savings.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import record
import torch
from peerbench.ours import Candidate, compile_ahead
from peerbench.rates import rates_of
from peerbench.workloads import Workload, workloads

from attention_tuner.db.lookup.lookup import load_table
from attention_tuner.db.lookup.table import ConfigTable
from attention_tuner.kernel_templates.batch import BatchBucket
from attention_tuner.kernel_templates.gpu import Gpu
from attention_tuner.kernel_templates.heuristic import candidates
from attention_tuner.kernel_templates.launch.launcher import Tensors
from attention_tuner.kernel_templates.oracle.inputs import make_tensors
from attention_tuner.kernel_templates.outcome import Regime
from attention_tuner.kernel_templates.registry import template_of
from attention_tuner.kernel_templates.task import Task
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.tuner.measure.bench import Workbench
from attention_tuner.tuner.measure.check import Checker
from attention_tuner.tuner.measure.rates import Rates, floor_ms
from attention_tuner.tuner.measure.stopwatch import Stopwatch
from attention_tuner.tuner.processes.child import one_line

PLAIN = "plain"
# One batch of each kind, enough for other geometries.
FEW = ("hybrid_512@4k_31dec", "decode_64_mixed", "chunk_512@32k")


@dataclass(frozen=True, slots=True)
class Feature:
    """A change of the layer."""

    # Fields of the spec that differ.
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    page_size: int | None = None
    # True to also write the log-sum-exp.
    lse: bool = False
    # The feature to compare with on the same batch.
    base: str = PLAIN
    # The batches to run; empty for all.
    batches: tuple[str, ...] = ()


def _on_few(base: str = PLAIN, page_size: int | None = None, **fields: Any) -> Feature:
    return Feature(fields, page_size, base=base, batches=FEW)


_GPT_OSS: dict[str, Any] = {"num_q_heads": 64, "num_kv_heads": 8, "head_dim": 64}
_GEMMA_2: dict[str, Any] = {"num_q_heads": 16, "num_kv_heads": 8, "head_dim": 256}
FEATURES: dict[str, Feature] = {
    PLAIN: Feature(),
    "log-sum-exp": Feature(lse=True),
    "window that hides nothing": Feature({"sliding_window": 2**20}),
    "window of 1024": Feature({"sliding_window": 1024}),
    "soft cap": Feature({"logits_soft_cap": 50.0}),
    "sinks": Feature({"has_sinks": True}),
    "ALiBi": Feature({"has_alibi": True}),
    "tree mask": Feature({"has_tree_mask": True}),
    "KV in e4m3": Feature({"kv_dtype": "float8_e4m3fn"}),
    "KV in e5m2": Feature({"kv_dtype": "float8_e5m2"}),
    "q and KV in e4m3": Feature({"kv_dtype": "float8_e4m3fn", "q_dtype": "float8_e4m3fn"}),
    "float16": Feature({"dtype": "float16"}),
    "float32": Feature({"dtype": "float32"}),
    "q and KV in e5m2": _on_few(kv_dtype="float8_e5m2", q_dtype="float8_e5m2"),
    **{f"heads of {size}": _on_few(head_dim=size) for size in (80, 96, 112, 192, 256, 512)},
    "keys of 192, values of 128": _on_few(head_dim=192, v_head_dim=128),
    "group of 1": _on_few(num_q_heads=32, num_kv_heads=32),
    "group of 16": _on_few(num_q_heads=32, num_kv_heads=2),
    "pages of 128": _on_few(page_size=128),
    "pages of 528": _on_few(page_size=528),
    "window of 1024, ALiBi": _on_few(sliding_window=1024, has_alibi=True),
    "gpt-oss's heads": _on_few(**_GPT_OSS),
    "gpt-oss's window, sinks": _on_few("gpt-oss's heads", **_GPT_OSS, sliding_window=128, has_sinks=True),
    "gemma-2's heads": _on_few(**_GEMMA_2),
    "gemma-2's window, soft cap": _on_few("gemma-2's heads", **_GEMMA_2, sliding_window=4096, logits_soft_cap=50.0),
}
# The two variants that run a layer.
FUSED, SERVED = "fused", "served"
SAMPLES = 7
GRAPH = Regime("graph")


@dataclass(frozen=True, slots=True)
class Cell:
    """One feature on one batch, with the variants to run."""

    feature: str
    name: str
    task: Task
    variants: Mapping[str, Variant]

    @property
    def lse(self) -> bool:
        """True to also write the log-sum-exp."""
        return FEATURES[self.feature].lse


def asked_features(names: Iterable[str] | None) -> list[str]:
    """The features to run: the plain layer, `names` or all, and their bases."""
    wanted = set(FEATURES if names is None else names)
    return [name for name in FEATURES if name == PLAIN or name in wanted | {FEATURES[each].base for each in wanted}]


def cells(
    loads: Iterable[Workload], features: Iterable[str], page_size: int, gpu: Gpu, table: ConfigTable
) -> Iterator[Cell]:
    """Each of `features` on each of its batches."""
    names = list(features)
    for load in loads:
        for name in names:
            feature = FEATURES[name]
            if gpu.is_interpreter or not feature.batches or load.name in feature.batches:
                task = Task(replace(load.spec, **feature.fields), load.batch, feature.page_size or page_size)
                yield Cell(name, load.name, task, variants_of(task, feature.lse, gpu, table))


def variants_of(task: Task, lse: bool, gpu: Gpu, table: ConfigTable) -> dict[str, Variant]:
    """The variants to run on a task; with `lse`, ones that can write the log-sum-exp."""
    likely = candidates(task.spec, BatchBucket.of(task.batch), task.page_size, gpu)
    served = table.lookup(task.spec, task.batch, task.page_size, gpu).variant
    if lse and not template_of(served).writes_lse:
        served = next(variant for variant in likely if template_of(variant).writes_lse)
    return {FUSED: next(variant for variant in likely if variant.template == FUSED), SERVED: served}


def measure(cell: Cell, gpu: Gpu, rates: Rates) -> dict[str, Any]:
    """The results of a cell's variants, and the floor."""
    task = cell.task
    bench = Workbench(task, gpu)
    tensors = make_tensors(task.spec, task.batch, task.page_size, bench.device, 0, lse=cell.lse)
    checker = Checker(task.spec, task.batch, task.page_size, bench.device, tensors=tensors)
    found = {variant: run(variant, bench, checker, cell.lse) for variant in dict.fromkeys(cell.variants.values())}
    return {"feature": cell.feature, "batch": cell.name, "spec": task.spec.key(), "page_size": task.page_size,
            "floor_ms": floor_ms(task.spec, task.batch, rates),
            **{way: dict(found[variant]) for way, variant in cell.variants.items()}}  # fmt: skip


def run(variant: Variant, bench: Workbench, checker: Checker, lse: bool) -> dict[str, Any]:
    """A variant's time if it is correct, and its worst error as a share of the tolerance."""
    row: dict[str, Any] = {"variant": variant.key(), "error_of_tolerance": None, "ms": None, "reason": ""}
    try:
        launcher, _ = bench.planned(variant, GRAPH)
        check = checker.check(launcher)
        if not check.passed:
            return row | {"reason": f"wrong: {check.detail}"}
        row["error_of_tolerance"] = check.worst_ratio
        return row | {"ms": statistics.median(_stopwatch(bench, launcher, lse).samples(SAMPLES))}
    except Exception as error:  # noqa: BLE001 - compilers and drivers raise anything; go on with the other cells
        return row | {"reason": f"failed: {one_line(error)}"}


def _stopwatch(bench: Workbench, launcher: Any, lse: bool) -> Stopwatch[Tensors]:
    watch = bench.stopwatch(launcher, GRAPH)
    if not lse:
        return watch
    buffers = [replace(t, lse=torch.empty(t.q.shape[:2], device=bench.device)) for t in bench.buffers(watch.regime)]
    return Stopwatch(launcher.run, buffers, watch.regime, bench.flush(len(buffers), watch.regime))


def compare(rows: list[dict[str, Any]]) -> None:
    """Add to each row its times as multiples of the base's, and as shares of the floor."""
    known = {(row["feature"], row["batch"]): row for row in rows}
    for row in rows:
        base = known.get((FEATURES[row["feature"]].base, row["batch"]))
        for way in (FUSED, SERVED):
            ms, base_ms = row[way]["ms"], base and base[way]["ms"]
            row[way]["of_base"] = ms / base_ms if ms and base_ms else None
            row[way]["of_floor"] = row["floor_ms"] / ms if ms else None


def main(arguments: argparse.Namespace) -> None:
    """Measure every cell until the time is up, write the JSON and print the tables."""
    start = time.monotonic()
    gpu = record.required_gpu(arguments.interpreter)
    rates, origin = rates_of(gpu)
    loads = [load for load in workloads(arguments.interpreter) if load.name in (arguments.batches or [load.name])]
    table = load_table(arguments.db, gpu)
    asked = list(cells(loads, asked_features(arguments.features), arguments.page_size, gpu, table))
    if not gpu.is_interpreter:
        ahead: dict[Task, list[Candidate]] = {}
        for cell in asked:
            ahead.setdefault(cell.task, []).extend(Candidate(each, "") for each in cell.variants.values())
        compile_ahead(ahead, gpu)
    compiled_s = time.monotonic() - start
    rows: list[dict[str, Any]] = []
    try:
        for cell in asked:
            if time.monotonic() - start > arguments.seconds:
                break
            rows.append(measure(cell, gpu, rates))
    finally:
        compare(rows)
        record.write(arguments.out, {"compile_s": compiled_s, "seconds": time.monotonic() - start, "rates": origin,
                                     "left_out": len(asked) - len(rows), "cells": rows})  # fmt: skip
    show(rows)


def show(rows: list[dict[str, Any]]) -> None:
    """Print a table of each way to run a layer, and one of the floor."""
    names = list(dict.fromkeys(row["batch"] for row in rows))
    features = [name for name in FEATURES if any(row["feature"] == name for row in rows)]
    known = {(row["feature"], row["batch"]): row for row in rows}

    def print_table(title: str, cell: Callable[[dict[str, Any]], str]) -> None:
        lines = [[feature, *(cell(known[feature, name]) if (feature, name) in known else "" for name in names)]
                 for feature in features]  # fmt: skip
        record.print_table((title, *names), lines)

    print_table("fused, times its base", lambda row: _of_base(row, FUSED))
    print_table("served, times its base", lambda row: _of_base(row, SERVED))
    print_table("served, of the floor", lambda row: _percent(row[SERVED]["of_floor"]))


def _of_base(row: dict[str, Any], way: str) -> str:
    found = row[way]
    if found["ms"] is None:
        return str(found["reason"]).partition(":")[0]
    return f"{found['ms']:.4f} ms" if row["feature"] == PLAIN or not found["of_base"] else f"{found['of_base']:.2f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


if __name__ == "__main__":
    parser = record.parser(__doc__)
    record.add_interpreter(parser)
    parser.add_argument("--page-size", type=int, default=16, metavar="TOKENS")
    parser.add_argument("--batches", nargs="+", metavar="NAME",
                        help="of the suite hopper13 (default: all that a feature is run on)")
    parser.add_argument("--features", nargs="+", choices=list(FEATURES), metavar="NAME",
                        help="beside plain (default: all)")
    parser.add_argument("--db", metavar="PATH|URL", help="database of the served configs (default: the user's, "
                        "and the shipped ones)")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=600.0, help="start no further cell after this time")
    main(parser.parse_args())
