"""Measure the time and memory of a sampler, in spaces of up to a hundred thousand variants.

The variants are from a real space. Each gets an invented time at once.
"""

from __future__ import annotations

import argparse
import math
import random
import resource
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import record

from attention_tuner.kernel_templates.batch import Batch, BatchBucket
from attention_tuner.kernel_templates.gpu import TARGETS
from attention_tuner.kernel_templates.outcome import Check, Regime, Timed, Timing
from attention_tuner.kernel_templates.registry import templates
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.search_spaces.space import survey
from attention_tuner.tuner.sampling.samplers import DEFAULT_SAMPLER, SAMPLERS
from attention_tuner.tuner.sampling.study import Study

BATCH = Batch.parse("1x512@16384,63x1@32768")
SIZES = (1_500, 10_000, 100_000)
GPU = TARGETS["sm_90"]


def space(size: int) -> list[Variant]:
    """`size` variants: valid ones and, if these are too few, also invalid ones."""
    spec, bucket = AttentionSpec(32, 8, 128), BatchBucket.of(BATCH)
    found = dict.fromkeys(survey(spec, bucket, 16, GPU).valid)
    if len(found) < size:
        found |= dict.fromkeys(v for template in templates().values() for v in template.variants(bucket, GPU, 16))
    return random.Random(0).sample(list(found), size)


def milliseconds(variant: Variant) -> float:
    """An invented time that depends on every value of the variant."""
    slope = sum(math.log2(1 + value) for _, value in variant.values if isinstance(value, int))
    return 1 + 0.1 * random.Random(variant.key()).random() + 0.02 * slope


def measure(size: int, sampler: str, trials: int) -> dict[str, Any]:
    """One study over `size` variants, in a process of its own."""
    variants = space(size)
    before = _resident_mib()
    start = time.perf_counter()
    study = Study(variants, sampler=sampler)
    made_s = time.perf_counter() - start
    asks: list[float] = []
    cpu = time.process_time()
    tells: list[float] = []
    for _ in range(trials):
        start = time.perf_counter()
        variant = study.ask()
        asks.append(1e3 * (time.perf_counter() - start))
        if variant is None:
            break
        start = time.perf_counter()
        study.tell(Timed(variant, Check(0.5), Timing((milliseconds(variant),), Regime("graph"))))
        tells.append(1e3 * (time.perf_counter() - start))
    cpu_ms = 1e3 * (time.process_time() - cpu) / len(asks)
    return {
        "variants": size, "made_s": made_s, "cpu_ms_a_trial": cpu_ms, "ask_mean_ms": statistics.mean(asks),
        "ask_most_ms": max(asks), "tell_mean_ms": statistics.mean(tells), "resident_mib": _resident_mib() - before,
    }  # fmt: skip


def _resident_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(arguments: argparse.Namespace) -> None:
    """Measure every sampler at every size, write the JSON and print the table."""
    found: list[dict[str, Any]] = []
    for sampler in arguments.samplers:
        for size in arguments.sizes:
            # A new process, so that no memory of another study is used again.
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                found.append({"sampler": sampler, **pool.submit(measure, size, sampler, arguments.trials).result()})
    record.write(arguments.out, {"batch": str(BATCH), "trials": arguments.trials, "studies": found})
    columns = ("sampler", "variants", "made s", "CPU ms a trial", "ask ms", "longest ms", "tell ms", "MiB")
    record.print_table(columns, [
        [each["sampler"], str(each["variants"]), f"{each['made_s']:.2f}", f"{each['cpu_ms_a_trial']:.1f}",
         f"{each['ask_mean_ms']:.1f}", f"{each['ask_most_ms']:.0f}", f"{each['tell_mean_ms']:.2f}",
         f"{each['resident_mib']:.0f}"]
        for each in found
    ])  # fmt: skip


if __name__ == "__main__":
    parser = record.parser(__doc__)
    parser.add_argument("--samplers", nargs="+", default=[DEFAULT_SAMPLER], choices=SAMPLERS, help="those to measure")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of variants")
    parser.add_argument("--trials", type=int, default=150, help="variants to suggest and report")
    main(parser.parse_args())
