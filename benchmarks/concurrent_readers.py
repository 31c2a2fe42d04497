"""Eight processes look up, and take newer snapshots, while one writes trials and best configs to the same database.

Every config that is written says in its times which variant it is of, so that a reader knows half a result from a whole
one, and an older snapshot after a newer. The writer does what a tuner does, as fast as it can, and times each write.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event, Semaphore
from typing import Any

import record
import synthetic

from attention_tuner.db import LiveTable, Setting, Store, TrialRecord
from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.outcome import BestConfig, Check, Timed, Timing

READERS = 8
ROWS = 1_000
# What is tuned in the meantime, and how often a reader looks whether there is anything new.
TUNED = 20
REFRESH_S = 0.05


def written(config: BestConfig, number: int) -> BestConfig:
    """`config` as its `number`-th tuning leaves it: its times say the number, and its variant whether that is even."""
    regime, values = config.timing.regime, config.variant.as_dict()
    name = "waves" if "waves" in values else "num_stages"
    first, second = (1, 2) if name == "waves" else (2, 3)
    return replace(config, variant=config.variant.replace(**{name: second if number % 2 else first}),
                   timing=Timing((float(number),), regime), default_timing=Timing((2.0 * number,), regime))


def read(path: str, configs: list[BestConfig], ready: Semaphore, stop: Event, results: Queue[dict[str, Any]]) -> None:
    """A reader: asks for every config in turn, refreshes now and then, and keeps what was wrong."""
    warned: list[str] = []
    warnings.showwarning = lambda message, *_: warned.append(str(message))
    # Synthetic configs are all stale, and told of for each layer.
    logging.getLogger("attention_tuner").setLevel(logging.ERROR)
    live = LiveTable(path, configs[0].gpu)
    lookups = refreshes = 0
    newest = [0] * len(configs)
    wrong: list[str] = []
    loads: list[float] = []
    due = time.perf_counter()
    ready.release()
    while not stop.is_set():
        for index, config in enumerate(configs):
            asked = Batch.parse(config.batch) if lookups == 0 else config.shape.bucket
            answer = live.lookup(config.shape.spec, asked, config.variant.page_size, config.gpu)
            lookups += 1
            found = answer.config
            if found is None or answer.distance or found.shape.bucket != config.shape.bucket:
                wrong.append(f"{answer.source} for {config.batch}")
                continue
            number = round(found.timing.median_ms)
            if found != written(config, number):
                wrong.append(f"half a result: {found!r}")
            elif number < newest[index]:
                wrong.append(f"{number} after {newest[index]}")
            newest[index] = number
        if (start := time.perf_counter()) >= due:
            if live.refresh():
                refreshes += 1
                loads.append(time.perf_counter() - start)
            due = start + REFRESH_S
    results.put({"lookups": lookups, "refreshes": refreshes, "wrong": wrong[:5], "wrong_count": len(wrong),
                 "warnings": warned[:5], "newest": newest,
                 "load_ms": statistics.median(loads) * 1e3 if loads else None})  # fmt: skip


def write(store: Store, configs: list[BestConfig], seconds: float) -> dict[str, Any]:
    """The writer: trials and best configs of every task in turn. Errors end the benchmark."""
    run = store.start_run({"benchmark": True})
    times: dict[str, list[float]] = {"trial": [], "best": []}
    number, end = 1, time.monotonic() + seconds
    while time.monotonic() < end:
        number += 1
        for config in configs:
            new = written(config, number)
            setting = Setting(config.shape.spec, Batch.parse(config.batch), config.variant.page_size, config.gpu,
                              config.timing.regime)  # fmt: skip
            trial = TrialRecord(run, setting, config.environment, Timed(new.variant, Check(0.1), new.timing))
            for kind, call in (("trial", lambda trial=trial: store.add_trial(trial)),
                               ("best", lambda new=new: store.put_best(new))):  # fmt: skip
                start = time.perf_counter()
                call()
                times[kind].append(time.perf_counter() - start)
    return {"rounds": number - 1, **{
        f"{kind}_ms": {"count": len(each), "median": statistics.median(each) * 1e3,
                       "p99": statistics.quantiles(each, n=100)[98] * 1e3, "longest": max(each) * 1e3}
        for kind, each in times.items()}}  # fmt: skip


def distinct(configs: list[BestConfig], count: int) -> list[BestConfig]:
    """So many of different buckets and layers: nothing else then answers for one."""
    return list({(c.shape, c.variant.page_size): c for c in configs}.values())[:count]


def measure(readers: int, rows: int, seconds: float) -> dict[str, Any]:
    """What the readers and the writer did in so many seconds, and what the same writes take without readers."""
    everything = distinct(synthetic.configs(2 * rows), rows)
    tuned = everything[:TUNED]
    context = multiprocessing.get_context("spawn")
    ready, stop, results = context.Semaphore(0), context.Event(), context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/tuner.db"
        with Store.open(path) as store:
            store.put_best(*(written(config, 1) for config in everything))
            alone = write(store, tuned, min(5.0, seconds))
            store.put_best(*(written(config, 1) for config in tuned))
            processes = [context.Process(target=read, args=(path, tuned, ready, stop, results)) for _ in range(readers)]
            for process in processes:
                process.start()
            for _ in processes:
                ready.acquire()
            writer = write(store, tuned, seconds)
        stop.set()
        found = [results.get(timeout=60) for _ in processes]
        for process in processes:
            process.join()
    return {"readers": found, "exit_codes": [process.exitcode for process in processes], "writer": writer,
            "writer_alone": alone}  # fmt: skip


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--readers", type=int, default=READERS)
    parser.add_argument("--rows", type=int, default=ROWS, help="configs in the database")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the writer tunes")
    options: argparse.Namespace = parser.parse_args()
    found = measure(options.readers, options.rows, options.seconds)
    record.write(options.out, {"rows": options.rows, "seconds": options.seconds, "refresh_s": REFRESH_S, **found})
    record.print_table(("reader", "lookups", "snapshots", "a load, ms", "wrong", "warnings"), [
        [str(index), str(each["lookups"]), str(each["refreshes"]), f"{each['load_ms'] or 0:.1f}",
         str(each["wrong_count"]), str(len(each["warnings"]))] for index, each in enumerate(found["readers"])])
    record.print_table(("write", "count", "median ms", "p99", "longest", "alone: median", "longest"), [
        [kind, str(found["writer"][f"{kind}_ms"]["count"]),
         *(f"{found['writer'][f'{kind}_ms'][name]:.2f}" for name in ("median", "p99", "longest")),
         *(f"{found['writer_alone'][f'{kind}_ms'][name]:.2f}" for name in ("median", "longest"))]
        for kind in ("trial", "best")])
    wrong = sum(each["wrong_count"] for each in found["readers"])
    if wrong or any(found["exit_codes"]):
        sys.exit(f"{wrong} wrong answers; exit codes {found['exit_codes']}")


if __name__ == "__main__":
    main()
