"""Recorder of a ground truth: compiles, checks and times every variant of a grid, and stores each outcome."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from grids import Grid
from ground_truth import (
    COMPILE_SECONDS,
    TRIAL_SECONDS,
    Trial,
    grid_tasks,
    ordered_codes,
    setting_of,
    short_name,
    task_name,
)

from attention_tuner.db.records import TrialRecord
from attention_tuner.kernel_templates.errors import InputError
from attention_tuner.kernel_templates.outcome import Failed, JobError, Outcome, Skipped, StaticFacts, Timed, Wrong
from attention_tuner.kernel_templates.registry import code_of
from attention_tuner.kernel_templates.task import Task
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.tuner.costs import Costs
from attention_tuner.tuner.measure.jobs import MeasureJob, PrepareJob
from attention_tuner.tuner.run import Run
from attention_tuner.tuner.search import EXCEEDS_SHARED_MEMORY, POLL_S

# Queued codes per process of the compile pool.
AHEAD = 3
# Queued measurements of the worker, so that it never waits for the store.
QUEUED = 4
# Seconds between two notes of progress and costs.
NOTE_S = 15.0

@dataclass(slots=True)
class _PendingTrial:
    """A measurement that is queued or running."""

    task: Task
    variant: Variant
    facts: StaticFacts | None
    future: Future[Timed | Wrong | Failed]
    # Seconds of the worker.
    seconds: float = 0.0


@dataclass(slots=True)
class Recorder:
    """Makes the trials of `grid` that are not stored yet; `tell` gets a progress line every `NOTE_S` seconds."""

    grid: Grid
    run: Run
    tell: Callable[[str], None]
    counts: Counter[str] = field(default_factory=Counter[str])
    _codes: deque[tuple[Trial, ...]] = field(default_factory=deque[tuple[Trial, ...]])
    _waiting: list[tuple[Trial, ...]] = field(default_factory=list[tuple[Trial, ...]])
    _ready: deque[tuple[Task, Variant, StaticFacts | None]] = field(
        default_factory=deque[tuple[Task, Variant, StaticFacts | None]])
    _pending: deque[_PendingTrial] = field(default_factory=deque[_PendingTrial])
    _costs: dict[Task, Costs] = field(default_factory=dict[Task, Costs])
    _best_ms: dict[Task, float] = field(default_factory=dict[Task, float])
    # Costs by task and variant, and by code, under short names.
    _seconds: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    _compile_s: dict[str, float] = field(default_factory=dict[str, float])
    _missing: int = 0
    _noted_s: float = 0.0
    _busy_s: float = 0.0

    def record(self) -> int:
        """Make the missing trials until the time is up, and return the number still missing.

        Raises `InputError` for a task without a valid variant, and `JobError` if the GPU cannot hold the inputs.
        """
        tasks = grid_tasks(self.grid, self.run.gpu)
        if not all(tasks.values()):
            raise InputError(f"no variant of grid {self.grid.name!r} is valid on {self.run.gpu.name}")
        missing = {task: self._untried(task, variants) for task, variants in tasks.items()}
        self._missing = sum(map(len, missing.values()))
        self._codes.extend(ordered_codes(missing))
        self.tell(f"grid {self.grid.name}: {len(self._codes)} codes to compile for {self._missing} trials; "
                  f"{sum(map(len, tasks.values())) - self._missing} of {sum(map(len, tasks.values()))} are stored")
        if self._codes:
            try:
                if self._prepare([task for task, variants in missing.items() if variants]):
                    self._make_trials()
            finally:
                self._note()
        return self._missing

    def _untried(self, task: Task, variants: tuple[Variant, ...]) -> tuple[Variant, ...]:
        run = self.run
        stored = run.store.known_trials(setting_of(task, run.gpu, run.regime), run.executor.environment_of).reusable
        tried = {record.outcome.variant for record in stored}
        for record in stored:
            self._learn(task, record.outcome)
        return tuple(variant for variant in variants if variant not in tried)

    def _prepare(self, tasks: list[Task]) -> bool:
        """Make the inputs of the tasks while the first codes compile. Returns false if the time was up."""
        executor = self.run.executor
        executor.start(len(self._codes))
        self._order()
        if not executor.worker.ready(self.run.seconds_left):
            return False
        for task in tasks:
            costs = self._costs[task] = Costs(task, self.run.gpu.is_interpreter)
            job = PrepareJob(task, self.run.settings.seed, self.run.regime)
            try:
                costs.prepared_s = executor.worker.submit(job, costs.limit_s, self.run.budget.end).result()
            except JobError:
                if self.run.seconds_left > 0:
                    raise
                return False
        self._busy_s = executor.worker.busy_s
        return True

    def _make_trials(self) -> None:
        while self.run.seconds_left > 0:
            self._order()
            self._collect(0.0 if self._pending or self._ready else min(POLL_S, self.run.seconds_left))
            self._start_next()
            if self._pending:
                self._finish()
            elif not (self._codes or self._waiting):
                break
            if self.run.executor.clock() >= self._noted_s + NOTE_S:
                self._note()
        for pending in self._pending:
            pending.future.cancel()

    def _order(self) -> None:
        """Queue the next codes to compile."""
        builds = self.run.builds
        if builds is None:
            if self._codes and not self._ready:
                self._ready.extend((task, variant, None) for task, variant in self._codes.popleft())
            return
        while self._codes and len(self._waiting) < AHEAD * builds.pool.processes:
            trials = self._codes.popleft()
            builds.request(*trials[0])
            self._waiting.append(trials)

    def _collect(self, wait_s: float) -> None:
        """Turn compiled codes into trials to measure, or into outcomes if they cannot run."""
        builds = self.run.builds
        if builds is None or not self._waiting:
            return
        builds.collect(wait_s)
        waiting, self._waiting = self._waiting, []
        for trials in waiting:
            compiled = builds.result(*trials[0])
            if compiled is None:
                self._waiting.append(trials)
                continue
            self._compile_s[short_name(code_of(trials[0][1]))] = builds.seconds_of(*trials[0])
            for task, variant in trials:
                self._sort(task, variant, compiled)

    def _sort(self, task: Task, variant: Variant, compiled: StaticFacts | Failed) -> None:
        if isinstance(compiled, Failed):
            self._store(task, Failed(variant, compiled.stage, compiled.reason), None, 0.0)
        elif compiled.shared_bytes > self.run.gpu.shared_memory_bytes:
            self._store(task, Skipped(variant, EXCEEDS_SHARED_MEMORY), compiled, 0.0)
        else:
            self._ready.append((task, variant, compiled))

    def _start_next(self) -> None:
        """Queue measurements."""
        run = self.run
        worker = run.executor.worker
        while self._ready and len(self._pending) < QUEUED:
            task, variant, facts = self._ready.popleft()
            job = MeasureJob(task, variant, run.settings.samples, run.settings.seed, run.regime,
                             self._best_ms.get(task), "" if facts is None else facts.code_hash)
            pending = _PendingTrial(task, variant, facts, worker.submit(job, self._costs[task].limit_s, run.budget.end))
            pending.future.add_done_callback(self._ending(pending))
            self._pending.append(pending)

    def _ending(self, pending: _PendingTrial) -> Callable[[object], None]:
        def note_end(_: object) -> None:
            # Jobs end one at a time, and this is called before the next one ends.
            busy_s = self.run.executor.worker.busy_s
            pending.seconds, self._busy_s = busy_s - self._busy_s, busy_s

        return note_end

    def _finish(self) -> None:
        """Store the outcome of the oldest measurement, unless it was cut short by the end of the time."""
        pending = self._pending.popleft()
        try:
            outcome = pending.future.result()
        except JobError:
            return
        if isinstance(outcome, Failed) and self.run.seconds_left <= 0:
            return
        self._costs[pending.task].note(outcome, pending.seconds, pending.seconds)
        self._store(pending.task, outcome, pending.facts, pending.seconds)

    def _store(self, task: Task, outcome: Outcome, facts: StaticFacts | None, seconds: float) -> None:
        run, variant = self.run, outcome.variant
        environment = run.executor.environment_of(variant.template, run.gpu)
        setting = setting_of(task, run.gpu, run.regime)
        run.store.add_trial(TrialRecord(run.run_id, setting, environment, outcome, facts))
        self._seconds.setdefault(task_name(task), {})[short_name(variant.key())] = float(f"{seconds:.4g}")
        self.counts[type(outcome).__name__.lower()] += 1
        self._missing -= 1
        self._learn(task, outcome)

    def _learn(self, task: Task, outcome: Outcome) -> None:
        if isinstance(outcome, Timed):
            ms = outcome.timing.median_ms
            self._best_ms[task] = min(ms, self._best_ms.get(task, ms))

    def _note(self) -> None:
        """Store the costs of the trials so far, and report the progress."""
        self._noted_s = self.run.executor.clock()
        self.run.store.finish_run(self.run.run_id, {TRIAL_SECONDS: self._seconds, COMPILE_SECONDS: self._compile_s})
        made = self.counts.total()
        spent = sum(sum(each.values()) for each in self._seconds.values())
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.counts.most_common())
        self.tell(f"{made} trials made ({kinds or 'none'}), {self._missing} missing; {len(self._compile_s)} codes "
                  f"compiled, {len(self._codes) + len(self._waiting)} left; {1e3 * spent / max(1, made):.0f} ms of "
                  f"GPU time a trial; {self.run.seconds_left:.0f} s left")
