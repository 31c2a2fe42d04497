"""Replay: search recorded outcomes as `tune` searches a GPU, in seconds and without one.

An executor answers jobs from a recording, on a clock that advances only while a result is awaited.
"""

from __future__ import annotations

import heapq
import math
import random
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from ..db.store import Store
from ..kernel_templates.gpu import Gpu
from ..kernel_templates.outcome import (
    Environment,
    Failed,
    JobError,
    Outcome,
    Skipped,
    StaticFacts,
    Timed,
    Timing,
    Wrong,
)
from ..kernel_templates.task import Task
from ..kernel_templates.variant import Variant
from .measure.blocks import expected_s
from .measure.jobs import MeasureJob, PrepareJob, RaceJob, RaceResult
from .processes.child import Job
from .processes.compile import Build, CompileJob
from .recording import Recorded, Recording
from .run import Executor
from .settings import Listener, Progress, Settings, TaskResult
from .tune import tune

R = TypeVar("R")

# A variant at most this many times as slow as the optimum counts as equally good.
AS_GOOD = 1.02
# The compile processes of a host with 16 cores.
PROCESSES = 14
NOT_RECORDED = "it is not in the recording"


class Clock:
    """A simulated clock: it advances only while a result is awaited."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        """The seconds so far."""
        return self._now

    def wait_until(self, moment: float) -> None:
        """Advance to `moment`, unless that has passed."""
        self._now = max(self._now, moment)


class Awaited(Future[R]):
    """A future that is done at the moment `end`; asking for its result advances `clock` to it.

    `answer` gives the result, or raises the `JobError` of a job without one.
    """

    def __init__(self, clock: Clock, end: float, answer: Callable[[], R]) -> None:
        super().__init__()
        self._clock, self._end, self._answer = clock, end, answer

    def result(self, timeout: float | None = None) -> R:
        """Advance the clock to the end of the job, and return its result or raise its `JobError`."""
        if not self.done():
            self._clock.wait_until(self._end)
            try:
                self.set_result(self._answer())
            except JobError as error:
                self.set_exception(error)
        return super().result(timeout)


class RecordedWorker:
    """Answers a measurement with the recorded outcome, after the recorded seconds; starting and preparing take none.

    The samples of a race are drawn from the recorded ones.
    """

    def __init__(self, recording: Recording, clock: Clock) -> None:
        self.busy_s = 0.0
        self._recording = recording
        self._clock = clock
        self._free_at = 0.0

    def submit(self, job: Job[R], timeout_s: float, deadline: float = math.inf) -> Future[R]:
        """The future result of `job`; if it would end after `deadline`, the result of an interrupted job.

        `timeout_s` is ignored: a trial that exceeded its limit is recorded as failed.
        """
        begin = max(self._clock(), self._free_at)
        seconds, result = self._recorded(job)
        end = min(begin + seconds, max(begin, deadline))
        self.busy_s += end - begin
        self._free_at = end

        def _answer() -> R:
            if begin + seconds <= deadline:
                return result
            return job.result_after(JobError("the time was up"), _raise_again)

        return Awaited(self._clock, end, _answer)

    def start(self) -> None:
        """Do nothing: there is no process."""

    def ready(self, limit_s: float) -> bool:
        """True: there is no process to wait for."""
        return True

    def free(self) -> None:
        """Do nothing: nothing is kept."""

    def close(self) -> None:
        """Do nothing: there is no process."""

    def _recorded(self, job: Any) -> tuple[float, Any]:
        """The seconds that `job` takes, and its result."""
        match job:
            case MeasureJob(task, variant):
                found = self._recording.recorded(task, variant)
                if found is None:
                    return 0.0, Failed(variant, "check", NOT_RECORDED)
                return found.seconds, _measured(found)
            case RaceJob():
                return self._race(job)
            case PrepareJob():
                return 0.0, 0.0
            case _:
                raise JobError(f"{type(job).__name__} is not recorded")

    def _race(self, job: RaceJob) -> tuple[float, RaceResult]:
        seconds, times_ms = 0.0, list[float]()
        timings: dict[Variant, Timing | Failed] = {}
        for variant in job.variants:
            found = self._recording.recorded(job.task, variant)
            outcome = found and found.outcome
            if found is None or not isinstance(outcome, Timed):
                timings[variant] = Failed(variant, "time", NOT_RECORDED)
                continue
            samples = random.Random(f"{job.seed} {variant.key()}").choices(outcome.timing.samples_ms, k=job.rounds)
            timings[variant] = replace(outcome.timing, samples_ms=tuple(samples))
            times_ms.append(outcome.timing.median_ms)
            seconds += found.seconds
        return seconds + (expected_s(times_ms, job.rounds) if times_ms else 0.0), RaceResult(timings)


class RecordedPool:
    """Compiles `processes` codes at a time, each in the recorded seconds."""

    def __init__(self, recording: Recording, clock: Clock, processes: int = PROCESSES) -> None:
        self.processes = processes
        self._recording = recording
        self._clock = clock
        # A heap of the moments at which each process becomes free.
        self._free_at = [0.0] * processes
        self._queue: deque[tuple[float, CompileJob]] = deque()
        self._begun: list[tuple[float, CompileJob]] = []
        # The intervals in which all were busy; the last one may end in the future.
        self._full: list[tuple[float, float]] = []

    @property
    def full_seconds(self) -> float:
        """The seconds for which all processes have been compiling."""
        self._begin()
        return sum(max(0.0, min(end, self._clock()) - begin) for begin, end in self._full)

    def start(self, jobs: int) -> None:
        """Do nothing: there is no process."""

    def submit(self, job: CompileJob) -> None:
        """Append `job` to the queue."""
        self._queue.append((self._clock(), job))

    def results(self, wait_s: float) -> list[Build]:
        """The builds finished since the last call, after waiting up to `wait_s` seconds for one."""
        self._begin()
        first = min((end for end, _ in self._begun), default=self._clock())
        self._clock.wait_until(min(first, self._clock() + max(0.0, wait_s)))
        self._begin()
        now = self._clock()
        done = [job for end, job in self._begun if end <= now]
        self._begun = [(end, job) for end, job in self._begun if end > now]
        return [Build(job, self._compiled(job), self._seconds_of(job)) for job in done]

    def cancel_queued(self) -> list[CompileJob]:
        """Empty the queue, and return the jobs that were in it."""
        self._begin()
        queued, self._queue = [job for _, job in self._queue], deque()
        return queued

    def close(self) -> None:
        """Do nothing: there is no process."""

    def _begin(self) -> None:
        """Give queued jobs to the processes that have become free by now."""
        while self._queue and max(self._free_at[0], self._queue[0][0]) <= self._clock():
            submitted, job = self._queue.popleft()
            begin = max(heapq.heappop(self._free_at), submitted)
            heapq.heappush(self._free_at, begin + self._seconds_of(job))
            self._begun.append((begin + self._seconds_of(job), job))
            if self._free_at[0] > begin:
                self._full.append((begin, self._free_at[0]))

    def _of(self, job: CompileJob) -> Recorded | None:
        return self._recording.recorded(Task(job.spec, job.batch, job.variant.page_size), job.variant)

    def _seconds_of(self, job: CompileJob) -> float:
        found = self._of(job)
        return 0.0 if found is None else found.compile_s

    def _compiled(self, job: CompileJob) -> StaticFacts | Failed:
        found = self._of(job)
        if found is None:
            return Failed(job.variant, "compile", NOT_RECORDED)
        if isinstance(found.outcome, Failed) and found.outcome.stage == "compile":
            return found.outcome
        return found.facts or StaticFacts(0, None, None)


def executor_of(recording: Recording, processes: int = PROCESSES) -> Executor:
    """The executor that answers from `recording`, with simulated compile `processes`; its clock begins at 0."""

    def _environment_of(template: str, gpu: Gpu) -> Environment:
        return recording.environments.get(template) or Environment("", "", "", gpu.driver)

    clock = Clock()
    # Through the interpreter nothing is compiled.
    pool = None if recording.gpu.is_interpreter else RecordedPool(recording, clock, processes)
    return Executor(RecordedWorker(recording, clock), pool, _environment_of, clock, recording=recording)


def _measured(found: Recorded) -> Timed | Wrong | Failed:
    outcome = found.outcome
    # A skipped variant is known by its facts, and is not measured.
    return outcome if isinstance(outcome, Timed | Wrong | Failed) else Failed(outcome.variant, "check", outcome.reason)


def _raise_again(job: Job[R]) -> R:
    raise JobError("the time was up")


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

    Measuring, and compiling on `processes` processes, take the recorded seconds; starting processes, preparing inputs
    and choosing variants take none. The database is temporary. The same arguments give the same results. Raises
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
        """Pass the call on."""
        self._listener.started(task, valid, reused)

    def tried(self, progress: Progress) -> None:
        """Keep the trial, and pass the call on."""
        if not isinstance(progress.outcome, Skipped):
            self.trials.setdefault(progress.task, []).append(progress.outcome)
        self._listener.tried(progress)

    def racing(self, task: Task, variants: tuple[Variant, ...]) -> None:
        """Pass the call on."""
        self._listener.racing(task, variants)

    def finished(self, result: TaskResult) -> None:
        """Pass the call on."""
        self._listener.finished(result)
