"""Measure the tuner's own time per trial, with 100 to 10,000 stored trials.

Search, sampler, database and progress lines are real. Compiling and measuring return at once, and variants are
suggested one at a time. A real run does all this while the GPU measures another variant.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import itertools
import math
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import record

from attention_tuner.db.records import Setting, TrialRecord
from attention_tuner.db.store import Store
from attention_tuner.kernel_templates.batch import Batch, BatchBucket
from attention_tuner.kernel_templates.gpu import TARGETS
from attention_tuner.kernel_templates.outcome import (
    Check,
    JobError,
    Outcome,
    Regime,
    StaticFacts,
    Timed,
    Timing,
)
from attention_tuner.kernel_templates.registry import template_of
from attention_tuner.kernel_templates.sources import environment
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.task import Task
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.search_spaces.space import survey
from attention_tuner.tuner.console.output import TuneProgress
from attention_tuner.tuner.measure.jobs import MeasureJob, PrepareJob
from attention_tuner.tuner.processes.compile import Build, CompileJob
from attention_tuner.tuner.run import Executor
from attention_tuner.tuner.sampling.study import Study
from attention_tuner.tuner.settings import Progress, Settings
from attention_tuner.tuner.tune import tune

GPU = TARGETS["sm_90"]
TASK = Task(AttentionSpec(32, 8, 128), Batch.parse("1x512@16384,63x1@32768"), 16)
SIZES = (100, 300, 1000, 3000, 10000)
FACTS = StaticFacts(shared_bytes=1024, registers=64, stack_bytes=0)
# The methods that are timed separately, by their names in the results.
PARTS = {"ask": (Study, "ask"), "tell": (Study, "tell"), "store": (Store, "add_trial"),
         "events": (TuneProgress, "tried")}  # fmt: skip


def timing(variant: Variant, samples: int, regime: Regime) -> Timing:
    """An invented time that depends on every value of the variant, with noise."""
    draw = random.Random(variant.key())
    slope = sum(math.log2(1 + value) for _, value in variant.values if isinstance(value, int))
    ms = 1 + draw.random() + (variant.template == "unified") + 0.01 * slope
    return Timing(tuple(ms * random.gauss(1, 0.002) for _ in range(samples)), regime)


class Worker:
    """Worker that returns invented measurements at once, and runs no race."""

    busy_s = 0.0

    def submit(self, job: Any, timeout_s: float, deadline: float = math.inf) -> Future[Any]:
        future: Future[Any] = Future()
        match job:
            case MeasureJob():
                future.set_result(Timed(job.variant, Check(0.5), timing(job.variant, job.samples, job.regime)))
            case PrepareJob():
                future.set_result(0.0)
            case _:
                future.set_exception(JobError("only trials are of interest"))
        return future

    def start(self) -> None:
        pass

    def ready(self, limit_s: float) -> bool:
        return True

    def free(self) -> None:
        pass

    def close(self) -> None:
        pass


class Pool:
    """Compile pool that returns at once."""

    processes = 14
    full_seconds = 0.0

    def __init__(self) -> None:
        self._done: list[Build] = []

    def start(self, jobs: int) -> None:
        pass

    def submit(self, job: CompileJob) -> None:
        # Each code has its own hash, so that no variant duplicates another.
        code = template_of(job.variant).code_key(job.variant)
        self._done.append(Build(job, StaticFacts(1024, registers=64, stack_bytes=0, code_hash=code), 0.0))

    def results(self, wait_s: float) -> list[Build]:
        done, self._done = self._done, []
        return done

    def cancel_queued(self) -> list[CompileJob]:
        forgotten, self._done = [build.job for build in self._done], []
        return forgotten

    def close(self) -> None:
        pass


class Clocked(TuneProgress):
    """Progress that records the time at the end of each trial."""

    def __init__(self) -> None:
        super().__init__(GPU)
        self.marks: list[float] = []
        self.cpu_marks: list[float] = []
        self.reused = 0

    def started(self, task: Task, valid: int, reused: int) -> None:
        super().started(task, valid, reused)
        self.reused = reused
        self._mark()

    def tried(self, progress: Progress) -> None:
        super().tried(progress)
        self._mark()

    def _mark(self) -> None:
        self.marks.append(time.perf_counter())
        self.cpu_marks.append(time.process_time())


@contextlib.contextmanager
def timed_parts() -> Iterator[dict[str, list[float]]]:
    """The seconds of every call, by part, while the context lasts."""
    seconds: dict[str, list[float]] = defaultdict(list)

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                seconds[name].append(time.perf_counter() - start)

        return timed

    kept = {name: getattr(owner, method) for name, (owner, method) in PARTS.items()}
    try:
        for name, (owner, method) in PARTS.items():
            setattr(owner, method, wrapped(name, kept[name]))
        yield seconds
    finally:
        for name, (owner, method) in PARTS.items():
            setattr(owner, method, kept[name])


def fill(store: Store, count: int, seed: int) -> None:
    """Store trials of new variants until there are `count`."""
    setting = Setting(TASK.spec, TASK.batch, TASK.page_size, GPU, Regime("graph"))
    run_id = store.start_run({})
    tried = {trial.outcome.variant for trial in store.known_trials(setting, environment).reusable}
    valid = [v for v in survey(TASK.spec, BatchBucket.of(TASK.batch), TASK.page_size, GPU).valid if v not in tried]
    present = functools.cache(environment)
    for variant in random.Random(seed).sample(valid, count - len(tried)):
        outcome: Outcome = Timed(variant, Check(0.5), timing(variant, 5, setting.regime))
        store.add_trial(TrialRecord(run_id, setting, present(variant.template, GPU), outcome, FACTS))


def measure(store: Store, stored: int, trials: int, sampler: str) -> dict[str, Any]:
    """The milliseconds of each of `trials` trials, made one after another when `stored` are stored."""
    listener = Clocked()
    with timed_parts() as parts, contextlib.redirect_stderr(io.StringIO()), listener:
        start = time.perf_counter()
        settings = Settings(trials=stored + trials, sampler=sampler, ahead=1)
        tune([TASK], GPU, store, settings, Executor(Worker(), Pool()), listener)
    assert (listener.reused, len(listener.marks)) == (stored, trials + 1)
    began, first, *_, last = listener.marks
    # The first trial is left out, because it is prepared while the search begins.
    total = (last - first) / (trials - 1)
    each = {name: sum(parts[name][1 - trials :]) / (trials - 1) for name in PARTS}
    per_trial = {"total": total, **each, "rest": total - sum(each.values())}
    median = statistics.median(b - a for a, b in itertools.pairwise(listener.marks[1:]))
    cpu = (listener.cpu_marks[-1] - listener.cpu_marks[1]) / (trials - 1)
    return {"stored": stored, "trials": trials, "take_over_s": began - start, "median_ms": 1e3 * median,
            "cpu_ms": 1e3 * cpu, "mean_ms": {name: 1e3 * value for name, value in per_trial.items()}}  # fmt: skip


def main(arguments: argparse.Namespace) -> None:
    """Measure at every size, write the JSON and print the table."""
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder) / "tuner.db") as store:
        for seed, size in enumerate(arguments.sizes):
            fill(store, size, seed)
            results.append(measure(store, size, arguments.trials, arguments.sampler))
    record.write(arguments.out, {"sampler": arguments.sampler, "sizes": results})
    columns = ("stored", "take over s", "CPU ms a trial", "ms a trial", *PARTS, "rest")
    rows = [
        [str(each["stored"]), f"{each['take_over_s']:.2f}",
         *(f"{ms:.2f}" for ms in (each["cpu_ms"], *each["mean_ms"].values()))]
        for each in results
    ]
    record.print_table(columns, rows)


if __name__ == "__main__":
    parser = record.parser(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of stored trials, ascending")
    parser.add_argument("--trials", type=int, default=30, help="trials to make at each size")
    parser.add_argument("--sampler", default="tpe", help="sampler of the search")
    main(parser.parse_args())
