"""Compare the samplers on a recording: final loss to the optimum, and measurements until the loss is small.

Every search is of one recorded task and reads the recorded outcomes. A skipped variant is no measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import bake_off_report
import record

from attention_tuner.kernel_templates.batch import Batch, BatchBucket
from attention_tuner.kernel_templates.outcome import Outcome, Skipped, Timed
from attention_tuner.kernel_templates.task import Task
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.search_spaces.suites import named_batches
from attention_tuner.tuner.leads import NEIGHBOURS, first_variants, merged_ratios
from attention_tuner.tuner.recording import Recording
from attention_tuner.tuner.sampling.samplers import DEFAULT_SAMPLER, SAMPLERS
from attention_tuner.tuner.sampling.study import Study

# A variant is good if its time is at most this multiple of the optimum's.
GOOD = 1.02
# Samplers with fewer seeds: "gp" takes minutes per search, the others seconds.
SLOW = ("gp",)
# Numbers of measurements at which the results store the curve.
MARKS = (1, 2, 3, 4, 6, 8, 10, 12, 15, 20, 25, 30, 35, 40, 50, 60, 70, 80, 90, 100, 110, 120, 130, 140, 150, 175, 200)

# The suite with the names of batches.
SUITE = "hopper13"

LEADS = ("structured", "none", "neighbours")

Truth = Mapping[Variant, Outcome]


@dataclass(frozen=True, slots=True)
class Entry:
    """One configuration of the search."""

    sampler: str
    # "none", "structured" (the heuristic's candidates come first) or "neighbours" (also the winners of the nearest
    # other tasks' searches).
    leads: str
    # Variants suggested before the first of them is reported.
    ahead: int

    def __str__(self) -> str:
        return f"{self.sampler}, {self.leads}, {self.ahead} ahead"


@dataclass(frozen=True, slots=True)
class Replay:
    """One search."""

    # Variants in the order of measurement.
    measured: tuple[Variant, ...]
    # CPU seconds, nearly all spent in the sampler.
    seconds: float

    def curve(self, truth: Truth) -> list[float]:
        """The best time in ms after each measurement, infinite until there is one."""
        times = (ms if (ms := time_ms(truth[variant])) is not None else math.inf for variant in self.measured)
        return list(itertools.accumulate(times, min))


def time_ms(outcome: Outcome) -> float | None:
    """The median milliseconds of a timed outcome, else None."""
    return outcome.timing.median_ms if isinstance(outcome, Timed) else None


def times_ms(truth: Truth, measured: Iterable[Variant]) -> dict[Variant, float]:
    """The median milliseconds of those of `measured` that were timed."""
    return {variant: ms for variant in measured if (ms := time_ms(truth[variant])) is not None}


def replay(truth: Truth, study: Study, trials: int, ahead: int) -> Replay:
    """Search `truth` until `trials` variants are measured or none is left."""
    measured: list[Variant] = []
    pending: list[Variant] = []
    start = time.process_time()
    while len(measured) < trials:
        while len(pending) < min(ahead, trials - len(measured)) and (variant := study.ask()) is not None:
            if isinstance(outcome := truth[variant], Skipped):
                study.tell(outcome)
            else:
                pending.append(variant)
        if not pending:
            break
        measured.append(variant := pending.pop(0))
        study.tell(truth[variant])
    return Replay(tuple(measured), time.process_time() - start)


def search(
    recording: Recording, task: Task, entry: Entry, seed: int, trials: int, others: Mapping[Task, Replay]
) -> Replay:
    """Search `task` once. `others` are the searches of other tasks, for leads from neighbours."""
    truth = truth_of(recording, task)
    valid = tuple(truth)
    study = Study(valid, likely(recording, task, entry), entry.sampler, seed)
    if entry.leads == "neighbours":
        bucket = BatchBucket.of(task.batch)
        near = sorted((t for t in others if t != task and (t.spec, t.page_size) == (task.spec, task.page_size)),
                      key=lambda t: BatchBucket.of(t.batch).distance(bucket))[:NEIGHBOURS]
        times = [times_ms(truth_of(recording, other), others[other].measured) for other in near]
        winners = dict.fromkeys(v for each in times for v in merged_ratios(task, [dict([best(each)])]))
        study.prefer([variant for variant in winners if variant in truth])
        study.expect(merged_ratios(task, times))
    return replay(truth, study, trials, entry.ahead)


def likely(recording: Recording, task: Task, entry: Entry) -> list[Variant]:
    """The recorded variants among the heuristic's candidates; none for a search without leads."""
    if entry.leads == "none":
        return []
    valid = frozenset(recording.variants(task))
    return [variant for variant in first_variants(task, recording.gpu, (), valid) if variant in valid]


def best(times: Mapping[Variant, float]) -> tuple[Variant, float]:
    """The fastest variant and its time."""
    return min(times.items(), key=lambda item: item[1])


def truth_of(recording: Recording, task: Task) -> dict[Variant, Outcome]:
    """The recorded outcomes of `task`."""
    return {variant: recorded.outcome for variant, recorded in recording.trials[task].items()}


@functools.cache
def loaded(path: str) -> Recording:
    """The recording at `path`, loaded once."""
    return Recording.load(path)


def chosen(path: str, words: Sequence[str]) -> Recording:
    """The recording at `path`, reduced to tasks whose names contain one of `words`, if given."""
    recording = loaded(path)
    kept = {task: trials for task, trials in recording.trials.items()
            if not words or any(word in name(task) for word in words)}  # fmt: skip
    return replace(recording, trials=kept)


def run(job: tuple[str, Sequence[str], Entry, int, int]) -> dict[Task, Replay]:
    """Search the chosen tasks of a recording with one entry, seed and number of trials."""
    path, words, entry, seed, trials = job
    recording = chosen(path, words)
    others: dict[Task, Replay] = {}
    if entry.leads == "neighbours":
        plain = Entry(entry.sampler, "structured", entry.ahead)
        others = {task: search(recording, task, plain, seed, trials, {}) for task in recording.tasks}
    return {task: search(recording, task, entry, seed, trials, others) for task in recording.tasks}


def entries(samplers: Sequence[str], ahead: int) -> list[Entry]:
    """Every sampler with and without leads, and more entries for the default sampler."""
    found = [Entry(sampler, leads, ahead) for sampler in samplers for leads in ("structured", "none")]
    if DEFAULT_SAMPLER in samplers:
        found += [Entry(DEFAULT_SAMPLER, "structured", each) for each in (1, 16) if each != ahead]
        found += [Entry(DEFAULT_SAMPLER, "neighbours", ahead)]
    return found


def summary(curves: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The final ratios to the optimum, and the measurements until a curve was good."""
    final = [curve[-1] for curve in curves]
    reached = sorted(next((i for i, ratio in enumerate(curve, 1) if ratio <= GOOD), math.inf) for curve in curves)
    middle = statistics.median_high(reached)
    return {
        "runs": len(curves), "final_mean": statistics.mean(final), "final_worst": max(final),
        "measurements_to_good": None if math.isinf(middle) else middle,
        "share_good": sum(map(math.isfinite, reached)) / len(reached),
    }  # fmt: skip


def thinned(curve: Sequence[float]) -> list[float | None]:
    """The curve at `MARKS`; None while nothing was timed."""
    return [round(curve[mark - 1], 4) if math.isfinite(curve[mark - 1]) else None
            for mark in MARKS if mark <= len(curve)]  # fmt: skip


def about_entry(recording: Recording, entry: Entry, runs: Sequence[Mapping[Task, Replay]]) -> dict[str, Any]:
    """The results of the searches of one entry; `runs` differ in the seed."""
    curves: dict[str, list[list[float]]] = {}
    for task in recording.tasks:
        truth = truth_of(recording, task)
        _, optimum_ms = best(times_ms(truth, truth))
        curves[name(task)] = [[ms / optimum_ms for ms in each[task].curve(truth)] for each in runs]
    replays = [replay for each in runs for replay in each.values()]
    return {
        "sampler": entry.sampler, "leads": entry.leads, "ahead": entry.ahead,
        **summary([curve for each in curves.values() for curve in each]),
        "cpu_ms_a_measurement": 1e3 * sum(r.seconds for r in replays) / sum(len(r.measured) for r in replays),
        "tasks": {name: {**summary(each), "curves": [thinned(c) for c in each]} for name, each in curves.items()},
    }  # fmt: skip


def about_recording(recording: Recording) -> dict[str, Any]:
    """The facts of a recording and its tasks."""
    tasks = {name(task): about(truth_of(recording, task)) for task in recording.tasks}
    return {"grid": recording.grid, "gpu": recording.gpu.name, "recorded_at": recording.recorded_at, "good": GOOD,
            "marks": MARKS, "tasks": tasks}  # fmt: skip


def name(task: Task) -> str:
    """The name of `task` in the results."""
    return f"{_batch_names().get(task.batch, str(task.batch))}, page {task.page_size}"


@functools.cache
def _batch_names() -> dict[Batch, str]:
    return {batch: name for name, batch in named_batches(SUITE).items()}


def about(truth: Truth) -> dict[str, Any]:
    """The optimum of a task, and the number of variants near it."""
    times = times_ms(truth, truth)
    variant, ms = best(times)
    good = sum(each <= GOOD * ms for each in times.values())
    return {
        "variants": len(truth), "timed": len(times), "optimum": variant.key(), "optimum_ms": ms,
        "median_ratio": statistics.median(times.values()) / ms, "good": good, "share_good": good / len(truth),
    }  # fmt: skip


def main(arguments: argparse.Namespace) -> None:
    """Run every search, write the JSON and the picture, and print the tables."""
    recording = chosen(arguments.recording, arguments.tasks)
    rows: list[dict[str, Any]] = []
    document = {**about_recording(recording), "trials": arguments.trials, "entries": rows}
    with ProcessPoolExecutor(arguments.processes) as pool:
        for entry in [e for e in entries(arguments.samplers, arguments.ahead) if e.leads in arguments.leads]:
            seeds = range(arguments.slow_seeds if entry.sampler in SLOW else arguments.seeds)
            jobs = [(arguments.recording, arguments.tasks, entry, seed, arguments.trials) for seed in seeds]
            rows.append(about_entry(recording, entry, list(pool.map(run, jobs))))
            # After each entry, so that nothing is lost if the script is stopped.
            record.write(arguments.out, document)
    with contextlib.suppress(ImportError):
        bake_off_report.plot(document, arguments.out.with_suffix(".png"))
    print(bake_off_report.table(document))


def options() -> argparse.ArgumentParser:
    """The options of the script."""
    parser = record.parser(__doc__)
    parser.add_argument("--recording", required=True, metavar="NAME|PATH", help="a recording, by name or path")
    parser.add_argument("--tasks", nargs="+", default=[], metavar="WORD", help="only tasks whose name holds one")
    parser.add_argument("--samplers", nargs="+", default=list(SAMPLERS), choices=SAMPLERS, help="samplers to compare")
    parser.add_argument("--leads", nargs="+", default=list(LEADS), choices=LEADS, help="only searches with these")
    parser.add_argument("--seeds", type=int, default=10, help="searches of each task by each sampler")
    parser.add_argument("--slow-seeds", type=int, default=3, help=f"the same for {', '.join(SLOW)}")
    parser.add_argument("--trials", type=int, default=150, help="variants to measure in each search")
    parser.add_argument("--ahead", type=int, default=8, help="variants suggested before the first is measured")
    parser.add_argument("--processes", type=int, default=2, help="searches at the same time")
    return parser


if __name__ == "__main__":
    main(options().parse_args())
