"""Trying each task's winner on the other tasks of its layer and page size.

Their kernels are compiled already, so that it is cheap. It shows what each batch would lose with the other batches'
kernels, and finds batches that were left with a worse variant than they needed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from ..kernel_templates.batch import BatchBucket
from ..kernel_templates.heuristic import default_variant
from ..kernel_templates.registry import template_of, why_invalid
from ..kernel_templates.task import Task
from ..kernel_templates.variant import Variant
from .final import Final, keep, stored_best
from .run import Run
from .search import Search, search_only
from .settings import TaskResult

# Least ratio of trial times, own winner over another task's winner, for which a task is raced again.
UPSET = 1.005


def cross(results: Sequence[TaskResult], run: Run) -> None:
    """Try the stored winners of each layer and page size on every task of `results`, and note the result there.

    Every outcome is stored as a trial, and a variant that was tried before is not tried again. A task on which another
    winner beats its own is raced again.
    """
    for index, result in enumerate(results):
        start = run.executor.clock()
        end = run.budget.task_end(start, len(results) - index)
        if result.best is not None and start < end:
            _cross(result, run, end)
            result.cross_seconds = run.executor.clock() - start


def winners(task: Task, run: Run) -> list[Variant]:
    """Winners of any batch of the layer and page size, as they would run for `task`, the most frequent first."""
    bucket = BatchBucket.of(task.batch)
    found = run.history.best_configs(task)
    runnable = (config.variant for config in found if not why_invalid(config.variant, task.spec, run.gpu))
    counts = Counter(template_of(variant).settle(variant, bucket) for variant in runnable)
    return [variant for variant, _ in counts.most_common() if not why_invalid(variant, task.spec, run.gpu)]


def _cross(result: TaskResult, run: Run, end: float) -> None:
    task = result.task
    known = {record.outcome.variant for record in run.history.trials(task)}
    new = [variant for variant in winners(task, run) if variant not in known]
    if not new:
        return
    default = default_variant(task.spec, task.batch, task.page_size)
    # The others are compared with the first variant that is timed.
    search = search_only(task, run, [*([default] if default in known else []), *new], end)
    result.crossed = search.result.tried
    _race_upset(search, new, result, end)


def _race_upset(search: Search, new: Sequence[Variant], result: TaskResult, end: float) -> None:
    """Race anew if one of the `new` variants is faster than the winner, by their trials."""
    baseline = search.baseline
    if baseline is None:
        return
    stored = stored_best(search, baseline, search.run.history.best_configs(search.task))
    if stored is None or stored.variant not in search.timed:
        return
    times = [search.timed[variant].median_ms for variant in new if variant in search.timed]
    if UPSET * min(times, default=math.inf) < search.timed[stored.variant].median_ms:
        final = Final(search, baseline)
        final.decide(end)
        result.best = keep(search, final)
