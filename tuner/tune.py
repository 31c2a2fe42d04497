"""Tuning: for each task a search and a final race, within the time that was given for all of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..db.records import Setting
from ..db.store import Store
from ..kernel_templates.batch import minimum_traffic
from ..kernel_templates.errors import InputError, TunerError
from ..kernel_templates.gpu import INTERPRETER, Gpu
from ..kernel_templates.launch.device import present_memory_bytes
from ..kernel_templates.outcome import Verdict
from ..kernel_templates.task import Task
from .costs import FEWEST_TRIALS, fewest_seconds
from .cross import CROSS_SHARE, cross
from .final import RACE_LIMIT_S, Final, is_newest, keep, stored_best
from .run import Executor, Run, open_run
from .search import Search
from .settings import Listener, Settings, TaskResult

# Of a task's time, what is kept for its final race.
RACE_SHARE = 0.25


def tune(
    tasks: Sequence[Task],
    gpu: Gpu,
    store: Store,
    settings: Settings,
    executor: Executor,
    listener: Listener | None = None,
) -> list[TaskResult]:
    """Find the best variant for each of `tasks`, storing every outcome at once and each best config when it is known.

    `settings.seconds` is divided fairly among the tasks; what one leaves goes to those after it. Stored outcomes that
    still hold count as trials and are not measured again, and a stored best config that still holds is replaced by a
    race that it took part in, or by what is clearly better. When this is interrupted, or fails, the best so far is
    stored too and `executor` is closed; else it can go on being used. Raises `InputError` for a batch that the
    interpreter cannot run in that time or the GPU's memory cannot hold and for an unknown sampler, and `StoreError`
    when an outcome cannot be stored.
    """
    if executor.recording is None:
        _refuse(tasks, gpu, settings)
    with open_run(gpu, store, settings, executor, listener) as run:
        share = CROSS_SHARE if settings.cross else 0.0
        first = replace(run, deadline=executor.clock() + (1 - share) * run.seconds_left)
        searches = Searches(tasks, first)
        results = [_tune(searches, first, len(tasks) - index) for index in range(len(tasks))]
        if settings.cross:
            cross(results, run)
        return results


class Searches:
    """The searches over `tasks`, one after the other. The next one can be begun while the GPU is busy with the last."""

    def __init__(self, tasks: Sequence[Task], run: Run) -> None:
        self._tasks = iter(tasks)
        self._run = run
        self._next: Search | None = None
        trials = sum(map(self._open_trials, tasks))
        if trials:
            run.executor.start(min(trials, run.ahead))

    def begin_next(self) -> None:
        """Have the first variants of the next search compiled, if there is one that has not begun."""
        task = next(self._tasks, None) if self._next is None else None
        if task is not None:
            self._next = Search(task, self._run)
            self._next.reuse()
            if self._run.seconds_left > 0:
                self._next.look_around()
                self._next.ask_ahead()

    def take(self) -> Search:
        """The next search."""
        self.begin_next()
        search, self._next = self._next, None
        assert search is not None
        return search

    def _open_trials(self, task: Task) -> int:
        """Trials that are not stored yet."""
        setting = Setting(task.spec, task.batch, task.page_size, self._run.gpu, self._run.regime)
        stored = self._run.store.reusable_trials(setting, self._run.executor.environment_of)
        return max(0, self._run.settings.trials - len(stored))


def _tune(searches: Searches, run: Run, tasks_left: int) -> TaskResult:
    executor, start = run.executor, run.executor.clock()
    full_start = executor.pool.full_seconds if executor.pool else 0.0
    search = searches.take()
    _find(search, tasks_left, searches.begin_next)
    result = search.result
    if executor.racer is not None:
        executor.racer.free()
    result.seconds = executor.clock() - start
    result.compiling_seconds = (executor.pool.full_seconds if executor.pool else 0.0) - full_start
    run.listener.finished(result)
    return result


def _find(search: Search, tasks_left: int, meanwhile: Callable[[], None]) -> None:
    """Search and race, and store the best config, or that so far when this is interrupted or fails."""
    run, executor, result = search.run, search.run.executor, search.result
    final: Final | None = None
    try:
        if search.has_work:
            # For the first task the process is only starting, which takes its time from all of them.
            executor.worker.ready(run.seconds_left)
        seconds = run.seconds_left / tasks_left
        deadline = executor.clock() + seconds
        search.explore(deadline - min(RACE_SHARE * seconds, RACE_LIMIT_S))
        if executor.racer is not None:
            # There may not be memory for both.
            executor.worker.free()
        result.baseline = search.baseline
        if result.baseline is None:
            return
        stored = stored_best(search, result.baseline)
        if stored is not None and stored.verdict is not Verdict.AMBIGUOUS and is_newest(stored, search):
            result.best = stored
            return
        final = Final(search, result.baseline)
        final.decide(min(deadline, executor.clock() + RACE_LIMIT_S), meanwhile)
        result.best, result.baseline = keep(search, final), search.baseline
    except BaseException:
        if search.baseline is not None:
            # It may be the store that failed.
            with contextlib.suppress(TunerError):
                keep(search, final or Final(search, search.baseline))
        raise


def _refuse(tasks: Sequence[Task], gpu: Gpu, settings: Settings) -> None:
    if gpu.is_interpreter:
        refuse_long(tasks, settings)
    else:
        refuse_large(tasks)


def refuse_long(tasks: Sequence[Task], settings: Settings) -> None:
    """Raise `InputError` when the interpreter is expected to take longer for one task than that one's share."""
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


def refuse_large(tasks: Sequence[Task]) -> None:
    """Raise `InputError` for a task whose queries, keys and values exceed the memory of the present GPU."""
    memory = present_memory_bytes()
    for task in tasks:
        needed, _ = minimum_traffic(task.spec, task.batch)
        if memory is not None and needed > memory:
            raise InputError(
                f"batch {str(task.batch)!r} needs {needed / 2**30:.1f} GiB of GPU memory for its queries, keys and "
                f"values, and the GPU has {memory / 2**30:.1f} GiB; accepted is a smaller batch")
