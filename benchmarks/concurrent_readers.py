"""Test concurrent readers: eight processes look up and refresh while `attention-tuner tune` writes to the database.

The tuner is the real command, which searches small batches in Triton's interpreter. Its writes are timed and recorded.
Each reader asks for these batches and for configs that are never written, and checks its answers against the writes.
The same command without readers, on another database, gives the write time alone.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event, Semaphore
from pathlib import Path
from typing import Any

import record
import synthetic

from attention_tuner.db import LiveTable, Store
from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.gpu import INTERPRETER
from attention_tuner.kernel_templates.outcome import BestConfig
from attention_tuner.kernel_templates.spec import AttentionSpec

READERS = 8
ROWS = 1_000
# The number of never-written rows that every reader asks for.
ASKED = 20
# Seconds between two rounds of lookups (an engine's steps), and between two refreshes.
STEP_S = 0.001
REFRESH_S = 0.5
# A small layer, for which a trial takes tens of milliseconds. The run time decides the number of batches tuned.
SPEC = AttentionSpec(2, 1, 32, dtype="float16")
BATCHES = tuple(f"{kind}@{context}" for context in (20, 12, 28, 40) for kind in ("1x1", "2x1", "1x4"))
SECONDS_EACH = 10.0
PAGE_SIZE = 16
ALONE_S = 15.0
# More than the time allows.
TRIALS = 1_000
WRITES = ("add_trial", "put_best")


class Reader:
    """Looks up in a `LiveTable`, and records wrong answers and the tuner's results that it saw."""

    def __init__(self, path: str, configs: Sequence[BestConfig], batches: Sequence[str]) -> None:
        self.path, self.configs = path, configs
        self.lookups = 0
        self.warned: list[str] = []
        self.loads: list[float] = []
        self.wrong: list[str] = []
        self.seen: dict[str, list[BestConfig]] = {batch: [] for batch in batches}

    def open(self) -> None:
        """Load the database, in the reader's own process."""
        def keep(message: Warning | str, *_: object) -> None:
            self.warned.append(str(message))

        warnings.showwarning = keep
        # All synthetic configs are stale, which gives a warning for each layer.
        logging.getLogger("attention_tuner").setLevel(logging.ERROR)
        self.live = LiveTable(self.path, self.configs[0].gpu)

    def ask(self) -> None:
        """Look up every never-written row and every batch being tuned."""
        for config in self.configs:
            answer = self.live.lookup(config.shape.spec, config.shape.bucket, config.variant.page_size, config.gpu)
            if answer.config != config:
                self.wrong.append(f"{answer.config!r} instead of the only config {config!r}")
        for batch, seen in self.seen.items():
            answer = self.live.lookup(SPEC, Batch.parse(batch), PAGE_SIZE, INTERPRETER)
            if answer.source == "exact" and answer.config is not None:
                if answer.config not in seen[-1:]:
                    seen.append(answer.config)
            elif seen:
                self.wrong.append(f"{answer.source} for {batch}, which had an exact answer before")
        self.lookups += len(self.configs) + len(self.seen)

    def refresh(self) -> None:
        """Take a newer snapshot, if there is one."""
        start = time.perf_counter()
        if self.live.refresh():
            self.loads.append(time.perf_counter() - start)


def read(reader: Reader, ready: Semaphore, stop: Event, results: Queue[Reader]) -> None:
    """Ask and refresh until stopped: the main function of a reader's process."""
    reader.open()
    ready.release()
    due = time.perf_counter()
    while not stop.is_set():
        reader.ask()
        if time.perf_counter() >= due:
            reader.refresh()
            due = time.perf_counter() + REFRESH_S
        time.sleep(STEP_S)
    # The reader must see the last writes.
    reader.refresh()
    reader.ask()
    del reader.live
    results.put(reader)


def tune(path: str, batches: Sequence[str], seconds: float, results: Queue[dict[str, Any]]) -> None:
    """Run `attention-tuner tune` and time its writes: the main function of the tuner's process."""
    os.environ["TRITON_INTERPRET"] = "1"
    times: dict[str, list[float]] = {name: [] for name in WRITES}
    written: list[BestConfig] = []

    def timed(name: str) -> None:
        write = getattr(Store, name)

        def call(store: Store, *records: Any) -> None:
            start = time.perf_counter()
            write(store, *records)
            times[name].append(time.perf_counter() - start)
            written.extend(each for each in records if isinstance(each, BestConfig))

        setattr(Store, name, call)

    for name in WRITES:
        timed(name)
    from attention_tuner.tuner.console.app import main as command

    named = [part for batch in batches for part in ("--batch", batch)]
    with open(f"{path}.log", "w", encoding="utf-8") as sys.stdout:
        sys.stderr = sys.stdout
        status = command(["tune", "--spec", SPEC.key(), *named, "--page-size", str(PAGE_SIZE), "--gpu", "interpreter",
                          "--trials", str(TRIALS), "--seconds", f"{seconds:g}", "--db", path])  # fmt: skip
    results.put({"status": status, "times": times, "written": written})


def batches_for(seconds: float) -> tuple[str, ...]:
    """The batches to tune in this time."""
    return BATCHES[: max(1, int(seconds / SECONDS_EACH))]


def tuned(context: Any, path: str, seconds: float) -> dict[str, Any]:
    """The configs that the tuner wrote and the time of each write. Ends the script if the tuner fails."""
    results = context.Queue()
    process = context.Process(target=tune, args=(path, batches_for(seconds), seconds, results))
    process.start()
    try:
        found = results.get(timeout=seconds + 60)
    finally:
        process.join(10)
    if found["status"]:
        sys.exit(f"the tuner ended with status {found['status']}: {Path(f'{path}.log').read_text()}")
    return found


def half_results(reader: Reader, written: Sequence[BestConfig]) -> list[str]:
    """Results that a reader saw but that were never written, or that it saw in the wrong order."""
    # Compared without the state of the full check, which the store adds.
    order = {replace(config, full_check=False): number for number, config in enumerate(written)}
    wrong: list[str] = []
    for batch, seen in reader.seen.items():
        plain = [replace(config, full_check=False) for config in seen]
        wrong += [f"never written: {config!r}" for config in plain if config not in order]
        places = [order[config] for config in plain if config in order]
        if places != sorted(places):
            wrong.append(f"results of {batch} in the order {places}")
    return wrong


def summary(times: Sequence[float]) -> dict[str, float]:
    """The count, median and maximum of times in seconds, in milliseconds."""
    ms = [1e3 * each for each in times] or [0.0]
    return {"count": len(times), "median": statistics.median(ms), "longest": max(ms)}


def distinct(configs: list[BestConfig], count: int) -> list[BestConfig]:
    """`count` configs of distinct shapes, so that none answers for another."""
    return list({(c.shape, c.variant.page_size): c for c in configs}.values())[:count]


def measure(readers: int, rows: int, seconds: float) -> dict[str, Any]:
    """Run the tuner without readers, then with them for `seconds`."""
    everything = distinct(synthetic.configs(2 * rows), rows)
    context = multiprocessing.get_context("spawn")
    ready, stop, results = context.Semaphore(0), context.Event(), context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        path, other = f"{folder}/tuner.db", f"{folder}/alone.db"
        with Store.open(path) as store:
            store.put_best(*everything)
        shutil.copy(path, other)
        alone = tuned(context, other, min(ALONE_S, seconds))
        reader = Reader(path, everything[:ASKED], batches_for(seconds))
        processes = [context.Process(target=read, args=(reader, ready, stop, results)) for _ in range(readers)]
        for process in processes:
            process.start()
        for _ in processes:
            ready.acquire()
        tuner = tuned(context, path, seconds)
        stop.set()
        found = [results.get(timeout=60) for _ in processes]
        for process in processes:
            process.join()
    readers_found = [reader_document(reader, tuner["written"]) for reader in found]
    return {"readers": readers_found, "results": len(tuner["written"]),
            "exit_codes": [process.exitcode for process in processes],
            "writes_ms": {name: summary(tuner["times"][name]) for name in WRITES},
            "writes_alone_ms": {name: summary(alone["times"][name]) for name in WRITES}}  # fmt: skip


def reader_document(reader: Reader, written: Sequence[BestConfig]) -> dict[str, Any]:
    """The results of a reader as JSON values."""
    wrong = [*reader.wrong, *half_results(reader, written)]
    return {"lookups": reader.lookups, "snapshots": len(reader.loads), "seen": sum(map(len, reader.seen.values())),
            "wrong": wrong[:5], "wrong_count": len(wrong), "warnings": reader.warned[:5],
            "load_ms": statistics.median(reader.loads) * 1e3 if reader.loads else None}  # fmt: skip


def main() -> None:
    """Run tuner and readers, write the JSON, print the tables; fail on wrong answers."""
    parser = record.parser(__doc__)
    parser.add_argument("--readers", type=int, default=READERS)
    parser.add_argument("--rows", type=int, default=ROWS, help="never-written configs in the database")
    parser.add_argument("--seconds", type=float, default=60.0, help="time for the tuner")
    options: argparse.Namespace = parser.parse_args()
    found = measure(options.readers, options.rows, options.seconds)
    record.write(options.out, {"rows": options.rows, "seconds": options.seconds, "refresh_s": REFRESH_S, **found})
    record.print_table(("reader", "lookups", "snapshots", "a load, ms", "results seen", "wrong", "warnings"), [
        [str(index), str(each["lookups"]), str(each["snapshots"]), f"{each['load_ms'] or 0:.1f}", str(each["seen"]),
         str(each["wrong_count"]), str(len(each["warnings"]))] for index, each in enumerate(found["readers"])])
    record.print_table(("write", "count", "median ms", "longest", "alone: count", "median ms", "longest"), [
        [name, *(f"{found[where][name][column]:.4g}" for where in ("writes_ms", "writes_alone_ms")
                 for column in ("count", "median", "longest"))] for name in WRITES])
    wrong = sum(each["wrong_count"] for each in found["readers"])
    if wrong or any(found["exit_codes"]):
        sys.exit(f"{wrong} wrong answers; exit codes {found['exit_codes']}")


if __name__ == "__main__":
    main()
