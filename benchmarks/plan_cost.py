"""Measure the host time of a plan, for each template and decode and hybrid batches of 1 to 4096 sequences.

Every batch is planned for the first time, in reserved memory, from arrays of lengths. The time includes the copy to the
device. A launcher caches results that depend only on query lengths; "new hybrid" shows a step with new query lengths.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import record
import torch

from attention_tuner.kernel_templates.batch import Batch, BatchBucket, Lengths
from attention_tuner.kernel_templates.gpu import TARGETS, Gpu
from attention_tuner.kernel_templates.launch.launcher import Launcher, make_launcher
from attention_tuner.kernel_templates.registry import templates, why_invalid
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.variant import Value, Variant

SPEC = AttentionSpec(32, 8, 128)
SIZES = (1, 4, 16, 64, 256, 1024, 4096)
# Values of the dimensions, if the template has that choice; the first choice otherwise.
VALUES: dict[str, Value] = {
    "block_m": 64, "block_n": 64, "decode_block_m": 16, "decode_block_n": 64, "num_warps": 4, "decode_num_warps": 4,
    "num_stages": 3, "num_segments": 4, "waves": 4, "long_weight": 2,
}  # fmt: skip


def decode(size: int, draw: random.Random) -> Batch:
    """Sequences of about 1,024 keys, one query token each."""
    return Batch(tuple((1, draw.randint(960, 1088)) for _ in range(size)))


def hybrid(size: int, draw: random.Random) -> Batch:
    """As `decode`, with a chunk of 512 tokens as the first sequence."""
    return Batch(((512, 3584 + draw.randint(0, 64)), *decode(size, draw).sequences[1:]))


def split_hybrid(size: int, draw: random.Random) -> Batch:
    """As `hybrid`, with a context long enough for several segments."""
    return Batch(((512, 32768 + draw.randint(0, 64)), *decode(size, draw).sequences[1:]))


def new_hybrid(size: int, draw: random.Random) -> Batch:
    """A hybrid batch with a chunk of random length."""
    return Batch(((draw.randint(257, 512), 3584), *decode(size, draw).sequences[1:]))


BATCHES: dict[str, Callable[[int, random.Random], Batch]] = {
    "decode": decode, "hybrid": hybrid, "split hybrid": split_hybrid,
    "new hybrid": new_hybrid,
}  # fmt: skip


def launcher(template: str, gpu: Gpu, batch: Batch) -> Launcher | None:
    """The launcher of one variant of `template`; None if it cannot run."""
    record_of = templates()[template]
    values = {d.name: VALUES[d.name] if VALUES.get(d.name) in d.choices else d.choices[0]
              for d in record_of.dimensions}  # fmt: skip
    variant = record_of.settle(Variant.of(template, 16, values), BatchBucket.of(batch))
    return make_launcher(variant, SPEC, gpu) if why_invalid(variant, SPEC, gpu) is None else None


class Costs(NamedTuple):
    """Host microseconds of one plan and its parts."""

    plan: float
    # Checking the two arrays of lengths.
    lengths: float
    # Making the work list.
    list: float
    # Writing the work list, copying it to the device, and the rest.
    upload: float


def plan_costs(made: Launcher, batches: Sequence[Batch], device: str) -> list[Costs]:
    """The costs of all plans except the first tenth."""
    made.reserve(max(b.num_seqs for b in batches), max(b.num_tokens for b in batches), device)
    marks: list[float] = []
    work_list = made.work_list  # pyright: ignore

    def marked(batch: Lengths) -> object:
        marks.append(time.perf_counter())
        work = work_list(batch)
        marks.append(time.perf_counter())
        return work

    made.work_list = marked  # pyright: ignore
    costs: list[Costs] = []
    for batch in batches:
        query_lens, context_lens = np.array(batch.sequences, np.int32).T.copy()
        marks[:] = [time.perf_counter()]
        made.plan(Lengths.of(query_lens, context_lens), device)
        start, checked, listed, stop = (1e6 * mark for mark in (*marks, time.perf_counter()))
        costs.append(Costs(stop - start, checked - start, listed - checked, stop - listed))
    if device == "cuda":
        torch.cuda.synchronize()
    return costs[len(costs) // 10 :]


def measure(names: Sequence[str], sizes: Sequence[int], repeats: int, gpu: Gpu, device: str) -> list[dict[str, object]]:
    """A row for each batch, size and template: quartiles over `repeats` plans, and medians of their parts."""
    rows: list[dict[str, object]] = []
    for kind, make in BATCHES.items():
        for size in sizes:
            draw = random.Random(size)
            batches = [make(size, draw) for _ in range(repeats)]
            for name in names:
                made = launcher(name, gpu, batches[0])
                if made is not None:
                    costs = Costs(*zip(*plan_costs(made, batches, device), strict=True))
                    low, median, high = statistics.quantiles(costs.plan, n=4)
                    parts = {f"{part}_us": statistics.median(getattr(costs, part)) for part in Costs._fields[1:]}
                    rows.append({"batch": kind, "sequences": size, "template": name, "median_us": median,
                                 "quartiles_us": [low, high], **parts})  # fmt: skip
    return rows


def table(rows: Sequence[dict[str, object]], names: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """The medians of plan and parts: a row for each batch and size, a column for each template."""
    cells = {(row["batch"], row["sequences"], row["template"]):
             "{median_us:.0f} ({lengths_us:.0f}+{list_us:.0f}+{upload_us:.0f})".format(**row)
             for row in rows}  # fmt: skip
    lines = list(dict.fromkeys((row["batch"], row["sequences"]) for row in rows))
    return ["batch", "sequences", *names], [
        [str(kind), str(size), *(cells.get((kind, size, name), "-") for name in names)] for kind, size in lines
    ]


def main() -> None:
    """Measure all plans, write the JSON and print the table."""
    parser = record.parser(__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=list(SIZES), metavar="N")
    parser.add_argument("--templates", nargs="+", default=list(templates()), metavar="NAME")
    parser.add_argument("--repeats", type=int, default=400, help="plans of each batch, size and template")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the plan is copied to")
    options: argparse.Namespace = parser.parse_args()
    # Without a GPU, plan for the size of an H200.
    gpu = record.required_gpu(interpreter=False) if options.device == "cuda" else TARGETS["sm_90"]
    rows = measure(options.templates, options.sequences, options.repeats, gpu, options.device)
    record.write(options.out, {"device": options.device, "gpu": gpu.name, "spec": SPEC.key(),
                               "repeats": options.repeats, "rows": rows})  # fmt: skip
    print("microseconds of the host for a plan (lengths + list + upload), medians")
    record.print_table(*table(rows, options.templates))


if __name__ == "__main__":
    main()
