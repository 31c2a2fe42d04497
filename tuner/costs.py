"""Costs of trials: the forecast of a run, and the time that the trials of one search took."""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from ..kernel_templates.batch import BatchBucket
from ..kernel_templates.gpu import Gpu
from ..kernel_templates.heuristic import default_variant
from ..kernel_templates.outcome import Failed, Outcome, Timed
from ..kernel_templates.registry import template_of
from ..kernel_templates.task import Task
from ..kernel_templates.variant import Variant
from ..search_spaces.space import Survey, survey

# Seconds of the interpreter for each tile of keys, measured with Triton 3.6 to 3.9 on one core of a server.
INTERPRETED_TILE_S = 0.005
# Launches of a trial: for the reference, the check, the time and the race.
LAUNCHES_PER_TRIAL = 4
# A search that tries fewer variants than the default and another has nothing to choose.
FEWEST_TRIALS = 2
# Seconds of one compile on a core, and of one trial and one race on the GPU: on an H200 with 16 cores, rounded up.
COMPILE_S = 4.0
MEASURE_S = 0.2
RACE_S = 5.0
# Limit of one job: the first of a task also computes the reference.
JOB_LIMIT_S = 120.0
# A kernel that never ends must not use up the time of the others. A trial that takes `HANG_FACTOR` times as long as the
# slowest before it, and `HANG_S` more, has hung.
HANG_FACTOR = 20
HANG_S = 10.0
# Limit of a trial through the interpreter, as a multiple of its estimated time.
INTERPRETER_MARGIN = 10
# Number of latest trials by which the cost of the next one is judged.
RECENT = 5


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecast of the search for one task."""

    task: Task
    survey: Survey  # of the task's space
    trials: tuple[Variant, ...]  # variants that would be tried if all results came last
    compiles: frozenset[str]  # distinct kernels of the trials
    seconds: float  # time of the measuring process

    @property
    def valid_by_template(self) -> Counter[str]:
        """Number of valid variants of each template."""
        return Counter(variant.template for variant in self.survey.valid)


def assumptions(gpu: Gpu, processes: int) -> str:
    """Assumptions of the estimated time, in one sentence."""
    if gpu.is_interpreter:
        return (f"the estimate assumes {LAUNCHES_PER_TRIAL} launches a trial, each of the default variant, at "
                f"{INTERPRETED_TILE_S * 1e3:g} ms a tile of keys")
    return (f"the estimate assumes {COMPILE_S:g} s a compile, {processes} at a time, {MEASURE_S:g} s a trial "
            f"and {RACE_S:g} s a race, and no compiled kernel in the cache")


def forecast(task: Task, gpu: Gpu, trials: int, sampler: str, seed: int) -> Forecast:
    """Forecast tuning `task` on `gpu`, with the variants that a search chooses while it has no results.

    Imports Optuna. Raises `InputError` for an unknown `sampler`.
    """
    from .sampling.study import Study

    found = survey(task.spec, BatchBucket.of(task.batch), task.page_size, gpu)
    study = Study(found.valid, [default_variant(task.spec, task.batch, task.page_size)], sampler, seed)
    chosen = tuple(variant for _ in range(trials) if (variant := study.ask()) is not None)
    if gpu.is_interpreter:
        seconds = len(chosen) * LAUNCHES_PER_TRIAL * interpreted_seconds(task)
        return Forecast(task, found, chosen, frozenset(), seconds)
    kernels = frozenset(f"{task.spec.key()} {template_of(variant).code_key(variant)}" for variant in chosen)
    return Forecast(task, found, chosen, kernels, MEASURE_S * len(chosen) + RACE_S)


def total_compiles(forecasts: Sequence[Forecast]) -> int:
    """Number of distinct kernels of all tasks: batches of one layer and page size share theirs."""
    return len({kernel for each in forecasts for kernel in each.compiles})


def total_seconds(forecasts: Sequence[Forecast], processes: int) -> float:
    """Seconds of all tasks together, with `processes` that compile while the GPU measures."""
    # Compiling and measuring overlap: the longer of them counts.
    return max(sum(each.seconds for each in forecasts), total_compiles(forecasts) * COMPILE_S / processes)


def interpreted_seconds(task: Task, variant: Variant | None = None) -> float:
    """Seconds of one launch of `variant`, or of the default, through the interpreter, by its smallest tiles of keys."""
    variant = variant or default_variant(task.spec, task.batch, task.page_size)
    bodies = template_of(variant).traits(variant).bodies
    block_m, block_n = min(body.block_m for body in bodies), min(body.block_n for body in bodies)
    key_tiles = 0
    # Counted without a plan, because the plan of a batch that is far too large would fill the memory.
    for (query_len, context_len), count in Counter(task.batch.sequences).items():
        row_tiles = -(-query_len * task.spec.group_size // block_m)
        first_stop = context_len + min(query_len, -(-block_m // task.spec.group_size))
        mean_stop = (first_stop + context_len + query_len) / 2
        key_tiles += count * row_tiles * math.ceil(mean_stop / block_n)
    return INTERPRETED_TILE_S * task.spec.num_kv_heads * key_tiles


def fewest_seconds(tasks: Sequence[Task], gpu: Gpu, trials: int) -> float:
    """Least seconds in which a run can find something for each of `tasks`, among which they are divided evenly.

    They suffice to try two variants of each, or `trials` of them if that is fewer.
    """
    trials = min(FEWEST_TRIALS, trials)
    if gpu.is_interpreter:
        return len(tasks) * max(trials * LAUNCHES_PER_TRIAL * interpreted_seconds(task) for task in tasks)
    return len(tasks) * (COMPILE_S + trials * MEASURE_S + RACE_S)


class Costs:
    """Seconds that trials of one task took. `prepared_s` is the time to prepare their shared inputs and buffers."""

    def __init__(self, task: Task, is_interpreted: bool) -> None:
        self.prepared_s = 0.0
        self._most_s = JOB_LIMIT_S
        if is_interpreted:
            self._most_s += INTERPRETER_MARGIN * LAUNCHES_PER_TRIAL * interpreted_seconds(task)
        self._recent: deque[float] = deque(maxlen=RECENT)
        # Busy seconds of the slowest trial that did not fail.
        self._slowest_s: float | None = None

    @property
    def trial_s(self) -> float:
        """Median seconds of the latest trials that were measured; 0 while there is none."""
        return statistics.median(self._recent) if self._recent else 0.0

    @property
    def limit_s(self) -> float:
        """Seconds after which the next trial has hung."""
        if self._slowest_s is None:
            return self._most_s
        # A process that replaces one that hung prepares the task again.
        return min(self._most_s, HANG_S + HANG_FACTOR * (self.prepared_s + self._slowest_s))

    def note(self, outcome: Outcome, seconds: float, busy_s: float) -> None:
        """Take note of a trial that took `seconds` in all, `busy_s` of them in the worker."""
        # A trial that takes over another's time is done at once, which says nothing about the next one.
        if not isinstance(outcome, Timed) or outcome.same_as is None:
            self._recent.append(seconds)
        if not isinstance(outcome, Failed):
            self._slowest_s = max(busy_s, self._slowest_s or 0.0)
