"""The search for one task: variants are asked for, compiled ahead, checked and timed, and every outcome is stored."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence

from ..db.records import Setting, TrialRecord
from ..kernel_templates.batch import BatchBucket
from ..kernel_templates.heuristic import default_variant
from ..kernel_templates.outcome import Failed, JobError, Outcome, Skipped, StaticFacts, Timed, Timing
from ..kernel_templates.task import Task
from ..kernel_templates.variant import Variant
from ..search_spaces.space import survey
from .costs import Costs
from .leads import first_variants, log_ratios, neighbours, proven
from .measure.jobs import MeasureJob, PrepareJob
from .run import Executor, Run
from .sampling.study import Study
from .settings import Progress, TaskResult

# Samples that the interpreter takes for each trial: each is a launch of a tenth of a second or more.
INTERPRETED_SAMPLES = 2
# Of the trials that the sampler is left with, at most this share goes to what did well on other batches of the run,
# which is compiled already and keeps the GPU busy while the sampler's choices are compiled.
PROVEN_SHARE = 0.75
# A task whose share of a run's time is short still has so many variants timed, or so many seconds more: ending what is
# under way costs the process, and to start another takes longer than most of what could be cut off.
FEW_TIMED = 3
OVERRUN_S = 10.0
# How long to wait for a compile before looking at the clock again.
POLL_S = 0.5
EXCEEDS_SHARED_MEMORY = "its shared memory exceeds the GPU's"


class PendingMeasurement:
    """The `job` of measuring a variant, begun as this is made, for at most `limit_s` seconds and until `deadline`."""

    def __init__(self, executor: Executor, job: MeasureJob, limit_s: float, deadline: float) -> None:
        self._executor = executor
        self._deadline = deadline
        self._start, self._busy_s = executor.clock(), executor.worker.busy_s
        self._end = 0.0
        self._future = executor.worker.submit(job, limit_s, deadline)
        self._future.add_done_callback(self._note_end)

    @property
    def busy_s(self) -> float:
        """The seconds for which the worker has been busy since."""
        return self._executor.worker.busy_s - self._busy_s

    def finish(self, costs: Costs) -> Outcome | None:
        """The outcome, once there is one that the variant is to blame for; `costs` takes note of what it took.

        Raises `JobError` when its turn on the GPU did not come before the time was up.
        """
        outcome = self._future.result()
        # The callback of a future may come just after its result.
        end = self._end or self._executor.clock()
        costs.note(outcome, end - self._start, self.busy_s)
        # A variant is not to blame for a budget that ran out.
        is_cut_short = isinstance(outcome, Failed) and end >= self._deadline
        return None if is_cut_short else outcome

    def _note_end(self, _: object) -> None:
        self._end = self._executor.clock()


class Search:
    """The search over the variants of one task, with what stored trials already tell; `result` counts it all.

    `same_as` names, for a variant with the code and launch of another, that other one: as far as one process measured
    both in this run, for nothing else remembers them. `unfit` are those of which it is known that they have no time.
    `costs` is what trials took, and `newest` when the latest of the stored ones was made, as text. With `only`, these
    are tried in their order, and nothing else is.
    """

    def __init__(self, task: Task, run: Run, only: Sequence[Variant] | None = None) -> None:
        self.task = task
        self.run = run
        self.setting = Setting(task.spec, task.batch, task.page_size, run.gpu, run.regime)
        self.result = TaskResult(task)
        self.timed: dict[Variant, Timing] = {}
        self.same_as: dict[Variant, Variant] = {}
        self.unfit: set[Variant] = set()
        self.costs = Costs(task, run.gpu.is_interpreter)
        self.newest = ""
        self.neighbours = neighbours(task, run)
        self._only = only
        self._noted: list[Outcome] = []
        self._proven: deque[Variant] = deque()
        self._asked = 0
        # Asked for: compiled, or still to be.
        self._ready: deque[Variant] = deque()
        self._waiting: list[Variant] = []
        # Of those, what is compiled for this search.
        self._ordered: set[Variant] = set()
        self._pending: PendingMeasurement | None = None
        self._is_over = False
        self._best_ms: float | None = None

    @functools.cached_property
    def _valid(self) -> Sequence[Variant]:
        """The variants that may be tried. Like what follows from them, found when needed: it may take a second."""
        if self._only is not None:
            return tuple(self._only)
        task, recording = self.task, self.run.executor.recording
        return recording.variants(task) if recording else survey(
            task.spec, BatchBucket.of(task.batch), task.page_size, self.run.gpu).valid

    @functools.cached_property
    def _first(self) -> tuple[Variant, ...]:
        """Those to be tried first."""
        if self._only is not None:
            return tuple(self._only)
        return first_variants(self.task, self.run.gpu, self.neighbours, frozenset(self._valid))

    @functools.cached_property
    def _study(self) -> Study:
        """What chooses the others, told all that is known."""
        study = Study(self._valid, self._first, self.run.settings.sampler, self.run.settings.seed)
        for outcome in self._noted:
            study.tell(outcome)
        return study

    @property
    def baseline(self) -> Variant | None:
        """The timed variant that the others are held against: the default, or else the first that was to be tried."""
        if not self.timed:
            return None
        return next((variant for variant in (*self._first, *self.timed) if variant in self.timed), None)

    @property
    def has_work(self) -> bool:
        """Whether there is a variant to measure, compiled or not."""
        return bool(self._ready or self._waiting or self._proven)

    def reuse(self) -> None:
        """Take over the stored trials that still hold."""
        run, result = self.run, self.result
        known = run.store.known_trials(self.setting, run.executor.environment_of)
        for record in known.reusable:
            self._note(record.outcome)
            self.newest = max(self.newest, record.measured_at)
            result.reused += 1
        result.outdated = known.outdated

    def look_around(self) -> None:
        """See what is known of other batches by now, and leave some trials to what did well there.

        Called before the first variants are asked for, so that these trials are left, and again when the search begins.
        """
        known, self.neighbours = self.neighbours, neighbours(self.task, self.run)
        self._study.prefer([variant for variant in self.neighbours if variant not in known])
        self._study.expect(log_ratios(self.task, self.run))
        made = self.result.reused - self.result.skipped
        to_come = sum(variant not in self.timed and variant not in self.unfit for variant in self._first)
        share = int(PROVEN_SHARE * (self.run.settings.trials - made - to_come))
        left = self.run.settings.trials - self._trials
        self._proven = deque(proven(self.task, self.run)[: max(0, min(share, left))])

    def ask_ahead(self) -> None:
        """Ask until enough variants are on their way to be compiled, or all trials; one that is skipped is no trial."""
        while (
            len(self._ready) + len(self._waiting) + (self._pending is not None) < self.run.ahead
            and self._trials + len(self._proven) < self.run.settings.trials
        ):
            variant = self._study.ask()
            if variant is None:
                return
            self._asked += 1
            if self.run.builds is None:
                self._ready.append(variant)
            else:
                if self.run.builds.request(self.task, variant):
                    self._ordered.add(variant)
                self._waiting.append(variant)

    def explore(self, deadline: float) -> None:
        """Try variants until all trials are made, none is left, or the next would not end by `deadline`.

        Where the run has time left, the first few are tried even then, and what has begun may end a little later.
        """
        late = min(self.run.deadline, deadline + OVERRUN_S)
        self.run.timed[self.task] = self.timed
        if self.run.executor.clock() >= late:
            return
        self.run.listener.started(self.task, len(self._valid), self.result.reused)
        self.look_around()
        self.ask_ahead()
        if self.has_work:
            self._prepare(late)
        while not self._is_over:
            outcome = self._finish()
            if isinstance(outcome, Failed):
                # It may take long until another process is there.
                self._store(outcome)
                outcome = None
            end = deadline if len(self.timed) >= FEW_TIMED else late
            self._is_over |= self.run.executor.clock() + self.costs.trial_s >= end
            try:
                if not self._is_over:
                    self._collect(0.0)
                    self._start_next(late)
            finally:
                # While the next one is measured; what is finished is kept whatever else goes wrong.
                if outcome is not None:
                    self._store(outcome)
            if self._is_over:
                break
            self.ask_ahead()
            if self._pending is None and not self._ready and not self._proven:
                if not self._waiting:
                    break
                self._collect(min(POLL_S, end - self.run.executor.clock()))
        if self.run.builds is not None:
            self.run.builds.cancel_queued()

    def disqualify(self, failed: Failed) -> None:
        """Store that a variant which was timed has failed since: it counts as that, and is no new trial."""
        self._record(failed)
        if self.timed.pop(failed.variant, None) is not None:
            self.result.outcomes["timed"] -= 1
        self.unfit.add(failed.variant)
        self.result.count(failed)

    @property
    def _trials(self) -> int:
        """How many trials were made or will be, of those asked for so far."""
        return self.result.reused + self._asked - self.result.skipped

    def _prepare(self, deadline: float) -> None:
        """Have the worker started and all made that measurements share, while the first variants are compiled."""
        executor, job = self.run.executor, PrepareJob(self.task, self.run.settings.seed, self.run.regime)
        if not executor.worker.ready(deadline - executor.clock()):
            self._is_over = True
            return
        try:
            self.costs.prepared_s = executor.worker.submit(job, self.costs.limit_s, deadline).result()
        except JobError:
            # The measurements will fail for the same reason, and each says so.
            return
        self.result.measuring_seconds += self.costs.prepared_s

    def _collect(self, wait_s: float) -> None:
        """Sort what is compiled into what the GPU can launch, and what is an outcome already."""
        builds = self.run.builds
        if builds is None or not self._waiting:
            return
        builds.collect(wait_s)
        waiting, self._waiting = self._waiting, []
        for variant in waiting:
            compiled = builds.result(self.task, variant)
            self.result.compiles += compiled is not None and variant in self._ordered
            self.result.shared += compiled is not None and variant not in self._ordered
            match compiled:
                case None:
                    self._waiting.append(variant)
                case Failed() as failed:
                    self._store(failed)
                case StaticFacts(shared_bytes=shared) if shared > self.run.gpu.shared_memory_bytes:
                    self._store(Skipped(variant, EXCEEDS_SHARED_MEMORY))
                case StaticFacts():
                    self._ready.append(variant)

    def _start_next(self, deadline: float) -> None:
        """Have the next variant measured, if there is one."""
        variant = self._next()
        if variant is None:
            return
        executor, settings = self.run.executor, self.run.settings
        if not executor.worker.ready(deadline - executor.clock()):
            self._is_over = True
            return
        samples = min(settings.samples, INTERPRETED_SAMPLES) if self.run.gpu.is_interpreter else settings.samples
        facts = self._facts(variant)
        job = MeasureJob(self.task, variant, samples, settings.seed, self.run.regime, self._best_ms,
                         "" if facts is None else facts.code_hash)
        self._pending = PendingMeasurement(executor, job, self.costs.limit_s, deadline)

    def _next(self) -> Variant | None:
        """The next of those that are compiled: one that was asked for, or else one that did well elsewhere."""
        if self._ready:
            return self._ready.popleft()
        while self._proven:
            # One that was tried or asked for already leaves its trial to the sampler.
            if self._study.claim(variant := self._proven.popleft()):
                self._asked += 1
                self.result.shared += 1
                return variant
        return None

    def _finish(self) -> Outcome | None:
        """The outcome of the measurement under way, if it is its variant's."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        try:
            return pending.finish(self.costs)
        except JobError:
            self._is_over = True
            return None
        finally:
            self.result.measuring_seconds += pending.busy_s

    def _facts(self, variant: Variant) -> StaticFacts | None:
        compiled = None if self.run.builds is None else self.run.builds.result(self.task, variant)
        return compiled if isinstance(compiled, StaticFacts) else None

    def _store(self, outcome: Outcome) -> None:
        self._record(outcome)
        self.result.tried += not isinstance(outcome, Skipped)
        self.result.repeated += isinstance(outcome, Timed) and outcome.same_as is not None
        self._note(outcome)
        self.run.listener.tried(self._progress(outcome))

    def _record(self, outcome: Outcome) -> None:
        run, variant = self.run, outcome.variant
        environment = run.executor.environment_of(variant.template, run.gpu)
        run.store.add_trial(TrialRecord(run.run_id, self.setting, environment, outcome, self._facts(variant)))

    def _note(self, outcome: Outcome) -> None:
        self._noted.append(outcome)
        if "_study" in self.__dict__:
            self._study.tell(outcome)
        self.result.count(outcome)
        if isinstance(outcome, Timed):
            self.timed[outcome.variant] = outcome.timing
            ms = outcome.timing.median_ms
            self._best_ms = ms if self._best_ms is None else min(ms, self._best_ms)
            if outcome.same_as is not None:
                self.same_as[outcome.variant] = outcome.same_as
        else:
            self.unfit.add(outcome.variant)

    def _progress(self, outcome: Outcome) -> Progress:
        default = self.timed.get(default_variant(self.task.spec, self.task.batch, self.task.page_size))
        return Progress(
            task=self.task,
            outcome=outcome,
            done=self.result.outcomes.total() - self.result.skipped,
            planned=self.run.settings.trials,
            best_ms=self._best_ms,
            default_ms=None if default is None else default.median_ms,
            outcomes=self.result.outcomes.copy(),
            seconds_left=self.run.seconds_left,
        )
