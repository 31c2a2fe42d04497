"""Measure the cost of a lookup for an engine: first and repeated answers, bucket of a batch, loading."""

from __future__ import annotations

import gc
import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import record
import synthetic

from attention_tuner.db import Answer, ConfigTable, LiveTable, Store, export_json, load_table, lookup
from attention_tuner.db.engine import PATH_VARIABLE
from attention_tuner.kernel_templates.batch import BatchBucket
from attention_tuner.kernel_templates.outcome import BestConfig

SIZES = (10, 1_000, 100_000)
COLD_ROWS = 10_000
SEQUENCES = 256
QUESTIONS = 64
IMPORT = "import time; t = time.perf_counter(); import attention_tuner.db; print(time.perf_counter() - t)"


def spread(times: Sequence[float], unit: float) -> dict[str, float]:
    """The median and the 99th percentile of times in seconds, in `unit` seconds."""
    return {"median": statistics.median(times) / unit, "p99": statistics.quantiles(times, n=100)[98] / unit}


def each(call: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each single call, clock overhead included."""
    clock = time.perf_counter
    times: list[float] = []
    for _ in range(repeats):
        start = clock()
        call()
        times.append(clock() - start)
    return times


def questions(configs: Sequence[BestConfig]) -> list[tuple[Any, ...]]:
    """An engine's questions about one layer: tuned and other buckets, each a new object."""
    draw = random.Random(1)
    config = configs[0]
    spec, page_size, gpu = config.shape.spec, config.variant.page_size, config.gpu
    alike = [c.shape.bucket for c in configs if (c.shape.spec, c.variant.page_size) == (spec, page_size)]
    tuned = [draw.choice(alike) for _ in range(QUESTIONS // 2)]
    other = [BatchBucket.of(synthetic.batch(draw)) for _ in range(QUESTIONS // 2)]
    return [(spec, BatchBucket(*bucket.sizes), page_size, gpu) for bucket in (*tuned, *other)]


def latency(configs: Sequence[BestConfig], repeats: int) -> dict[str, Any]:
    """The times of first and repeated (hot) answers from a table, and the memory that hot ones leave allocated."""
    table = ConfigTable.of(configs)
    asked = questions(configs)
    opening = each(lambda: table.lookup(*asked[0]), 1)[0]
    first = [each(lambda question=question: table.lookup(*question), 1)[0] for question in asked[1:]]
    again = questions(configs)
    endless = itertools.cycle(again)
    hot = each(lambda: table.lookup(*next(endless)), repeats)
    empty = each(lambda: next(endless), repeats)
    gc.collect()
    before = sys.getallocatedblocks()
    for question in itertools.islice(endless, repeats):
        table.lookup(*question)
    gc.collect()
    growth = sys.getallocatedblocks() - before
    sources = {source: count for source, count in table.coverage().counts.items() if count}
    return {"rows": len(configs), "hot_us": spread(hot, 1e-6), "of_which_the_loop_us": statistics.median(empty) * 1e6,
            "first_us": spread(first, 1e-6), "first_of_a_layer_ms": opening * 1e3,
            "blocks_after_hot_calls": growth, "lookups_by_source": sources}  # fmt: skip


def entrances(rows: int, repeats: int) -> dict[str, Any]:
    """The times of hot answers by each way to look up in a database of `rows` rows, and of the table's id."""
    configs = synthetic.configs(rows)
    asked = itertools.cycle(questions(configs))
    with tempfile.TemporaryDirectory() as folder:
        os.environ[PATH_VARIABLE] = f"{folder}/tuner.db"
        with Store.open(os.environ[PATH_VARIABLE]) as store:
            store.put_best(*configs)
        live = LiveTable(gpu=configs[0].gpu)
        ways: dict[str, Callable[..., Answer]] = {
            "ConfigTable.lookup": live.table.lookup, "LiveTable.lookup": live.lookup, "lookup": lookup}
        found: dict[str, Any] = {"rows": rows}
        for name, ask in ways.items():
            each(lambda ask=ask: ask(*next(asked)), QUESTIONS)
            found[name] = spread(each(lambda ask=ask: ask(*next(asked)), repeats), 1e-6)
        found["unchanged_refresh"] = spread(each(live.refresh, 2_000), 1e-6)
        found["id_ms"] = each(lambda: live.table.id, 1)[0] * 1e3
        del os.environ[PATH_VARIABLE]
    return found


def summary(repeats: int) -> dict[str, Any]:
    """The time to compute a batch's bucket from arrays (256 sequences), alone and with the lookup."""
    draw = random.Random(2)
    query = np.ones(SEQUENCES, np.int32)
    query[0] = 512
    contexts = [np.array([draw.randint(16, 60_000) for _ in range(SEQUENCES)], np.int32) for _ in range(50)]
    configs = synthetic.configs(1_000)
    table = ConfigTable.of(configs)
    spec, page_size, gpu = configs[0].shape.spec, configs[0].variant.page_size, configs[0].gpu
    endless = itertools.cycle(contexts)

    def step() -> None:
        table.lookup(spec, BatchBucket.of_lengths(query, next(endless)), page_size, gpu)

    for _ in contexts:
        step()
    return {"sequences": SEQUENCES,
            "bucket_us": spread(each(lambda: BatchBucket.of_lengths(query, next(endless)), repeats), 1e-6),
            "bucket_and_lookup_us": spread(each(step, repeats), 1e-6)}  # fmt: skip


def cold_load(rows: int, repeats: int) -> dict[str, Any]:
    """Milliseconds to load a table of `rows` rows that was not read before, by its place."""
    configs = synthetic.configs(rows)
    spec, page_size, gpu = configs[0].shape.spec, configs[0].variant.page_size, configs[0].gpu
    found: dict[str, Any] = {"rows": rows}
    with tempfile.TemporaryDirectory() as folder:
        database, missing = f"{folder}/tuner.db", f"{folder}/none.db"
        with Store.open(database) as store:
            store.put_best(*configs)
        export_json(configs, f"{folder}/json")
        places: dict[str, Callable[[], ConfigTable]] = {
            "database": lambda: load_table(database, gpu),
            "json": lambda: load_table(missing, gpu, files=[f"{folder}/json"]),
        }
        for name, load in places.items():
            times, cpu = [], []
            for _ in range(repeats):
                start, used = time.perf_counter(), time.thread_time()
                table = load()
                times.append(time.perf_counter() - start)
                cpu.append(time.thread_time() - used)
            start = time.perf_counter()
            table.lookup(spec, configs[0].shape.bucket, page_size, gpu)
            size = Path(database if name == "database" else f"{folder}/{name}").stat().st_size
            found[name] = {"load_ms": statistics.median(times) * 1e3, "least_ms": min(times) * 1e3,
                           "cpu_ms": statistics.median(cpu) * 1e3, "bytes": size,
                           "first_lookup_ms": (time.perf_counter() - start) * 1e3}  # fmt: skip
    return found


def import_ms(repeats: int) -> float:
    """The time of `import attention_tuner.db` in a new process, in milliseconds."""
    done = (subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
            for _ in range(repeats))  # fmt: skip
    return statistics.median(float(each.stdout) for each in done) * 1e3


def main() -> None:
    """Measure all, write the JSON and print the tables."""
    parser = record.parser(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="ROWS")
    parser.add_argument("--repeats", type=int, default=200_000, help="hot calls timed at each size")
    parser.add_argument("--cold-rows", type=int, default=COLD_ROWS, metavar="ROWS")
    options = parser.parse_args()
    sizes = [latency(synthetic.configs(size), options.repeats) for size in options.sizes]
    found: dict[str, Any] = {
        "lookup": sizes, "ways": entrances(options.cold_rows, options.repeats),
        "summary": summary(options.repeats // 10), "cold_load": cold_load(options.cold_rows, 15),
        "import_ms": import_ms(5),
    }  # fmt: skip
    record.write(options.out, found)
    print("a lookup, microseconds")
    record.print_table(("rows", "hot", "p99", "first", "first p99", "first of a layer, ms", "blocks kept"), [
        [str(row["rows"]), *(f"{row[kind][name]:.3g}" for kind in ("hot_us", "first_us") for name in ("median", "p99")),
         f"{row['first_of_a_layer_ms']:.3g}", str(row["blocks_after_hot_calls"])] for row in sizes])
    ways = {name: times for name, times in found["ways"].items() if isinstance(times, dict)}
    print(f"{options.cold_rows} rows, by each way to ask, microseconds; the id {found['ways']['id_ms']:.0f} ms")
    record.print_table(("what", "median", "p99"), [
        [name, *(f"{times[q]:.3g}" for q in ("median", "p99"))] for name, times in ways.items()])
    print(f"summary of {SEQUENCES} sequences, microseconds")
    record.print_table(("what", "median", "p99"), [
        [name.removesuffix("_us").replace("_", " "), *(f"{found['summary'][name][q]:.3g}" for q in ("median", "p99"))]
        for name in ("bucket_us", "bucket_and_lookup_us")])
    print(f"loading {options.cold_rows} rows, milliseconds; import attention_tuner.db {found['import_ms']:.0f}")
    loads = {name: found["cold_load"][name] for name in ("database", "json")}
    record.print_table(("from", "median", "least", "CPU", "first lookup", "MB"), [
        [name, *(f"{load[key]:.1f}" for key in ("load_ms", "least_ms", "cpu_ms", "first_lookup_ms")),
         f"{load['bytes'] / 1e6:.1f}"] for name, load in loads.items()])


if __name__ == "__main__":
    main()
