"""Measure the fixed cost of a work item, and the cost of a key in a long and in a short tile.

The plan splits KV into items of equal cost, where a key of a long tile counts `long_weight`. This script splits the
same keys into more and more items, and fits a line through the times over the items per SM. The slope is the cost of an
item; the value at 0 is the cost of the keys. The last program of a tile merges, so there is no second launch.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import record
from edges import in_turns, median_of_three

from attention_tuner.kernel_templates.batch import Batch, BatchBucket
from attention_tuner.kernel_templates.gpu import Gpu
from attention_tuner.kernel_templates.heuristic import candidates
from attention_tuner.kernel_templates.launch.work_list import WorkListLauncher
from attention_tuner.kernel_templates.outcome import Regime
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.task import Task
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.search_spaces.models import model_layers
from attention_tuner.tuner.measure.bench import Workbench

GRAPH = Regime("graph")
TEMPLATES = ("fused", "gluon_hopper")
# Sequences long enough for many items of many keys.
BATCHES = {"short": "8x1@131071", "long": "1x512@32256"}
WAVES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Line:
    """The line fitted to the times of one template on one kind of tile."""

    us_per_item: float
    ns_per_key: float
    item_in_keys: float
    worst_residual: float


def fitted(items: list[float], ms: list[float], keys: float) -> Line:
    """Fit a line to `ms` over `items` by least squares; `items` and `keys` are those of one SM."""
    slope, base = np.polyfit(items, ms, 1)
    residual = max(abs(slope * x + base - y) / y for x, y in zip(items, ms, strict=True))
    return Line(float(slope * 1e3), float(base / keys * 1e6), float(slope / base * keys), float(residual))


def measure(task: Task, template: str, gpu: Gpu) -> dict[str, Any]:
    """The times of the likeliest variant of `template` for each number of waves, and the fitted line."""
    likely = candidates(task.spec, BatchBucket.of(task.batch), task.page_size, gpu)
    first = next(variant for variant in likely if variant.template == template)
    bench = Workbench(task, gpu)
    watches, items, cut, tiles = {}, dict[str, float](), dict[str, Variant](), 0
    for waves in WAVES:
        variant = first.replace(waves=waves, reduction="last_program")
        launcher, _ = bench.planned(variant, GRAPH)
        assert isinstance(launcher, WorkListLauncher)
        check = bench.checker(0).check(launcher)
        if not check.passed:
            raise SystemExit(f"{variant.key()}: {check.detail}")
        tiles = len(launcher.tiles(task.batch).keys)
        name = str(waves)
        items[name] = len(launcher.work_list(task.batch).items) * task.spec.num_kv_heads / gpu.num_sms
        watches[name], cut[name] = median_of_three(bench.stopwatch(launcher, GRAPH)), variant
    ms = in_turns(watches)
    length = sum(task.batch.kv_lens) / task.batch.num_seqs
    keys = length * tiles * task.spec.num_kv_heads / gpu.num_sms
    return {"template": template, "batch": str(task.batch), "variants": {name: v.key() for name, v in cut.items()},
            "items_per_sm": items, "keys_per_sm": keys, "ms": ms,
            "line": asdict(fitted(list(items.values()), [ms[name] for name in items], keys))}  # fmt: skip


def main(arguments: argparse.Namespace) -> None:
    """Time all, write the JSON and print the table."""
    gpu = record.required_gpu(arguments.interpreter)
    spec, batches, templates = AttentionSpec(2, 1, 64), {"short": "2x1@200", "long": "1x16@200"}, TEMPLATES[:1]
    if not arguments.interpreter:
        (spec,), batches, templates = model_layers("llama-3-8b", 1, None), BATCHES, TEMPLATES
    rows = [{"kind": kind, **measure(Task(spec, Batch.parse(text), arguments.page_size), template, gpu)}
            for template in templates for kind, text in batches.items()]  # fmt: skip
    record.write(arguments.out, {"spec": spec.key(), "page_size": arguments.page_size, "rows": rows})
    record.print_table(
        ("template", "tile", *(f"{waves} waves, ms" for waves in WAVES), "us an item", "ns a key", "an item in keys"),
        [[row["template"], row["kind"], *(f"{ms:.4f}" for ms in row["ms"].values()),
          *(_number(row["line"][name]) for name in ("us_per_item", "ns_per_key", "item_in_keys"))] for row in rows])


def _number(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "-"


if __name__ == "__main__":
    parser = record.parser(__doc__)
    record.add_interpreter(parser)
    parser.add_argument("--page-size", type=int, default=16, metavar="TOKENS")
    main(parser.parse_args())
