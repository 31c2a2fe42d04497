"""The search for one task: variants are asked for, compiled ahead, checked and timed, and every outcome is stored."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import replace

from ..db.records import Setting, TrialRecord
from ..kernel_templates.batch import BatchBucket
from ..kernel_templates.default import default_variant
from ..kernel_templates.heuristic import candidates
from ..kernel_templates.outcome import Failed, Outcome, Skipped, StaticFacts, Timed, Timing
from ..kernel_templates.template import template_of, why_invalid
from ..kernel_templates.variant import Variant
from ..search_spaces.space import survey
from .forecast import LAUNCHES_PER_TRIAL, interpreted_seconds
from .jobs import CompileJob, MeasureJob
from .run import Progress, Run, TaskResult
from .study import Study
from .task import Task

# Wall time of one job: the first of a task also imports torch and computes the reference.
JOB_LIMIT_S = 120.0
# Samples that the interpreter takes for each trial: each is a launch of a tenth of a second or more.
INTERPRETED_SAMPLES = 2
# The interpreter's speed is only estimated.
INTERPRETER_MARGIN = 10
# Winners of the nearest tuned shapes that are tried before the sampler chooses.
NEIGHBOURS = 3
# How many of the last trials the cost of the next is judged by.
RECENT = 5
# How long to wait for a compile before looking at the clock again.
POLL_S = 0.5
EXCEEDS_SHARED_MEMORY = "its shared memory exceeds the GPU's"


class Search:
    """The search over the variants of one task, with what stored trials already tell; `result` counts it all."""

    def __init__(self, task: Task, run: Run) -> None:
        self.task = task
        self.run = run
        self.setting = Setting(task.spec, task.batch, task.page_size, run.gpu, run.regime)
        self.result = TaskResult(task)
        self.timed: dict[Variant, Timing] = {}
        self._valid = survey(task.spec, BatchBucket.of(task.batch), task.page_size, run.gpu).valid
        self._first = self._first_variants()
        self._study = Study(self._valid, self._first, run.settings.sampler, run.settings.seed)
        self._asked = 0
        self._ready: deque[Variant] = deque()
        # By the key of their code: what it compiled to, and the variants that wait until it has.
        self._compiled: dict[str, StaticFacts | Failed] = {}
        self._waiting: dict[str, list[Variant]] = {}
        self._costs: deque[float] = deque(maxlen=RECENT)

    @property
    def trial_seconds(self) -> float:
        """What one of the last trials took in the worker, 0 while there is none."""
        return statistics.median(self._costs) if self._costs else 0.0

    @property
    def baseline(self) -> Variant | None:
        """The timed variant that the others are held against: the default, or else the first that was to be tried."""
        return next((variant for variant in (*self._first, *self.timed) if variant in self.timed), None)

    def reuse(self) -> None:
        """Take over the stored trials that still hold."""
        run, result = self.run, self.result
        for record in run.store.reusable_trials(self.setting, run.executor.environment_of):
            self._note(record.outcome)
            result.reused += 1
        result.outdated = run.store.outdated_trials(self.setting, run.executor.environment_of)
        run.listener.started(self.task, len(self._valid), result.reused)

    def explore(self, deadline: float) -> None:
        """Try variants until all trials are made, none is left, or the next would not end by `deadline`."""
        clock = self.run.executor.clock
        while clock() + self.trial_seconds < deadline:
            self._ask_ahead()
            if self._waiting:
                self._collect(0.0 if self._ready else min(POLL_S, deadline - clock()))
            if self._ready:
                self._measure(self._ready.popleft(), deadline)
            elif not self._waiting:
                break
        if self.run.executor.pool is not None:
            self.run.executor.pool.forget()

    def _first_variants(self) -> list[Variant]:
        task, gpu = self.task, self.run.gpu
        bucket = BatchBucket.of(task.batch)
        default = default_variant(task.spec, task.batch, task.page_size)
        near = self.run.store.best_configs(spec=task.spec, page_size=task.page_size, gpu_name=gpu.name)
        near.sort(key=lambda config: config.shape.bucket.distance(bucket))
        runnable = [c.variant for c in near if why_invalid(c.variant, task.spec, gpu) is None]
        winners = (template_of(variant).settle(variant, bucket) for variant in runnable[:NEIGHBOURS])
        valid = frozenset(self._valid)
        likely = dict.fromkeys((*winners, *candidates(task.spec, bucket, task.page_size, gpu)))
        # Through the interpreter most of them are the same variant again.
        found = [variant for variant in likely if variant in valid]
        return [default, *found] if why_invalid(default, task.spec, gpu) is None else found

    def _ask_ahead(self) -> None:
        """Ask until enough variants are on their way, or all trials; one that is skipped does not count as a trial."""
        settings, pool = self.run.settings, self.run.executor.pool
        # Where nothing is compiled ahead, asking ahead would only keep the sampler from learning.
        ahead = 1 if pool is None else settings.ahead
        while (
            len(self._ready) + sum(map(len, self._waiting.values())) < ahead
            and self.result.reused + self._asked - self.result.skipped < settings.trials
        ):
            variant = self._study.ask()
            if variant is None:
                return
            self._asked += 1
            self._compile(variant)

    def _compile(self, variant: Variant) -> None:
        pool, task = self.run.executor.pool, self.task
        if pool is None:
            self._ready.append(variant)
            return
        code = template_of(variant).code_key(variant)
        if code in self._compiled:
            self._sort_out(variant, self._compiled[code])
        elif code in self._waiting:
            self._waiting[code].append(variant)
        else:
            self._waiting[code] = [variant]
            pool.submit(CompileJob(variant, task.spec, self.run.gpu, task.batch))

    def _collect(self, wait_s: float) -> None:
        pool, clock = self.run.executor.pool, self.run.executor.clock
        assert pool is not None
        was_full, start = pool.pending >= pool.processes, clock()
        for variant, compiled in pool.results(wait_s):
            code = template_of(variant).code_key(variant)
            self._compiled[code] = compiled
            for waiting in self._waiting.pop(code):
                self._sort_out(waiting, compiled)
        self.result.compiling_seconds += (clock() - start) * was_full

    def _sort_out(self, variant: Variant, compiled: StaticFacts | Failed) -> None:
        """Leave to the GPU only what can be launched there."""
        if isinstance(compiled, Failed):
            self._store(replace(compiled, variant=variant))
        elif compiled.shared_bytes > self.run.gpu.shared_memory_bytes:
            self._store(Skipped(variant, EXCEEDS_SHARED_MEMORY))
        else:
            self._ready.append(variant)

    def _measure(self, variant: Variant, deadline: float) -> None:
        executor, settings = self.run.executor, self.run.settings
        pool, start = executor.pool, executor.clock()
        was_full = pool is not None and pool.pending >= pool.processes
        # A budget that runs out must not be exceeded by a job that hangs.
        limit_s = min(self._job_limit_s(), deadline - start)
        samples = min(settings.samples, INTERPRETED_SAMPLES) if self.run.gpu.is_interpreter else settings.samples
        job = MeasureJob(self.task, variant, samples, settings.seed, self.run.regime)
        outcome = executor.worker.run(job, limit_s)
        seconds = executor.clock() - start
        self.result.measuring_seconds += seconds
        self.result.compiling_seconds += seconds * was_full
        self._costs.append(seconds)
        is_cut_short = isinstance(outcome, Failed) and limit_s < self._job_limit_s() and seconds >= limit_s
        # A variant is not to blame for a budget that ran out.
        if not is_cut_short:
            self._store(outcome)

    def _job_limit_s(self) -> float:
        if not self.run.gpu.is_interpreter:
            return JOB_LIMIT_S
        return JOB_LIMIT_S + INTERPRETER_MARGIN * LAUNCHES_PER_TRIAL * interpreted_seconds(self.task)

    def _store(self, outcome: Outcome) -> None:
        run, variant = self.run, outcome.variant
        compiled = self._compiled.get(template_of(variant).code_key(variant))
        facts = compiled if isinstance(compiled, StaticFacts) else None
        environment = run.executor.environment_of(variant.template, run.gpu)
        run.store.add_trial(TrialRecord(run.run_id, self.setting, environment, outcome, facts))
        self.result.tried += not isinstance(outcome, Skipped)
        self._note(outcome)
        run.listener.tried(self._progress(outcome))

    def _note(self, outcome: Outcome) -> None:
        self._study.tell(outcome)
        self.result.count(outcome)
        if isinstance(outcome, Timed):
            self.timed[outcome.variant] = outcome.timing

    def _progress(self, outcome: Outcome) -> Progress:
        times = {variant: timing.median_ms for variant, timing in self.timed.items()}
        baseline = self.baseline
        return Progress(
            task=self.task,
            outcome=outcome,
            done=self.result.outcomes.total() - self.result.skipped,
            planned=self.run.settings.trials,
            best_ms=min(times.values(), default=None),
            default_ms=times[baseline] if baseline is not None else None,
            outcomes=self.result.outcomes.copy(),
            seconds_left=self.run.seconds_left,
        )
