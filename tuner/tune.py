"""Tuning: for each task a search and a final race, within the time that was given for all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..db.records import utc_now
from ..db.store import Store
from ..kernel_templates.batch import Shape
from ..kernel_templates.errors import InputError
from ..kernel_templates.gpu import Gpu
from ..kernel_templates.outcome import BestConfig, Verdict
from ..kernel_templates.variant import Variant
from .final import Final
from .forecast import LAUNCHES_PER_TRIAL, interpreted_seconds
from .run import Executor, Listener, Run, Settings, TaskResult
from .search import Search
from .task import Task

# Of a task's time, what is kept for its final race, and the most that one takes: nine variants at 0.1 to 1 s each.
RACE_SHARE = 0.25
RACE_LIMIT_S = 20.0
# A search that tries fewer variants than the default and another has nothing to choose.
FEWEST_TRIALS = 2


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
    still hold count as trials and are not measured again. When this is interrupted, or fails, what is finished stays
    stored and `executor` is closed; else it can go on being used. Raises `InputError` for a batch that the interpreter
    cannot run in that time and for an unknown sampler, and `StoreError` when an outcome cannot be stored.
    """
    if gpu.is_interpreter:
        refuse_long(tasks, settings)
    start = executor.clock()
    deadline = start + (math.inf if settings.seconds is None else settings.seconds)
    try:
        run_id = store.start_run(settings.as_json())
        run = Run(gpu, store, settings, executor, listener or Listener(), run_id, deadline)
        return [_tune(task, run, len(tasks) - index) for index, task in enumerate(tasks)]
    except BaseException:
        executor.close()
        raise


def _tune(task: Task, run: Run, tasks_left: int) -> TaskResult:
    clock = run.executor.clock
    start = clock()
    seconds = run.seconds_left / tasks_left
    search = Search(task, run)
    search.reuse()
    search.explore(start + seconds - min(RACE_SHARE * seconds, RACE_LIMIT_S))
    result = search.result
    result.baseline = search.baseline
    if result.baseline is not None:
        result.best = _kept(search) or _decide(search, result.baseline, start + seconds)
    result.seconds = clock() - start
    run.listener.finished(result)
    return result


def _kept(search: Search) -> BestConfig | None:
    """The stored best config, when nothing new was tried since it was clearly decided."""
    if search.result.tried:
        return None
    run, task = search.run, search.task
    shape = Shape.of(task.spec, task.batch)
    for config in run.store.best_configs(
        spec=shape.spec, bucket=shape.bucket, page_size=task.page_size, gpu_name=run.gpu.name
    ):
        is_same = config.batch == str(task.batch) and config.gpu.num_sms == run.gpu.num_sms
        holds = config.environment == run.executor.environment_of(config.variant.template, run.gpu)
        timing = search.timed.get(config.variant)
        if is_same and holds and timing is not None and timing.regime == config.timing.regime:
            return None if config.verdict is Verdict.AMBIGUOUS else config
    return None


def _decide(search: Search, baseline: Variant, deadline: float) -> BestConfig:
    run, task = search.run, search.task
    final = Final(search, baseline)
    variant, verdict = final.decide(min(deadline, run.executor.clock() + RACE_LIMIT_S))
    best = BestConfig(
        shape=Shape.of(task.spec, task.batch),
        gpu=run.gpu,
        variant=variant,
        timing=final.timings[variant],
        default_timing=final.timings[baseline],
        verdict=verdict,
        full_check=False,
        environment=run.executor.environment_of(variant.template, run.gpu),
        batch=str(task.batch),
        measured_at=utc_now(),
    )
    run.store.put_best(best)
    return best


def refuse_long(tasks: Sequence[Task], settings: Settings) -> None:
    """Raise `InputError` when the interpreter is expected to take longer than all the time there is for one task."""
    if settings.seconds is None:
        return
    trials = min(FEWEST_TRIALS, settings.trials)
    for task in tasks:
        seconds = trials * LAUNCHES_PER_TRIAL * interpreted_seconds(task)
        if seconds > settings.seconds:
            raise InputError(
                f"batch {str(task.batch)!r} is too large for Triton's interpreter: {trials} variants would take about "
                f"{seconds:.0f} s, and there are {settings.seconds:.0f} s; accepted is a smaller batch, or more seconds"
            )
