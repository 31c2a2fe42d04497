"""Measure the cost of merging partial results, and the gain of each way to hide it.

The config of a lookup is timed with a separate launch of the reduction: unchanged, without overlap of that launch with
the attention kernel, with four rows per program for all batches, with both changes, and without a reduction (the result
is wrong, but the time shows the rest). It is also timed with the last program of a tile merging.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import record
from edges import in_turns, median_of_three

from attention_tuner.db.lookup.lookup import load_table
from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.gpu import Gpu
from attention_tuner.kernel_templates.launch.launcher import Launcher, Tensors
from attention_tuner.kernel_templates.launch.work_list import COMBINE_ROWS
from attention_tuner.kernel_templates.outcome import Regime
from attention_tuner.kernel_templates.registry import why_invalid
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.task import Task
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.search_spaces.models import model_layers
from attention_tuner.search_spaces.suites import named_batches
from attention_tuner.tuner.measure.bench import Workbench

GRAPH = Regime("graph")


def four_rows(launcher: Launcher) -> int:
    """Replaces `_rows_of_program`."""
    return COMBINE_ROWS


def nothing(launcher: Launcher, tensors: Tensors) -> None:
    """Replaces `start_reduction`, and does nothing."""


IN_TURN: dict[str, Any] = {"overlaps_reduction": False}
FOUR_ROWS: dict[str, Any] = {"_rows_of_program": four_rows}
# The attributes of the launcher that each way replaces.
WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "in turn": IN_TURN,
    "four rows": FOUR_ROWS,
    "both": IN_TURN | FOUR_ROWS,
    "no reduction": {"start_reduction": nothing},
}
LAST = "last program"
BATCHES = ("decode_1x128k", "decode_64_mixed", "decode_256x1k", "verify_32x6@20k", "hybrid_512@4k_31dec")
BATCHES_TP8 = ("decode_4x64k", "decode_64_mixed", "hybrid_512@16k_63dec")


def made(bench: Workbench, variant: Variant, way: str) -> Launcher:
    """The planned launcher of `variant` with the attributes of a way."""
    launcher, _ = bench.planned(variant, GRAPH)
    launcher.__class__ = type(way, (type(launcher),), WAYS[way])
    return launcher


def ways_of(variant: Variant, task: Task, gpu: Gpu) -> dict[str, tuple[Variant, str]]:
    """The variants to run, each with its way; all but the last have a separate launch for the reduction."""
    has_choice = "reduction" in variant.as_dict()
    apart = variant.replace(reduction="kernel") if has_choice else variant
    found = {way: (apart, way) for way in WAYS}
    if has_choice:
        last = variant.replace(reduction="last_program")
        if why_invalid(last, task.spec, gpu) is None:
            found[LAST] = (last, "as it is")
    return found


def measure(task: Task, variant: Variant, gpu: Gpu) -> dict[str, float]:
    """The milliseconds of each way, sampled in turns. All but "no reduction" are checked first."""
    bench = Workbench(task, gpu)
    watches: dict[str, Callable[[], float]] = {}
    for name, (each, way) in ways_of(variant, task, gpu).items():
        launcher = made(bench, each, way)
        if name != "no reduction":
            found = bench.checker(0).check(launcher)
            if not found.passed:
                raise SystemExit(f"{each.key()} {name}: {found.detail}")
        watches[name] = median_of_three(bench.stopwatch(launcher, GRAPH))
    return in_turns(watches)


def asked(interpreter: bool) -> list[tuple[AttentionSpec, str, Batch]]:
    """The layers and their batches."""
    if interpreter:
        return [(AttentionSpec(2, 1, 64), "tiny", Batch.parse("1x1@60"))]
    named = named_batches("hopper13")
    layers = (("llama-3-8b", 1, BATCHES), ("llama-3-70b", 8, BATCHES_TP8))
    return [(spec, name, named[name]) for model, tp, names in layers for spec in model_layers(model, tp, None)
            for name in names]  # fmt: skip


def main(arguments: argparse.Namespace) -> None:
    """Time all, write the JSON and print the table."""
    gpu = record.required_gpu(arguments.interpreter)
    table = load_table(arguments.db)
    rows: list[dict[str, Any]] = []
    for spec, name, batch in asked(arguments.interpreter):
        variant = table.lookup(spec, batch, arguments.page_size, gpu).variant
        task = Task(spec, batch, arguments.page_size)
        ms = measure(task, variant, gpu)
        ran = {way: each.key() for way, (each, _) in ways_of(variant, task, gpu).items()}
        rows.append({"spec": spec.key(), "batch": name, "answer": variant.key(), "variants": ran, "ms": ms})
    record.write(arguments.out, {"page_size": arguments.page_size, "rows": rows})
    names = (*WAYS, LAST)
    lines = [[row["batch"], str(row["spec"]).partition(",head")[0],
              *(f"{row['ms'][name]:.4f}" if name in row["ms"] else "-" for name in names)] for row in rows]  # fmt: skip
    record.print_table(("batch", "layer", *names), lines)


if __name__ == "__main__":
    parser = record.parser(__doc__)
    record.add_interpreter(parser)
    parser.add_argument("--page-size", type=int, default=16, metavar="TOKENS")
    parser.add_argument("--db", metavar="PATH|URL", help="database of the configs (default: the user's)")
    main(parser.parse_args())
