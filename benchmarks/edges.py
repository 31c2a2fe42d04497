"""Time tuned configs away from tuned shapes: other batch sizes, packed K and V, bfloat16 partial results.

Three experiments: decode of 1 to 32 sequences and one verification step with the configs of a lookup; the same launch
with K and V in one tensor and in two; partial results in float32 and bfloat16, timed and checked.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import record

from attention_tuner.db.lookup.lookup import load_table
from attention_tuner.db.lookup.table import ConfigTable
from attention_tuner.kernel_templates.batch import Batch, BatchBucket
from attention_tuner.kernel_templates.gpu import Gpu
from attention_tuner.kernel_templates.heuristic import candidates
from attention_tuner.kernel_templates.oracle.inputs import make_tensors
from attention_tuner.kernel_templates.outcome import Regime
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.task import Task
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.search_spaces.models import model_layers
from attention_tuner.search_spaces.suites import named_batches
from attention_tuner.tuner.measure.bench import Workbench
from attention_tuner.tuner.measure.stopwatch import Stopwatch

SIZES = (1, 2, 4, 8, 9, 12, 16, 17, 24, 32)
CONTEXT_LEN = 32_767
VERIFICATION = ("1x1@7400", "1x4@7400")
BATCHES = ("hybrid_512@4k_31dec", "decode_64_mixed", "chunk_512@32k", "verify_32x6@20k")
ROUNDS = 7
GRAPH = Regime("graph")


class Bench:
    """One layer and page size on one GPU, with configs from a lookup."""

    def __init__(self, spec: AttentionSpec, page_size: int, gpu: Gpu, table: ConfigTable) -> None:
        self.spec = spec
        self.page_size = page_size
        self.gpu = gpu
        self.table = table

    def workbench(self, batch: Batch) -> Workbench:
        """The workbench of `batch`."""
        return Workbench(Task(self.spec, batch, self.page_size), self.gpu)

    def found(self, batch: Batch) -> tuple[Variant, str]:
        """The lookup's variant for `batch`, and its source."""
        answer = self.table.lookup(self.spec, batch, self.page_size, self.gpu)
        return answer.variant, str(answer.source)

    def sizes(self, texts: list[str]) -> list[dict[str, Any]]:
        """A row with the time of each batch."""
        rows: list[dict[str, Any]] = []
        for text in texts:
            batch = Batch.parse(text)
            bench = self.workbench(batch)
            variant, source = self.found(batch)
            launcher, _ = bench.planned(variant, GRAPH)
            ms = statistics.median(bench.stopwatch(launcher, GRAPH).samples(ROUNDS))
            rows.append({"batch": text, "variant": variant.key(), "source": source, "ms": ms,
                         "ms_per_sequence": ms / batch.num_seqs})  # fmt: skip
        return rows

    def packed(self, name: str, batch: Batch) -> dict[str, Any]:
        """The times of one launch with K and V in two tensors and in one."""
        variant, _ = self.found(batch)
        bench = self.workbench(batch)
        launcher, _ = bench.planned(variant, GRAPH)
        count = len(bench.buffers(GRAPH))
        watches: dict[str, Callable[[], float]] = {}
        for kind, is_packed in (("separate", False), ("packed", True)):
            tensors = [
                make_tensors(self.spec, batch, self.page_size, bench.device, seed, packed=is_packed, needles=False)
                for seed in range(count)
            ]
            watches[kind] = median_of_three(Stopwatch(launcher.run, tensors, bench.stopwatch(launcher, GRAPH).regime))
        ms = in_turns(watches)
        return {"batch": name, "variant": variant.key(), **ms, "ratio": ms["packed"] / ms["separate"]}

    def partials(self, name: str, batch: Batch) -> list[dict[str, Any]]:
        """The times and the errors over the tolerance of each template, with float32 and with bfloat16 partials."""
        bench = self.workbench(batch)
        rows: list[dict[str, Any]] = []
        for template, variant in self._with_partials(batch).items():
            watches: dict[str, Callable[[], float]] = {}
            errors: dict[str, float] = {}
            for dtype in ("float32", "bfloat16"):
                launcher, _ = bench.planned(variant.replace(partials=dtype), GRAPH)
                errors[dtype] = bench.checker(0).check(launcher).worst_ratio
                watches[dtype] = median_of_three(bench.stopwatch(launcher, GRAPH))
            rows.append({"batch": name, "template": template, "variant": variant.key(), "ms": in_turns(watches),
                         "error_of_tolerance": errors})  # fmt: skip
        return rows

    def _with_partials(self, batch: Batch) -> dict[str, Variant]:
        """By template with that dimension: the lookup's variant or the likeliest one, with at least two waves."""
        found, _ = self.found(batch)
        likely = candidates(self.spec, BatchBucket.of(batch), self.page_size, self.gpu)
        variants = [variant for variant in (found, *likely) if "partials" in variant.as_dict()]
        split = (variant.replace(waves=max(2, variant.number("waves"))) for variant in variants)
        return {variant.template: variant for variant in reversed(list(split))}


def median_of_three(watch: Stopwatch[Any]) -> Callable[[], float]:
    """A function that takes the median of three samples."""
    return lambda: statistics.median(watch.samples(3))


def in_turns(watches: dict[str, Callable[[], float]]) -> dict[str, float]:
    """The median milliseconds of each function in `watches`, sampled in turns."""
    samples: dict[str, list[float]] = {name: [] for name in watches}
    for _ in range(ROUNDS):
        for name, watch in watches.items():
            samples[name].append(watch())
    return {name: statistics.median(taken) for name, taken in samples.items()}


def asked(interpreter: bool) -> tuple[AttentionSpec, list[str], list[str], dict[str, Batch]]:
    """The layer, and the batches for sizes, for verification and for the other experiments."""
    if interpreter:
        tiny = Batch.parse("1x16@32,2x1@40")
        return AttentionSpec(4, 2, 64), ["1x1@40", "2x1@40"], ["1x1@30", "1x4@30"], {"tiny": tiny}
    (spec,), named = model_layers("llama-3-8b", 1, None), named_batches("hopper13")
    sizes = [f"{size}x1@{CONTEXT_LEN}" for size in SIZES]
    return spec, sizes, list(VERIFICATION), {name: named[name] for name in BATCHES}


def main(arguments: argparse.Namespace) -> None:
    """Time all, write the JSON and print the tables."""
    gpu = record.required_gpu(arguments.interpreter)
    spec, sizes, verification, batches = asked(arguments.interpreter)
    bench = Bench(spec, arguments.page_size, gpu, load_table(arguments.db))
    results: dict[str, Any] = {"spec": spec.key(), "page_size": arguments.page_size, "decode": bench.sizes(sizes),
                               "verification": bench.sizes(verification), "packed": [], "partials": []}  # fmt: skip
    if not arguments.sizes_only:
        results["packed"] = [bench.packed(name, batch) for name, batch in batches.items()]
        results["partials"] = [row for name, batch in batches.items() for row in bench.partials(name, batch)]
    record.write(arguments.out, results)
    rows = [[row["batch"], row["source"], f"{row['ms']:.4f}", f"{row['ms_per_sequence']:.4f}", row["variant"]]
            for row in (*results["decode"], *results["verification"])]  # fmt: skip
    record.print_table(("batch", "found", "ms", "a sequence", "variant"), rows)
    if arguments.sizes_only:
        return
    rows = [[row["batch"], f"{row['separate']:.4f}", f"{row['packed']:.4f}", f"{row['ratio']:.3f}"]
            for row in results["packed"]]  # fmt: skip
    record.print_table(("batch", "K and V apart, ms", "packed, ms", "ratio"), rows)
    rows = [[row["batch"], row["template"], *(f"{row[kind][dtype]:.4f}" for kind in ("ms", "error_of_tolerance")
             for dtype in ("float32", "bfloat16"))] for row in results["partials"]]  # fmt: skip
    record.print_table(("batch", "template", "float32 ms", "bfloat16 ms", "error, float32", "bfloat16"), rows)


if __name__ == "__main__":
    parser = record.parser(__doc__)
    record.add_interpreter(parser)
    parser.add_argument("--page-size", type=int, default=16, metavar="TOKENS")
    parser.add_argument("--sizes-only", action="store_true", help="batches of growing size only")
    parser.add_argument("--db", metavar="PATH|URL", help="database of the configs (default: the user's)")
    main(parser.parse_args())
