"""The search for one task: variants are chosen, compiled ahead, checked and timed, and every outcome is stored."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from ..db.records import TrialRecord
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

# Samples of a trial through the interpreter, which takes a tenth of a second or more for each.
INTERPRETED_SAMPLES = 2
# Most of the sampler's trials that go to variants proven on other batches of the run. These are compiled already, and
# keep the GPU busy while the sampler's choices are compiled.
PROVEN_SHARE = 0.75
# A search times so many variants even if its share of the run's time is over. Cutting off the job under way costs the
# process, and starting another takes longer than most jobs.
FEWEST_TIMED = 3
# Seconds to wait for a compile before looking at the clock again.
POLL_S = 0.5
EXCEEDS_SHARED_MEMORY = "its shared memory exceeds the GPU's"


class PendingMeasurement:
    """Measurement of a variant that is under way, while the search chooses others and has them compiled.

    The job begins when this is made. It may take `limit_s` seconds, and ends by `deadline`.
    """

    def __init__(self, executor: Executor, job: MeasureJob, limit_s: float, deadline: float) -> None:
        self._executor = executor
        self._deadline = deadline
        self._start, self._busy_s = executor.clock(), executor.worker.busy_s
        self._end = 0.0
        self._future = executor.worker.submit(job, limit_s, deadline)
        self._future.add_done_callback(self._note_end)

    @property
    def busy_s(self) -> float:
        """Seconds that the worker has been busy since the job began."""
        return self._executor.worker.busy_s - self._busy_s

    def finish(self, costs: Costs) -> Outcome | None:
        """Wait for the outcome and note in `costs` what it took. Returns None if the budget ended before the job.

        Raises `JobError` if the job did not get the GPU in time.
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
    """Search over the variants of one task, stored trials included.

    Attributes:
    - `result`: counts of all trials
    - `timed`: times of the variants that are right
    - `unfit`: variants known to have no time
    - `same_as`: maps a variant to the one with the same code and launch whose time it took over in this run
    - `costs`: what the trials took
    - `newest`: when the latest stored trial was made, as text
    - `neighbours`: winners of the nearest tuned batches

    With `only`, these variants are tried in their order and no others.
    """

    def __init__(self, task: Task, run: Run, only: Sequence[Variant] | None = None) -> None:
        self.task = task
        self.run = run
        self.result = TaskResult(task)
        self.timed: dict[Variant, Timing] = {}
        self.same_as: dict[Variant, Variant] = {}
        self.unfit: set[Variant] = set()
        self.costs = Costs(task, run.gpu.is_interpreter)
        self.newest = ""
        self.neighbours = neighbours(task, run)
        self._only = only
        self._noted: list[Outcome] = []
        # Compiled for other batches of the run; tried while there is nothing else to measure.
        self._proven: deque[Variant] = deque()
        self._chosen = 0
        # Chosen variants that the GPU can launch, and those that are still being compiled.
        self._ready: deque[Variant] = deque()
        self._compiling: list[Variant] = []
        # Variants whose code is compiled for this search.
        self._ordered: set[Variant] = set()
        self._pending: PendingMeasurement | None = None
        self._is_over = False
        self._best_ms: float | None = None

    @functools.cached_property
    def _valid(self) -> Sequence[Variant]:
        """Variants that may be tried. They are listed when they are first needed, for that may take a second."""
        if self._only is not None:
            return tuple(self._only)
        task, recording = self.task, self.run.executor.recording
        return recording.variants(task) if recording else survey(
            task.spec, BatchBucket.of(task.batch), task.page_size, self.run.gpu).valid

    @functools.cached_property
    def _first(self) -> tuple[Variant, ...]:
        """Variants that are tried first, in their order."""
        if self._only is not None:
            return tuple(self._only)
        return first_variants(self.task, self.run.gpu, self.neighbours, frozenset(self._valid))

    @functools.cached_property
    def _study(self) -> Study:
        """Chooses the other variants; it is told all outcomes."""
        study = Study(self._valid, self._first, self.run.settings.sampler, self.run.settings.seed)
        for outcome in self._noted:
            study.tell(outcome)
        return study

    @property
    def baseline(self) -> Variant | None:
        """Timed variant that the others are compared with: the default, or else the first in the order of trials."""
        if not self.timed:
            return None
        return next((variant for variant in (*self._first, *self.timed) if variant in self.timed), None)

    @property
    def has_work(self) -> bool:
        """True if there is a variant to measure, compiled or not."""
        return bool(self._ready or self._compiling or self._proven)

    def reuse(self) -> None:
        """Take over the stored trials that still hold."""
        for record in self.run.history.trials(self.task):
            self._note(record.outcome)
            self.newest = max(self.newest, record.measured_at)
            self.result.reused += 1
        self.result.outdated = self.run.history.outdated(self.task)

    def learn(self) -> None:
        """Take in what is known of other batches by now, and leave some trials to variants proven there.

        Called before the first variants are chosen, so that these trials are left, and again when the search begins.
        """
        known, self.neighbours = self.neighbours, neighbours(self.task, self.run)
        self._study.prefer([variant for variant in self.neighbours if variant not in known])
        self._study.expect(log_ratios(self.task, self.run))
        made = self.result.reused - self.result.skipped
        to_come = sum(variant not in self.timed and variant not in self.unfit for variant in self._first)
        share = int(PROVEN_SHARE * (self.run.settings.trials - made - to_come))
        left = self.run.settings.trials - self._trials
        self._proven = deque(proven(self.task, self.run)[: max(0, min(share, left))])

    def choose_ahead(self) -> None:
        """Choose variants until enough are on their way or all trials are used. A skipped variant is no trial."""
        while (
            len(self._ready) + len(self._compiling) + (self._pending is not None)
            < (self.run.most_ahead if self._study.has_first else self.run.ahead)
            and self._trials + len(self._proven) < self.run.settings.trials
        ):
            variant = self._study.ask()
            if variant is None:
                return
            self._chosen += 1
            if self.run.builds is None:
                self._ready.append(variant)
            else:
                if self.run.builds.request(self.task, variant):
                    self._ordered.add(variant)
                self._compiling.append(variant)

    def try_variants(self, end: float) -> None:
        """Try variants until all trials are made, no variant is left, or the next trial would not finish by `end`.

        While the run has time, the first few are tried even after `end`, and the trial under way may finish later. If
        final races have a process of their own, the worker then gives back its memory, for there may not be room for
        both.
        """
        overrun_end = self.run.budget.overrun_end(end)
        self.run.timed[self.task] = self.timed
        if self.run.executor.clock() < overrun_end:
            self.run.listener.started(self.task, len(self._valid), self.result.reused)
            self.learn()
            self.choose_ahead()
            if self.has_work:
                self._prepare(overrun_end)
            self._try_each(end, overrun_end)
            if self.run.builds is not None:
                self.run.builds.cancel_queued()
        if self.run.executor.racer is not None:
            self.run.executor.worker.free()

    def mark_failed(self, failed: Failed) -> None:
        """Store that a variant that was timed has failed since. It counts as failed, and is no new trial."""
        self._record(failed)
        if self.timed.pop(failed.variant, None) is not None:
            self.result.outcomes["timed"] -= 1
        self.unfit.add(failed.variant)
        self.result.count(failed)

    @property
    def _trials(self) -> int:
        """Number of trials that were made or will be, of the variants chosen so far."""
        return self.result.reused + self._chosen - self.result.skipped

    def _try_each(self, search_end: float, overrun_end: float) -> None:
        while not self._is_over:
            outcome = self._finish()
            if isinstance(outcome, Failed):
                # Stored at once: it may take long until another process is there.
                self._store(outcome)
                outcome = None
            end = search_end if len(self.timed) >= FEWEST_TIMED else overrun_end
            self._is_over |= self.run.executor.clock() + self.costs.trial_s >= end
            try:
                if not self._is_over:
                    self._collect(0.0)
                    self._start_next(overrun_end)
            finally:
                # Stored while the next one is measured, and even if starting that one fails.
                if outcome is not None:
                    self._store(outcome)
            if self._is_over:
                return
            self.choose_ahead()
            if self._pending is None and not self._ready and not self._proven:
                if not self._compiling:
                    return
                self._collect(min(POLL_S, end - self.run.executor.clock()))

    def _prepare(self, deadline: float) -> None:
        """Start the worker and prepare what all measurements share, while the first variants are compiled."""
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
        """Sort compiled variants into those that the GPU can launch and those that have an outcome already."""
        builds = self.run.builds
        if builds is None or not self._compiling:
            return
        builds.collect(wait_s)
        compiling, self._compiling = self._compiling, []
        for variant in compiling:
            compiled = builds.result(self.task, variant)
            self.result.compiles += compiled is not None and variant in self._ordered
            self.result.shared += compiled is not None and variant not in self._ordered
            match compiled:
                case None:
                    self._compiling.append(variant)
                case Failed() as failed:
                    self._store(failed)
                case StaticFacts(shared_bytes=shared) if shared > self.run.gpu.shared_memory_bytes:
                    self._store(Skipped(variant, EXCEEDS_SHARED_MEMORY))
                case StaticFacts():
                    self._ready.append(variant)

    def _start_next(self, deadline: float) -> None:
        """Start measuring the next variant, if there is one."""
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
        """Next variant to measure: a chosen one that is compiled, or else a proven one."""
        if self._ready:
            return self._ready.popleft()
        while self._proven:
            # A variant that was tried or chosen already leaves its trial to the sampler.
            if self._study.claim(variant := self._proven.popleft()):
                self._chosen += 1
                self.result.shared += 1
                return variant
        return None

    def _finish(self) -> Outcome | None:
        """Wait for the measurement under way. Returns None if there is none, or no outcome to blame its variant for."""
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
        record = TrialRecord(run.run_id, run.history.setting(self.task), environment, outcome, self._facts(variant))
        run.history.add_trial(self.task, record)

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


def search_only(task: Task, run: Run, variants: Sequence[Variant], end: float) -> Search:
    """Try `variants` on a task by `end`, beside the trials that are stored."""
    trials = len(run.history.trials(task)) + len(variants)
    search = Search(task, replace(run, settings=replace(run.settings, trials=trials)), variants)
    search.reuse()
    search.try_variants(end)
    return search
