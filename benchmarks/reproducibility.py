"""Compare the winners of two independent runs of one search.

Each run has its own database, processes and compile cache. Then both winners and the default race in one process.
Batches with results in FILE are not run again, so the work can be divided into several calls.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import record

from attention_tuner.db.store import Store
from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.gpu import Gpu
from attention_tuner.kernel_templates.heuristic import default_variant
from attention_tuner.kernel_templates.outcome import Timing
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.task import Task
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.search_spaces.models import model_layers
from attention_tuner.search_spaces.suites import named_batches
from attention_tuner.tuner.console.output import encode
from attention_tuner.tuner.console.tune import result_document
from attention_tuner.tuner.measure.jobs import RaceJob
from attention_tuner.tuner.measure.race import Interval, compare
from attention_tuner.tuner.run import Executor
from attention_tuner.tuner.run import executor_on as command_executor
from attention_tuner.tuner.settings import Settings, TaskResult
from attention_tuner.tuner.tune import tune

PAGE_SIZE = 16
BATCHES = ("hybrid_512@16k_63dec", "decode_64_mixed", "chunk_2048@32k", "prefill_8k", "verify_32x6@20k",
           "hybrid_512@4k_31dec")  # fmt: skip
RUNS = 2
# More than the time allows.
TRIALS = 10_000
ROUNDS = 60
DEFAULT_ROUNDS = 12
RACE_LIMIT_S = 120.0
# Winners that differ by less are equally good.
WANTED = 0.005


def tasks(interpreter: bool) -> dict[str, Task]:
    """The six batches, of a layer of llama-3-8b; for the interpreter a tiny one."""
    if interpreter:
        return {"tiny": Task(AttentionSpec(4, 2, 64, "float16"), Batch.parse("1x4@44"), PAGE_SIZE)}
    (spec,), named = model_layers("llama-3-8b", 1, None), named_batches("hopper13")
    return {name: Task(spec, named[name], PAGE_SIZE) for name in BATCHES}


def compared(task: Task, gpu: Gpu, seconds: float, rounds: int) -> dict[str, Any]:
    """The results of two runs, and the race of their winners with each other and the default."""
    runs: list[dict[str, Any]] = []
    winners: list[Variant] = []
    standing: dict[str, Any] = {}
    for index in range(RUNS):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            # The processes put their cache of compiled kernels below this folder.
            os.environ["XDG_CACHE_HOME"] = folder
            start = time.monotonic()
            with contextlib.closing(command_executor(gpu)) as executor:
                result = searched(task, gpu, seconds, executor, Path(folder) / "tuner.db")
                runs.append({"wall_seconds": time.monotonic() - start, **run_document(result)})
                winners += [result.best.variant] if result.best is not None else []
                if index == RUNS - 1 and len(winners) == RUNS:
                    standing = raced(task, winners, rounds, executor)
    return {"task": encode(task), "seconds": seconds, "runs": runs, "standing": standing,
            "record": record.record()}  # fmt: skip


def searched(task: Task, gpu: Gpu, seconds: float, executor: Executor, database: Path) -> TaskResult:
    """The result of one run with an empty database."""
    with Store.open(database) as store:
        (result,) = tune([task], gpu, store, Settings(trials=TRIALS, seconds=seconds, seed=0), executor)
    return result


def run_document(result: TaskResult) -> dict[str, Any]:
    """The result, with the shares of its wall time in which the GPU and the whole compile pool were busy."""
    return {
        **result_document(result, None),
        "gpu_share": result.measuring_seconds / result.seconds,
        "pool_share": result.compiling_seconds / result.seconds,
    }


def raced(task: Task, winners: list[Variant], rounds: int, executor: Executor) -> dict[str, Any]:
    """Race the winners, then race them with the default in fewer rounds, because the default may be much slower.

    Differences are fractions: the second winner's time over the first's, and each winner's over the default's.
    """
    default = default_variant(task.spec, task.batch, task.page_size)
    first, second = winners
    found: dict[str, Any] = {"same": first == second, "second_over_first": record.fractions(None)}
    if first != second:
        found["race"], times = race(task, (first, second), rounds, executor)
        found["second_over_first"] = record.fractions(compare(times[second], times[first]))
    entrants = tuple(dict.fromkeys((*winners, default)))
    against: list[Interval | None] = [None, None]
    if len(entrants) > 1:
        found["race_with_default"], times = race(task, entrants, DEFAULT_ROUNDS, executor)
        against = [None if v == default else compare(times[v], times[default]) for v in winners]
    found["winner_over_default"] = [record.fractions(interval) for interval in against]
    found["slower_than_default"] = any(interval is not None and interval.low > 0 for interval in against)
    return found


def race(
    task: Task, entrants: tuple[Variant, ...], rounds: int, executor: Executor
) -> tuple[dict[str, Any], dict[Variant, Timing]]:
    """The record of a race and its timings. Ends the process when an entrant fails."""
    racer = executor.racer or executor.worker
    result = racer.submit(RaceJob(task, entrants, rounds), RACE_LIMIT_S).result()
    times = {v: timing for v, timing in result.timings.items() if isinstance(timing, Timing)}
    if len(times) < len(entrants):
        sys.exit(f"a variant that had won cannot race: {result.timings}")
    return {
        "is_steady": result.is_steady,
        "discarded_blocks": result.discarded,
        "median_ms": {v.key(): timing.median_ms for v, timing in times.items()},
        "samples_ms": {v.key(): timing.samples_ms for v, timing in times.items()},
    }, times


def rows(batches: dict[str, Any]) -> list[list[str]]:
    """The cells of the table, a row for each batch."""
    found: list[list[str]] = []
    for name, each in batches.items():
        standing, runs = each["standing"], each["runs"]
        cells = [name]
        if standing:
            low, median, high = (standing["second_over_first"][part] for part in ("low", "median", "high"))
            bounds = "/".join("-" if value is None else f"{value:+.2%}" for value in (low, median, high))
            over = " ".join(f"{winner['median']:+.1%}" for winner in standing["winner_over_default"])
            slower = "SLOWER" if standing["slower_than_default"] else "no"
            cells += ["same" if standing["same"] else bounds, over, slower]
        else:
            cells += ["no race", "", ""]
        cells += [" ".join(f"{run[share]:.0%}" for run in runs) for share in ("gpu_share", "pool_share")]
        cells += [" ".join(str(run["outcomes"].get("timed", 0)) for run in runs),
                  " ".join(f"{run['wall_seconds']:.0f}" for run in runs)]  # fmt: skip
        found.append(cells)
    return found


def main(arguments: argparse.Namespace) -> None:
    """Run the batches that are asked for and not done yet, write the JSON after each, and print the table."""
    gpu = record.required_gpu(arguments.interpreter)
    done: dict[str, Any] = json.loads(arguments.out.read_text())["batches"] if arguments.out.exists() else {}
    first, _, last = arguments.batches.partition(":")
    wanted = list(tasks(arguments.interpreter).items())[int(first or 0) : int(last) if last else None]
    for name, task in wanted:
        if name not in done:
            done[name] = compared(task, gpu, arguments.seconds, arguments.rounds)
            record.write(arguments.out, {"batches": done, "wanted": WANTED})
    record.print_table(("batch", "2nd over 1st low/median/high", "winners over default", "slower", "GPU", "pool",
                        "timed", "wall s"), rows(done))  # fmt: skip
    standings = [each["standing"] for each in done.values() if each["standing"]]
    within = sum(abs(standing["second_over_first"]["median"]) <= WANTED for standing in standings)
    print(f"{within} of {len(standings)} pairs of winners within {WANTED:.1%}")


if __name__ == "__main__":
    parser = record.parser(__doc__)
    parser.add_argument("--batches", default=":", metavar="N:M", help="slice of the six batches, counted from 0")
    parser.add_argument("--seconds", type=float, default=40.0, help="time for each run")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of the race between the winners")
    parser.add_argument("--interpreter", action="store_true", help="a tiny batch through Triton's interpreter")
    main(parser.parse_args())
