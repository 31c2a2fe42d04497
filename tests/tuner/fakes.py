"""An executor without processes, for the tests of the search: its time passes only when it works."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from attention_tuner.db.store import Store
from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.gpu import TARGETS, Gpu
from attention_tuner.kernel_templates.heuristic import default_variant
from attention_tuner.kernel_templates.outcome import (
    Check,
    Environment,
    Failed,
    JobError,
    StaticFacts,
    Timed,
    Timing,
    Wrong,
)
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.task import Task
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.tuner.measure.jobs import MeasureJob, PrepareJob, RaceJob, RaceResult
from attention_tuner.tuner.processes.compile import Build, Builds, CompileJob
from attention_tuner.tuner.run import Executor, History, Run, regime_on
from attention_tuner.tuner.settings import Budget, Listener, Settings

GPU = TARGETS["sm_90"]
SPEC = AttentionSpec(8, 2, 64)
TASK = Task(SPEC, Batch.parse("2x1@48"), 16)
OTHER = Task(SPEC, Batch.parse("1x4@44"), 32)
DEFAULT = default_variant(SPEC, TASK.batch, TASK.page_size)
FACTS = StaticFacts(shared_bytes=1024, registers=64, stack_bytes=0)
FIXED_WARPS = 9


def warps(variant: Variant) -> int:
    """The warps of a variant; where its template fixes them, a number that no variant of another template has."""
    return variant.number("num_warps") if "num_warps" in variant.as_dict() else FIXED_WARPS


def landscape(variant: Variant) -> float:
    """Milliseconds of a variant: template unified is the slowest, and fewer warps are faster."""
    ms = 1 + 0.2 * abs(math.log2(variant.number("block_n") / 64)) + 0.1 * warps(variant)
    return ms * (2 if variant.template == "unified" else 1)


class Clock:
    """Seconds that pass only when they are spent."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


class FakeWorker:
    """Times variants by `ms`, each trial taking `cost` seconds; `faults` say what comes of a variant instead."""

    def __init__(self, clock: Clock, ms: Callable[[Variant], float] = landscape, cost: float = 0.5) -> None:
        self.clock, self.ms, self.cost = clock, ms, cost
        self.faults: Callable[[Variant], str] = lambda variant: ""
        self.race_faults: Callable[[Variant], str] = lambda variant: ""
        self.measured: list[Variant] = []
        self.races: list[RaceJob] = []
        self.noise = 0.0
        # What all variants with as many warps are a twin of.
        self.twin_of: Variant | None = None
        self.jobs: list[Any] = []
        self.freed: list[int] = []
        self.starts = 0
        self.start_cost = 0.0
        # Seconds of each job for waiting for the GPU, and of a task's first job for preparing what all share.
        self.wait_cost = 0.0
        self.prepare_cost = 0.0
        self.busy_s = 0.0
        self._prepared: set[Task] = set()
        self.sentinels: tuple[Any, ...] = ()
        self.closed = False
        self.fail_next_race: BaseException | None = None
        self._draw = random.Random(0)

    def run(self, job: Any, timeout_s: float, deadline: float = math.inf) -> Any:
        self.jobs.append(job)
        prepare_s = 0.0 if job.task in self._prepared else self.prepare_cost
        self._prepared.add(job.task)
        self.clock.spend(prepare_s)
        if isinstance(job, RaceJob):
            return self._race(job)
        if isinstance(job, PrepareJob):
            return prepare_s
        assert isinstance(job, MeasureJob)
        self.measured.append(job.variant)
        fault = self.faults(job.variant)
        if fault == "interrupt":
            raise KeyboardInterrupt
        is_twin = not fault and self._twin(job.variant) is not None
        self.clock.spend(timeout_s if fault == "hang" else self.cost / 100 if is_twin else self.cost)
        if fault == "wrong":
            return Wrong(job.variant, Check(7.0))
        if fault:
            return Failed(job.variant, "time", fault)
        twin = self._twin(job.variant)
        return Timed(job.variant, Check(0.5), self._timing(twin or job.variant, job.samples, job.regime), twin)

    def submit(self, job: Any, timeout_s: float, deadline: float = math.inf) -> Future[Any]:
        future: Future[Any] = Future()
        self.clock.spend(self.wait_cost)
        start = self.clock()
        try:
            future.set_result(self.run(job, min(timeout_s, deadline - self.clock()), deadline))
        except JobError as error:
            future.set_exception(error)
        finally:
            self.busy_s += self.clock() - start
        return future

    def start(self) -> None:
        self.starts += 1

    def ready(self, limit_s: float) -> bool:
        self.clock.spend(min(self.start_cost, limit_s))
        is_ready = self.start_cost <= limit_s
        self.start_cost = 0.0
        return is_ready

    def free(self) -> None:
        self.freed.append(len(self.jobs))

    def close(self) -> None:
        self.closed = True

    def _twin(self, variant: Variant) -> Variant | None:
        twin = self.twin_of
        is_alike = twin is not None and warps(variant) == warps(twin)
        return twin if is_alike and variant != twin else None

    def _race(self, job: RaceJob) -> RaceResult:
        self.races.append(job)
        if self.fail_next_race is not None:
            raise self.fail_next_race
        lost = {v: Failed(v, "time", fault) for v in job.variants if (fault := self.race_faults(v))}
        times = {v: self._timing(v, job.rounds, job.regime) for v in job.variants if v not in lost}
        self.clock.spend(sum(sum(t.samples_ms) for t in times.values()) / 1e3)
        return RaceResult({**lost, **times}, *self.sentinels)

    def _timing(self, variant: Variant, samples: int, regime: Any) -> Timing:
        ms = self.ms(variant)
        return Timing(tuple(ms * math.exp(self._draw.gauss(0, self.noise)) for _ in range(samples)), regime)


class FakePool:
    """Compiles `processes` at once, in `cost` seconds of waiting."""

    def __init__(self, clock: Clock, processes: int = 4, cost: float = 0.2) -> None:
        self.clock, self.processes, self.cost = clock, processes, cost
        self.submitted: list[CompileJob] = []
        self.queue: list[tuple[CompileJob, float]] = []
        self.facts: Callable[[Variant], StaticFacts | Failed] = lambda variant: FACTS
        self.started_for: list[int] = []
        self.closed = False
        self._full: list[tuple[float, float]] = []
        self._free_at = [clock()] * processes

    @property
    def full_seconds(self) -> float:
        """The time up to which all are busy, as each job was given to the one that was free first."""
        return sum(max(0.0, min(end, self.clock()) - start) for start, end in self._full)

    def start(self, jobs: int) -> None:
        self.started_for.append(jobs)

    def submit(self, job: CompileJob) -> None:
        self.submitted.append(job)
        now = self.clock()
        self._free_at.sort()
        begin = max(now, self._free_at[0])
        self._free_at[0] = begin + self.cost
        self.queue.append((job, begin + self.cost))
        start, end = max(now, self._full[-1][1] if self._full else now), min(self._free_at)
        if end > start:
            self._full.append((start, end))

    def results(self, wait_s: float) -> list[Build]:
        if self.queue and wait_s:
            self.clock.spend(min(wait_s, max(0.0, self.queue[0][1] - self.clock())))
        done = [(job, at) for job, at in self.queue if at <= self.clock()]
        self.queue = [entry for entry in self.queue if entry not in done]
        return [Build(job, self.facts(job.variant), self.cost) for job, _ in done]

    def cancel_queued(self) -> list[CompileJob]:
        waiting = [(job, at) for job, at in self.queue if at - self.cost > self.clock()]
        self.queue = [entry for entry in self.queue if entry not in waiting]
        return [job for job, _ in waiting]

    def close(self) -> None:
        self.closed = True


def environment(template: str, gpu: Gpu) -> Environment:
    return Environment("hash", "3.9", "2.13", "")


class Bench:
    """A store, a clock, a worker and a pool for one test."""

    def __init__(self, folder: Path, ms: Callable[[Variant], float] = landscape, cost: float = 0.5) -> None:
        self.store = Store.open(folder / "tuner.db")
        self.restart(ms, cost)

    def restart(self, ms: Callable[[Variant], float] = landscape, cost: float = 0.5) -> None:
        """Processes anew, over the same store."""
        self.clock = Clock()
        self.worker = FakeWorker(self.clock, ms, cost)
        self.pool = FakePool(self.clock)
        self.executor = Executor(self.worker, self.pool, environment, self.clock)

    def run(
        self, settings: Settings, gpu: Gpu = GPU, listener: Listener | None = None, seconds: float = math.inf
    ) -> Run:
        run_id = self.store.start_run({})
        builds = self.executor.pool and Builds(self.executor.pool, gpu)
        history = History(self.store, gpu, regime_on(gpu, settings), self.executor.environment_of)
        budget = Budget(self.clock() + seconds)
        return Run(gpu, self.store, settings, self.executor, listener or Listener(), run_id, history, budget, builds)
