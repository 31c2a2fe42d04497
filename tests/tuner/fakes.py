"""An executor without processes, for the tests of the search: its time passes only when it works."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attention_tuner.db.store import Store
from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.default import default_variant
from attention_tuner.kernel_templates.gpu import TARGETS, Gpu
from attention_tuner.kernel_templates.outcome import Check, Environment, Failed, StaticFacts, Timed, Timing, Wrong
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.tuner.jobs import CompileJob, MeasureJob, RaceJob
from attention_tuner.tuner.run import Executor, Listener, Run, Settings
from attention_tuner.tuner.task import Task

GPU = TARGETS["sm_90"]
SPEC = AttentionSpec(8, 2, 64)
TASK = Task(SPEC, Batch.parse("2x1@48"), 16)
OTHER = Task(SPEC, Batch.parse("1x4@44"), 32)
DEFAULT = default_variant(SPEC, TASK.batch, TASK.page_size)
FACTS = StaticFacts(shared_bytes=1024, registers=64, stack_bytes=0)


def landscape(variant: Variant) -> float:
    """Milliseconds of a variant: template fused is the faster, and fewer warps are."""
    ms = 1 + 0.2 * abs(math.log2(variant.number("block_n") / 64)) + 0.1 * variant.number("num_warps")
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
        self.measured: list[Variant] = []
        self.races: list[RaceJob] = []
        self.noise = 0.0
        self.closed = False
        self.fail_next_race: BaseException | None = None
        self._draw = random.Random(0)

    def run(self, job: Any, timeout_s: float) -> Any:
        if isinstance(job, RaceJob):
            return self._race(job)
        assert isinstance(job, MeasureJob)
        self.measured.append(job.variant)
        fault = self.faults(job.variant)
        if fault == "interrupt":
            raise KeyboardInterrupt
        self.clock.spend(timeout_s if fault == "hang" else self.cost)
        if fault == "wrong":
            return Wrong(job.variant, Check(7.0))
        if fault:
            return Failed(job.variant, "time", fault)
        return Timed(job.variant, Check(0.5), self._timing(job.variant, job.samples, job.regime))

    def close(self) -> None:
        self.closed = True

    def _race(self, job: RaceJob) -> dict[Variant, Timing | Failed]:
        self.races.append(job)
        if self.fail_next_race is not None:
            raise self.fail_next_race
        times = {v: self._timing(v, job.rounds, job.regime) for v in job.variants}
        self.clock.spend(sum(sum(t.samples_ms) for t in times.values()) / 1e3)
        return dict(times)

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
        self.closed = False

    @property
    def pending(self) -> int:
        return len(self.queue)

    def submit(self, job: CompileJob) -> None:
        self.submitted.append(job)
        begin = self.clock()
        if len(self.queue) >= self.processes:
            begin = max(begin, self.queue[-self.processes][1])
        self.queue.append((job, begin + self.cost))

    def results(self, wait_s: float) -> list[tuple[Variant, StaticFacts | Failed]]:
        if self.queue and wait_s:
            self.clock.spend(min(wait_s, max(0.0, self.queue[0][1] - self.clock())))
        done = [(job, at) for job, at in self.queue if at <= self.clock()]
        self.queue = [entry for entry in self.queue if entry not in done]
        return [(job.variant, self.facts(job.variant)) for job, _ in done]

    def forget(self) -> None:
        self.queue.clear()

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
        deadline = self.clock() + seconds
        run_id = self.store.start_run({})
        return Run(gpu, self.store, settings, self.executor, listener or Listener(), run_id, deadline)
