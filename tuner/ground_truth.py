"""What is recorded of a grid: its tasks, its trials in the order in which they are made, and what is stored of them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping

from ..db.records import EnvironmentOf, Setting, TrialRecord
from ..db.store import Store
from ..kernel_templates.errors import InputError
from ..kernel_templates.gpu import Gpu
from ..kernel_templates.outcome import Regime
from ..kernel_templates.registry import template_of
from ..kernel_templates.task import Task
from ..kernel_templates.variant import Variant
from ..search_spaces.grids import Grid
from .recording import Recorded, Recording

# Under these names a run notes what its trials cost, by task and variant, and what its codes did.
TRIAL_SECONDS, COMPILE_SECONDS = "trial_seconds", "compile_seconds"

Trial = tuple[Task, Variant]


def grid_tasks(grid: Grid, gpu: Gpu) -> dict[Task, tuple[Variant, ...]]:
    """The tasks of `grid` with their variants, in its order."""
    return {
        Task(grid.spec, batch, part.page_size): part.variants(grid.spec, batch, gpu)
        for part in grid.parts
        for batch in part.batches
    }


def ordered_codes(tasks: Mapping[Task, tuple[Variant, ...]]) -> list[tuple[Trial, ...]]:
    """The trials of all tasks by the code that they share, in the order in which they are made.

    Of each template and page size the codes are shuffled, and those of all are spread evenly over the list: a recording
    that is cut short is a fair sample, and what each task's best takes is known early.
    """
    codes: dict[str, list[Trial]] = {}
    for task, variants in tasks.items():
        for variant in variants:
            codes.setdefault(code_of(variant), []).append((task, variant))
    groups: dict[tuple[str, int], list[tuple[Trial, ...]]] = {}
    for trials in codes.values():
        _, variant = trials[0]
        groups.setdefault((variant.template, variant.page_size), []).append(tuple(trials))
    placed: list[tuple[float, tuple[Trial, ...]]] = []
    for group in groups.values():
        random.Random(0).shuffle(group)
        placed += [((number + 0.5) / len(group), trials) for number, trials in enumerate(group)]
    return [trials for _, trials in sorted(placed, key=lambda each: each[0])]


def code_of(variant: Variant) -> str:
    """What variants that are compiled once have in common, on one layer and GPU."""
    return template_of(variant).code_key(variant)


def recording_of(grid: Grid, gpu: Gpu, store: Store, regime: Regime, environment_of: EnvironmentOf) -> Recording:
    """What is stored of `grid`, as one recording. Raises `InputError` where that is nothing."""
    costs = _Costs(store)
    trials: dict[Task, dict[Variant, Recorded]] = {}
    moments: list[str] = []
    for task, variants in grid_tasks(grid, gpu).items():
        stored = {r.outcome.variant: r for r in store.reusable_trials(setting_of(task, gpu, regime), environment_of)}
        found = {variant: stored[variant] for variant in variants if variant in stored}
        moments += [record.measured_at for record in found.values()]
        trials[task] = {v: costs.recorded(task, record) for v, record in found.items()}
    if not moments:
        raise InputError(f"nothing of grid {grid.name!r} is stored for {gpu.name} in {store.name}")
    names = {variant.template for each in trials.values() for variant in each}
    return Recording(
        grid=grid.name,
        gpu=gpu,
        regime=regime,
        environments={name: environment_of(name, gpu) for name in sorted(names)},
        recorded_at=(min(moments), max(moments)),
        trials={task: each for task, each in trials.items() if each},
    )


class _Costs:
    """What the trials in `store` cost, as the runs that made them noted it; 0 where a run did not."""

    def __init__(self, store: Store) -> None:
        self._seconds: dict[int, dict[str, dict[str, float]]] = {}
        self._compile_s: dict[str, float] = {}
        for run_id, settings in store.run_settings().items():
            self._seconds[run_id] = settings.get(TRIAL_SECONDS, {})
            # A later run finds the code in the cache.
            for code, seconds in settings.get(COMPILE_SECONDS, {}).items():
                self._compile_s[code] = max(seconds, self._compile_s.get(code, 0.0))

    def recorded(self, task: Task, record: TrialRecord) -> Recorded:
        variant = record.outcome.variant
        seconds = self._seconds.get(record.run_id, {}).get(task_name(task), {}).get(short_name(variant.key()), 0.0)
        compile_s = self._compile_s.get(short_name(code_of(variant)), 0.0)
        return Recorded(record.outcome, record.facts, compile_s, seconds)


def setting_of(task: Task, gpu: Gpu, regime: Regime) -> Setting:
    """Where the trials of `task` are stored."""
    return Setting(task.spec, task.batch, task.page_size, gpu, regime)


def task_name(task: Task) -> str:
    """The name of `task` in a run's notes, beside tasks of the same layer."""
    return f"{task.page_size}:{task.batch}"


def short_name(key: str) -> str:
    """The name in a run's notes of what has this key."""
    return hashlib.sha256(key.encode()).hexdigest()[:12]
