"""Tuning: a search and a final race for each task, within the time that is given for all of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..db.store import Store
from ..kernel_templates.batch import minimum_traffic
from ..kernel_templates.errors import InputError, TunerError
from ..kernel_templates.gpu import INTERPRETER, Gpu
from ..kernel_templates.launch.device import present_memory_bytes
from ..kernel_templates.outcome import Verdict
from ..kernel_templates.task import Task
from .costs import FEWEST_TRIALS, fewest_seconds
from .cross import cross
from .final import Final, is_newest, keep, stored_best
from .run import Executor, Run, open_run
from .search import Search
from .settings import Listener, Settings, TaskResult


def tune(
    tasks: Sequence[Task],
    gpu: Gpu,
    store: Store,
    settings: Settings,
    executor: Executor,
    listener: Listener | None = None,
) -> list[TaskResult]:
    """Find the best variant for each task; every outcome is stored at once, and each best config when it is known.

    `settings.seconds` is divided fairly among the tasks; what one leaves goes to those after it. Stored outcomes that
    still hold count as trials and are not measured again. A stored best config that still holds is replaced only after
    a race that it took part in, or by a variant that is clearly better. An interrupt or a failure stores the best so
    far and closes `executor`; else it can go on being used. Raises `InputError` as `refuse` does and for an unknown
    sampler, and `StoreError` when an outcome cannot be stored.

    Through Triton's interpreter, without a GPU:

        from contextlib import closing

        from attention_tuner import AttentionSpec, Batch, Settings, Store, Task, executor_on, tune
        from attention_tuner.kernel_templates.gpu import INTERPRETER

        if __name__ == "__main__":
            task = Task(AttentionSpec(2, 1, 64), Batch.parse("1x2@20"), page_size=16)
            with Store.open("tuned.db") as store, closing(executor_on(INTERPRETER)) as executor:
                (result,) = tune([task], INTERPRETER, store, Settings(trials=2), executor)
            print(result.best.variant.key())
    """
    if executor.recording is None:
        refuse(tasks, gpu, settings)
    with open_run(gpu, store, settings, executor, listener) as run:
        first = replace(run, budget=run.budget.before_cross(executor.clock())) if settings.cross else run
        searches = Searches(tasks, first)
        results = [_tune(searches, first, len(tasks) - index) for index in range(len(tasks))]
        if settings.cross:
            cross(results, run)
        return results


def refuse(tasks: Sequence[Task], gpu: Gpu, settings: Settings) -> None:
    """Raise `InputError` for a task that cannot be tuned on `gpu` within `settings`.

    The interpreter may be expected to take longer for a batch than its share of the time. The present GPU's memory may
    be too small for a batch's queries, keys and values.
    """
    if gpu.is_interpreter:
        _refuse_long(tasks, settings)
    else:
        _refuse_large(tasks)


class Searches:
    """Searches over `tasks`, one after the other. The next one can begin while the GPU runs the last one's race."""

    def __init__(self, tasks: Sequence[Task], run: Run) -> None:
        self._tasks = iter(tasks)
        self._run = run
        self._next: Search | None = None
        missing = sum(max(0, run.settings.trials - len(run.history.trials(task))) for task in tasks)
        if missing:
            run.executor.start(min(missing, run.most_ahead))

    def begin_next(self) -> None:
        """Have the first variants of the next search compiled, if there is one that has not begun."""
        task = next(self._tasks, None) if self._next is None else None
        if task is not None:
            self._next = Search(task, self._run)
            self._next.reuse()
            if self._run.seconds_left > 0:
                self._next.learn()
                self._next.choose_ahead()

    def take(self) -> Search:
        """Take the next search, begun if it was not yet."""
        self.begin_next()
        search, self._next = self._next, None
        assert search is not None
        return search


def _tune(searches: Searches, run: Run, tasks_left: int) -> TaskResult:
    executor, start = run.executor, run.executor.clock()
    full_start = executor.pool.full_seconds if executor.pool else 0.0
    search = searches.take()
    _find_best(search, tasks_left, searches.begin_next)
    result = search.result
    result.seconds = executor.clock() - start
    result.compiling_seconds = (executor.pool.full_seconds if executor.pool else 0.0) - full_start
    run.listener.finished(result)
    return result


def _find_best(search: Search, tasks_left: int, during_race: Callable[[], None]) -> None:
    """Search and race, and store the best config, or the best so far after an interrupt or a failure."""
    run, clock, result = search.run, search.run.executor.clock, search.result
    final: Final | None = None
    try:
        if search.has_work:
            # For the first task the process is only starting, which takes its time from all tasks.
            run.executor.worker.ready(run.seconds_left)
        end = run.budget.task_end(clock(), tasks_left)
        search.try_variants(run.budget.search_end(clock(), end))
        result.baseline = search.baseline
        if result.baseline is None:
            return
        stored = stored_best(search, result.baseline, run.history.best_configs(search.task))
        if stored is not None and stored.verdict is not Verdict.AMBIGUOUS and is_newest(stored, search):
            result.best = stored
            return
        final = Final(search, result.baseline)
        final.decide(end, during_race)
        result.best, result.baseline = keep(search, final), search.baseline
    except BaseException:
        if search.baseline is not None:
            # The store may be what failed.
            with contextlib.suppress(TunerError):
                keep(search, final or Final(search, search.baseline))
        raise


def _refuse_long(tasks: Sequence[Task], settings: Settings) -> None:
    if settings.seconds is None:
        return
    share = settings.seconds / len(tasks)
    for task in tasks:
        seconds = fewest_seconds([task], INTERPRETER, settings.trials)
        if seconds > share:
            needed = fewest_seconds(tasks, INTERPRETER, settings.trials)
            raise InputError(
                f"batch {str(task.batch)!r} is too large for Triton's interpreter: "
                f"{min(FEWEST_TRIALS, settings.trials)} variants would take about {seconds:.0f} s, and its share of "
                f"the time is {share:.0f} s; accepted is a smaller batch, or {math.ceil(needed)} seconds in all")


def _refuse_large(tasks: Sequence[Task]) -> None:
    memory = present_memory_bytes()
    for task in tasks:
        needed, _ = minimum_traffic(task.spec, task.batch)
        if memory is not None and needed > memory:
            raise InputError(
                f"batch {str(task.batch)!r} needs {needed / 2**30:.1f} GiB of GPU memory for its queries, keys and "
                f"values, and the GPU has {memory / 2**30:.1f} GiB; accepted is a smaller batch")
