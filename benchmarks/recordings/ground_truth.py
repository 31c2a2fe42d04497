"""The trials of a grid: their order, and the recording of their stored outcomes."""

from __future__ import annotations

import hashlib
import random
import statistics
from collections.abc import Mapping

from grids import Grid

from attention_tuner.db.records import EnvironmentOf, Setting, TrialRecord
from attention_tuner.db.store import Store
from attention_tuner.kernel_templates.errors import InputError
from attention_tuner.kernel_templates.gpu import Gpu
from attention_tuner.kernel_templates.outcome import Regime
from attention_tuner.kernel_templates.registry import code_of
from attention_tuner.kernel_templates.task import Task
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.tuner.recording import Recorded, Recording, is_measured

# Names in a run's settings for the seconds of its trials (by task and variant) and of its compilations (by code).
TRIAL_SECONDS, COMPILE_SECONDS = "trial_seconds", "compile_seconds"

Trial = tuple[Task, Variant]


def grid_tasks(grid: Grid, gpu: Gpu) -> dict[Task, tuple[Variant, ...]]:
    """The tasks of `grid` with their variants, in the order of its file."""
    return {
        Task(grid.spec, batch, part.page_size): part.variants(grid.spec, batch, gpu)
        for part in grid.parts
        for batch in part.batches
    }


def ordered_codes(tasks: Mapping[Task, tuple[Variant, ...]]) -> list[tuple[Trial, ...]]:
    """Group the trials of all tasks by their shared code, in the order of the recording.

    The codes of each template and page size are shuffled and spread evenly over the list. So an unfinished recording is
    a fair sample, and the best time of each task is known early.
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


def recording_of(grid: Grid, gpu: Gpu, store: Store, regime: Regime, environment_of: EnvironmentOf) -> Recording:
    """Make a recording of the stored trials of `grid`.

    Raises `InputError` if there are none.
    """
    costs = _Costs(store)
    trials: dict[Task, dict[Variant, Recorded]] = {}
    moments: list[str] = []
    for task, variants in grid_tasks(grid, gpu).items():
        known = store.known_trials(setting_of(task, gpu, regime), environment_of)
        stored = {r.outcome.variant: r for r in known.reusable}
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
    """The seconds of trials and compilations that the runs in `store` noted.

    A killed run, or one that was no recording, has not noted all. A missing value is replaced by the median.
    """

    def __init__(self, store: Store) -> None:
        self._seconds: dict[int, dict[str, dict[str, float]]] = {}
        self._compile_s: dict[str, float] = {}
        for run_id, settings in store.run_settings().items():
            self._seconds[run_id] = settings.get(TRIAL_SECONDS, {})
            # A later run finds the code in the cache, so the maximum counts.
            for code, seconds in settings.get(COMPILE_SECONDS, {}).items():
                self._compile_s[code] = max(seconds, self._compile_s.get(code, 0.0))
        noted = [s for tasks in self._seconds.values() for trials in tasks.values() for s in trials.values() if s]
        self._usual_s = statistics.median(noted) if noted else 0.0
        self._usual_compile_s = statistics.median(self._compile_s.values()) if self._compile_s else 0.0

    def recorded(self, task: Task, record: TrialRecord) -> Recorded:
        variant = record.outcome.variant
        noted = self._seconds.get(record.run_id, {}).get(task_name(task), {})
        seconds = noted.get(short_name(variant.key())) or (self._usual_s if is_measured(record.outcome) else 0.0)
        is_compiled = record.facts is not None
        compile_s = self._compile_s.get(short_name(code_of(variant))) or (self._usual_compile_s if is_compiled else 0.0)
        return Recorded(record.outcome, record.facts, compile_s, seconds)


def setting_of(task: Task, gpu: Gpu, regime: Regime) -> Setting:
    """The setting under which the trials of `task` are stored."""
    return Setting(task.spec, task.batch, task.page_size, gpu, regime)


def task_name(task: Task) -> str:
    """The name of `task` in a run's notes, among tasks of the same layer."""
    return f"{task.page_size}:{task.batch}"


def short_name(key: str) -> str:
    """The name of a key in a run's notes."""
    return hashlib.sha256(key.encode()).hexdigest()[:12]
