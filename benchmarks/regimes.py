"""Time variants in every regime: cold and warm L2, graph and eager, burst and sustained."""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from typing import Any

import record

from attention_tuner.kernel_templates.batch import Batch, BatchBucket
from attention_tuner.kernel_templates.gpu import Gpu
from attention_tuner.kernel_templates.heuristic import candidates, default_variant
from attention_tuner.kernel_templates.outcome import Regime
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.task import Task
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.search_spaces.models import model_layers
from attention_tuner.search_spaces.suites import named_batches
from attention_tuner.tuner.measure.bench import Workbench
from attention_tuner.tuner.measure.stopwatch import Stopwatch

PAGE_SIZE = 16
SAMPLES = 20
# Seconds of rest until the GPU is cool, and seconds of load until its power is constant.
REST_S = 0.3
LOAD_S = 2.0
# Seconds of load between two sustained timings, because the GPU rests during the setup.
RELOAD_S = 0.3


def tasks(interpreter: bool) -> dict[str, Task]:
    """The tasks to time: a decode batch of a layer divided among eight GPUs, and a hybrid batch of a whole layer."""
    if interpreter:
        return {"tiny": Task(AttentionSpec(4, 2, 64, "float16"), Batch.parse("1x16@32,2x1@40"), PAGE_SIZE)}
    batches = named_batches("hopper13")
    (tp8,), (whole,) = model_layers("llama-3-70b", 8, None), model_layers("llama-3-8b", 1, None)
    return {
        "decode_4x64k, 8 query heads": Task(tp8, batches["decode_4x64k"], PAGE_SIZE),
        "hybrid_512@4k, 32 query heads": Task(whole, batches["hybrid_512@4k_31dec"], PAGE_SIZE),
    }


def variants(task: Task, gpu: Gpu) -> dict[str, Variant]:
    """The default, and the heuristic's first variant of template `fused`."""
    likely = candidates(task.spec, BatchBucket.of(task.batch), task.page_size, gpu)
    return {
        "default": default_variant(task.spec, task.batch, task.page_size),
        "fused": next(variant for variant in likely if variant.template == "fused"),
    }


def timed(bench: Workbench, variant: Variant) -> list[tuple[Regime, list[float]]]:
    """The samples in milliseconds of every regime, bursts first."""
    found: list[tuple[Regime, list[float]]] = []
    for load, capture, l2 in itertools.product(("burst", "sustained"), ("graph", "eager"), ("cold", "warm")):
        regime = Regime(capture, l2, load)
        launcher, _ = bench.planned(variant, regime)
        if not bench.checker(0).check(launcher).passed:
            sys.exit(f"{variant.key()} is wrong")
        watch = bench.stopwatch(launcher, regime)
        if bench.gpu.is_interpreter:
            return [(watch.regime, list(watch.samples(2)))]
        if load == "burst":
            time.sleep(REST_S)
        else:
            keep_busy(watch, LOAD_S if (capture, l2) == ("graph", "cold") else RELOAD_S)
        found.append((watch.regime, list(watch.samples(SAMPLES))))
    return found


def keep_busy(watch: Stopwatch[Any], seconds: float) -> None:
    """Run the kernel for `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        watch.samples(50)


def main(arguments: argparse.Namespace) -> None:
    """Time all, write the JSON and print the table."""
    gpu = record.required_gpu(arguments.interpreter)
    start = time.monotonic()
    results: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    for name, task in tasks(arguments.interpreter).items():
        bench = Workbench(task, gpu)
        for kind, variant in variants(task, gpu).items():
            samples = timed(bench, variant)
            reference = statistics.median(samples[0][1])
            for regime, ms in samples:
                median = statistics.median(ms)
                spread = (max(ms) - min(ms)) / median
                results.append({"batch": name, "spec": task.spec.key(), "variant": variant.key(), "kind": kind,
                                "regime": str(regime), "median_ms": median, "samples_ms": ms})  # fmt: skip
                rows.append([name, kind, str(regime), f"{1e3 * median:.1f}", f"{median / reference:.3f}",
                             f"{spread:.1%}"])  # fmt: skip
        del bench
    record.write(arguments.out, {"timings": results, "seconds": time.monotonic() - start})
    record.print_table(("batch", "variant", "regime", "us", "of graph-cold-burst", "max-min"), rows)
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    parser = record.parser(__doc__)
    record.add_interpreter(parser)
    main(parser.parse_args())
