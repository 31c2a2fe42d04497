"""What won one task, tried on the others of its layer and page size.

Their kernels are compiled already, so that it is cheap; and only then is it known what each shape would lose with the
kernels of the others, or whether it was left with a worse variant than it needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ..db.records import Setting
from ..kernel_templates.batch import BatchBucket
from ..kernel_templates.heuristic import default_variant
from ..kernel_templates.registry import template_of, why_invalid
from ..kernel_templates.task import Task
from ..kernel_templates.variant import Variant
from .final import RACE_LIMIT_S, Final, keep, stored_best
from .run import Run
from .search import Search
from .settings import TaskResult

# Of the time for a run, what is kept for this.
CROSS_SHARE = 0.2
# How much faster than a task's winner another's has to be, trial against trial, for a new race.
UPSET = 1.005


def cross(results: Sequence[TaskResult], run: Run) -> None:
    """Try the stored winners of each layer and page size on every task of `results`, and note there what came of it.

    Every outcome is stored as a trial; a task on which one of them beats its winner is raced again. What was tried
    before is not tried again.
    """
    for index, result in enumerate(results):
        start = run.executor.clock()
        end = start + run.seconds_left / (len(results) - index)
        if result.best is not None and start < end:
            _cross(result, run, end)
            result.cross_seconds = run.executor.clock() - start


def winners(task: Task, run: Run) -> list[Variant]:
    """What won on any shape of the task's layer and page size, as it would run for the task: most often first."""
    bucket = BatchBucket.of(task.batch)
    found = run.store.best_configs(spec=task.spec, page_size=task.page_size, gpu_name=run.gpu.name)
    runnable = (config.variant for config in found if not why_invalid(config.variant, task.spec, run.gpu))
    counts = Counter(template_of(variant).settle(variant, bucket) for variant in runnable)
    return [variant for variant, _ in counts.most_common() if not why_invalid(variant, task.spec, run.gpu)]


def _cross(result: TaskResult, run: Run, end: float) -> None:
    task = result.task
    setting = Setting(task.spec, task.batch, task.page_size, run.gpu, run.regime)
    stored = run.store.reusable_trials(setting, run.executor.environment_of)
    known = {record.outcome.variant for record in stored}
    new = [variant for variant in winners(task, run) if variant not in known]
    if not new:
        return
    settings = replace(run.settings, trials=len(stored) + len(new))
    default = default_variant(task.spec, task.batch, task.page_size)
    first = [default] if default in known else []
    search = Search(task, replace(run, settings=settings), [*first, *new])
    search.reuse()
    search.explore(end)
    if run.executor.racer is not None:
        run.executor.worker.free()
    result.crossed = search.result.tried
    _race_upset(search, new, result, end)
    if run.executor.racer is not None:
        run.executor.racer.free()


def _race_upset(search: Search, new: Sequence[Variant], result: TaskResult, end: float) -> None:
    """Race anew where one of the `new` variants is faster than the winner, by their trials."""
    baseline, clock = search.baseline, search.run.executor.clock
    stored = None if baseline is None else stored_best(search, baseline)
    if baseline is None or stored is None or stored.variant not in search.timed:
        return
    times = [search.timed[variant].median_ms for variant in new if variant in search.timed]
    if UPSET * min(times, default=float("inf")) < search.timed[stored.variant].median_ms:
        final = Final(search, baseline)
        final.decide(min(end, clock() + RACE_LIMIT_S))
        result.best = keep(search, final)
