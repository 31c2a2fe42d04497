"""Replay: search recorded outcomes as `tune` searches a GPU, in seconds and without one."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..db.store import Store
from ..kernel_templates.outcome import Outcome, Skipped, Timed
from ..kernel_templates.task import Task
from ..kernel_templates.variant import Variant
from .recording import Recording
from .settings import Listener, Progress, Settings, TaskResult
from .simulated import PROCESSES, executor_of
from .tune import tune

# A variant at most so many times as slow as the optimum counts as equally good.
AS_GOOD = 1.02


@dataclass(frozen=True, slots=True)
class Replayed:
    """The search for one task of a recording."""

    recording: Recording = field(repr=False)
    # Its seconds are simulated.
    result: TaskResult
    # In the order in which they ended; a skipped variant is no trial.
    trials: tuple[Outcome, ...]

    @property
    def optimum(self) -> Timed | None:
        """The fastest recorded outcome."""
        return self.recording.optimum(self.result.task)

    @property
    def loss(self) -> float | None:
        """The recorded slowdown of the best config against the optimum, as a share; None without either."""
        best, optimum = self.result.best, self.optimum
        kept = best and self.recording.outcome(self.result.task, best.variant)
        if not isinstance(kept, Timed) or optimum is None:
            return None
        return kept.timing.median_ms / optimum.timing.median_ms - 1

    def within(self, ratio: float = AS_GOOD) -> int | None:
        """The number of trials until one was at most `ratio` times as slow as the optimum, None if none was."""
        optimum = self.optimum
        limit_ms = ratio * optimum.timing.median_ms if optimum else 0.0
        timed = ((n, t) for n, t in enumerate(self.trials, 1) if isinstance(t, Timed))
        return next((n for n, trial in timed if trial.timing.median_ms <= limit_ms), None)


def replay(
    recording: Recording,
    tasks: Sequence[Task],
    settings: Settings,
    listener: Listener | None = None,
    processes: int = PROCESSES,
) -> list[Replayed]:
    """Search `tasks` of `recording` as `tune` does, on a simulated clock that `settings.seconds` counts too.

    Compiling, on so many `processes`, and measuring take the recorded seconds; starting processes, preparing inputs and
    choosing variants take none. The database is temporary. The same arguments give the same results. Raises
    `InputError` for an unknown sampler.
    """
    trace = _Trace(listener or Listener())
    settings = replace(settings, regime=recording.regime)
    with tempfile.TemporaryDirectory(prefix="attention-tuner-") as folder, Store.open(Path(folder) / "db") as store:
        results = tune(tasks, recording.gpu, store, settings, executor_of(recording, processes), trace)
    for result in results:
        if result.best is not None:
            result.best = replace(result.best, measured_at=recording.recorded_at[1])
    return [Replayed(recording, result, tuple(trace.trials.get(result.task, ()))) for result in results]


def near(recording: Recording, task: Task, ratio: float = AS_GOOD) -> int:
    """The number of variants of `task` that are at most `ratio` times as slow as its optimum."""
    best = recording.optimum(task)
    times_ms = [each.timing.median_ms for v in recording.variants(task)
                if isinstance(each := recording.outcome(task, v), Timed)]
    return 0 if best is None else sum(ms <= ratio * best.timing.median_ms for ms in times_ms)


class _Trace(Listener):
    """Keeps the trials, and passes every call on to another listener."""

    def __init__(self, listener: Listener) -> None:
        self.trials: dict[Task, list[Outcome]] = {}
        self._listener = listener

    def started(self, task: Task, valid: int, reused: int) -> None:
        self._listener.started(task, valid, reused)

    def tried(self, progress: Progress) -> None:
        if not isinstance(progress.outcome, Skipped):
            self.trials.setdefault(progress.task, []).append(progress.outcome)
        self._listener.tried(progress)

    def racing(self, task: Task, variants: tuple[Variant, ...]) -> None:
        self._listener.racing(task, variants)

    def finished(self, result: TaskResult) -> None:
        self._listener.finished(result)
