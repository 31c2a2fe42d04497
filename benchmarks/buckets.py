"""Measure the loss when a shape runs the winner of another shape in its bucket, for several bucket widths.

In a bucket of width 2 (that of `BatchBucket`), sizes of batches differ by at most a factor of 2. The result recommends
the widest bucket whose worst loss is below 3 %. For each pair of shapes, a table in which only the other shape is tuned
answers for the bucket. If the other's winner may not answer for other batches, the heuristic answers. Pairs in one
present bucket have their own row.

Times are from trials in the databases or, with `--measure` on a GPU, from races. First tune `suites/buckets.json`,
which has batches in the middle and at the edges of buckets. `--into` writes the median loss of pairs in one bucket to
an export, as the expected loss of source "bucket".
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import record
from leave_one_out import RACE_LIMIT_S, Times, percent, trial_times, write_losses

from attention_tuner.db import Answer, ConfigTable, Store
from attention_tuner.db.losses import Loss
from attention_tuner.kernel_templates.batch import Batch, BatchSummary
from attention_tuner.kernel_templates.gpu import Gpu
from attention_tuner.kernel_templates.outcome import BestConfig, Timing
from attention_tuner.kernel_templates.registry import why_invalid
from attention_tuner.kernel_templates.task import Task
from attention_tuner.tuner.measure.jobs import RaceJob
from attention_tuner.tuner.run import executor_on as command_executor

# The width of `BatchBucket`.
BUCKET_WIDTH = 2.0
WIDTHS = (2**0.5, BUCKET_WIDTH, 4.0, 8.0)
WANTED = 0.03
# A config is no winner if another variant beats it by more than this factor on its own shape.
SLIP = 1.1


def sizes(config: BestConfig) -> tuple[float, ...]:
    """The sizes that a bucket rounds, in the order of its fields."""
    summary = BatchSummary.of(Batch.parse(config.batch))
    skew = summary.short_longest * summary.short_seqs / summary.short_kv if summary.short_kv else 0.0
    return (summary.short_seqs, summary.short_rows, summary.short_kv, summary.long_seqs, summary.long_rows,
            summary.long_kv, skew)  # fmt: skip


def can_share(one: BestConfig, other: BestConfig, width: float) -> bool:
    """True if a bucket of `width` can hold both batches: each size differs by at most this factor."""
    places = ((c.shape.spec, c.variant.page_size, c.gpu.name, c.gpu.num_sms) for c in (one, other))
    if next(places) != next(places):
        return False
    both = zip(sizes(one), sizes(other), strict=True)
    return all(bool(a) == bool(b) and max(a, b) <= width * min(a, b) for a, b in both)


def answered(asked: BestConfig, other: BestConfig) -> Answer:
    """The answer for the bucket of `asked` if only `other` is tuned in it."""
    table = ConfigTable.of([replace(other, shape=asked.shape, batch=asked.batch)])
    return table.lookup(asked.shape.spec, asked.shape.bucket, asked.variant.page_size, asked.gpu)


def pairs(configs: Sequence[BestConfig], width: float) -> list[tuple[BestConfig, BestConfig]]:
    """All pairs of shapes that can share a bucket of `width`."""
    return [(asked, other) for asked, other in itertools.permutations(configs, 2)
            if asked.batch != other.batch and can_share(asked, other, width)]  # fmt: skip


def of_one_bucket(configs: Sequence[BestConfig]) -> list[tuple[BestConfig, BestConfig]]:
    """All pairs of shapes that share a present bucket."""
    return [(asked, other) for asked, other in pairs(configs, BUCKET_WIDTH) if asked.shape == other.shape]


def losses(
    both: Iterable[tuple[BestConfig, BestConfig]], times: Mapping[BestConfig, Times]
) -> list[dict[str, Any]]:
    """The loss of each pair's first shape with the answer from the second, if that was timed."""
    found: list[dict[str, Any]] = []
    for asked, other in both:
        known, answer = times[asked], answered(asked, other)
        if answer.variant in known and asked.variant in known:
            found.append({"batch": asked.batch, "page_size": asked.variant.page_size, "spec": asked.shape.spec.key(),
                          "tuned_on": other.batch, "source": answer.source, "answer": answer.variant.key(),
                          "loss": known[answer.variant] / known[asked.variant] - 1})  # fmt: skip
    return found


def bucket_losses(configs: Sequence[BestConfig], times: Mapping[BestConfig, Times]) -> list[Loss]:
    """The median loss of source "bucket", for each GPU model."""
    groups: dict[str, list[BestConfig]] = defaultdict(list)
    for config in configs:
        groups[config.gpu.name].append(config)
    found = {name: [row["loss"] for row in losses(of_one_bucket(alike), times) if row["source"] == "bucket"]
             for name, alike in groups.items()}  # fmt: skip
    return [Loss(name, "bucket", 0.0, len(each), statistics.median(each)) for name, each in found.items() if each]


def summary(both: Sequence[tuple[BestConfig, BestConfig]], times: Mapping[BestConfig, Times]) -> dict[str, Any]:
    """The number of pairs and their losses."""
    found = losses(both, times)
    values = [row["loss"] for row in found]
    return {
        "pairs": len(both),
        "timed": len(values),
        "passed_over": sum(row["source"] != "bucket" for row in found),
        "median": statistics.median(values) if values else None,
        "worst": max(values, default=None),
        "worst_pairs": sorted(found, key=lambda row: -row["loss"])[:5],
    }


def recommended(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The widest bucket whose worst loss, as that of all narrower ones, is below 3 %; None if there is none.

    Also None if no pair of the present width was timed, because few narrower pairs prove nothing.
    """
    if not any(row["width"] == BUCKET_WIDTH and row["worst"] is not None for row in rows):
        return None
    fit = list(itertools.takewhile(lambda row: row["worst"] is None or row["worst"] < WANTED, rows))
    known = [row["width"] for row in fit if row["worst"] is not None]
    return max(known, default=None)


def measured(configs: Sequence[BestConfig], gpu: Gpu, rounds: int) -> dict[BestConfig, Times]:
    """The median times of each shape's winner and of the answers in its widest bucket, raced on this GPU."""
    widest = pairs(configs, WIDTHS[-1])
    found: dict[BestConfig, Times] = {}
    with contextlib.closing(command_executor(gpu)) as executor:
        racer = executor.racer or executor.worker
        for config in configs:
            others = (answered(config, other).variant for asked, other in widest if asked == config)
            valid = (v for v in (config.variant, *others) if why_invalid(v, config.shape.spec, gpu) is None)
            task = Task(config.shape.spec, Batch.parse(config.batch), config.variant.page_size)
            result = racer.submit(RaceJob(task, tuple(dict.fromkeys(valid)), rounds), RACE_LIMIT_S).result()
            timings = result.timings.items()
            found[config] = {v: timing.median_ms for v, timing in timings if isinstance(timing, Timing)}
    return found


def main() -> None:
    """Compute the losses, write the JSON and print the table."""
    parser = record.parser(__doc__)
    parser.add_argument("--db", nargs="+", required=True, metavar="DATABASE", help="databases of tuned shapes")
    parser.add_argument("--measure", action="store_true", help="race the winners on this GPU")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of each race")
    parser.add_argument("--into", metavar="EXPORT", help="a JSON export to write the loss of shapes of one bucket to")
    options: argparse.Namespace = parser.parse_args()
    configs: list[BestConfig] = []
    for path in options.db:
        with Store.open(path) as store:
            configs += store.best_configs()
    if options.measure:
        gpu = record.required_gpu(interpreter=False)
        configs = [config for config in configs if config.gpu.name == gpu.name]
        times: Mapping[BestConfig, Times] = measured(configs, gpu, options.rounds)
    else:
        times = trial_times(options.db, configs)
    configs = [c for c in configs if times[c].get(c.variant, 0.0) <= SLIP * min(times[c].values())]
    # Each of many tables would warn about its missing shapes.
    logging.getLogger("attention_tuner").setLevel(logging.ERROR)
    rows = [{"width": width, **summary(pairs(configs, width), times)} for width in WIDTHS]
    one_bucket = summary(of_one_bucket(configs), times)
    widest = recommended(rows)
    of_buckets = bucket_losses(configs, times)
    if options.into:
        write_losses(options.into, of_buckets, configs, ("bucket",))
    record.write(options.out, {
        "losses": [asdict(loss) for loss in of_buckets],
        "wanted": WANTED, "recommended_width": widest, "measured": options.measure, "widths": rows,
        "one_bucket": one_bucket,
        "shapes": [{"spec": c.shape.spec.key(), "page_size": c.variant.page_size, "batch": c.batch,
                    "summary": asdict(BatchSummary.of(Batch.parse(c.batch))), "best": c.variant.key(),
                    "variants_timed": len(times[c]),
                    "times_ms": {variant.key(): ms for variant, ms in times[c].items()} if options.measure else None}
                   for c in configs],
    })  # fmt: skip
    record.print_table(("width", "pairs", "timed", "passed over", "median loss", "worst"), [
        [name, *(str(row[count]) for count in ("pairs", "timed", "passed_over")), percent(row["median"]),
         percent(row["worst"])]
        for name, row in [*((f"{row['width']:.3g}", row) for row in rows), ("one bucket", one_bucket)]])
    print(f"the widest below {WANTED:.0%}: {'none, or too little was tuned' if widest is None else f'{widest:.3g}'}")


if __name__ == "__main__":
    main()
