"""What runs jobs without running anything: it answers from a recording, and its time passes only while one waits."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from ..kernel_templates.gpu import Gpu
from ..kernel_templates.outcome import Environment, Failed, JobError, StaticFacts, Timed, Timing, Wrong
from ..kernel_templates.task import Task
from ..kernel_templates.variant import Variant
from .measure.blocks import expected_s
from .measure.jobs import MeasureJob, PrepareJob, RaceJob, RaceResult
from .processes.child import Job
from .processes.compile import CompileJob
from .recording import Recorded, Recording
from .run import Executor

R = TypeVar("R")

# What a machine of 16 cores compiles with.
PROCESSES = 14
NOT_RECORDED = "it is not in the recording"


class Clock:
    """Seconds that pass only while something is waited for."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        """The seconds so far."""
        return self._now

    def wait_until(self, moment: float) -> None:
        """Let time pass until `moment`, if that is still to come."""
        self._now = max(self._now, moment)


class Awaited(Future[R]):
    """What `answer` gives or raises, from the moment `end` of `clock` on; to ask for it is to wait until then."""

    def __init__(self, clock: Clock, end: float, answer: Callable[[], R]) -> None:
        super().__init__()
        self._clock, self._end, self._answer = clock, end, answer

    def result(self, timeout: float | None = None) -> R:
        """The answer; raises the `JobError` that there is in its place."""
        if not self.done():
            self._clock.wait_until(self._end)
            try:
                self.set_result(self._answer())
            except JobError as error:
                self.set_exception(error)
        return super().result(timeout)


class RecordedWorker:
    """Answers what came of a variant in the seconds that its trial took; starting and preparing take no time.

    A race draws its rounds from the samples that were recorded.
    """

    def __init__(self, recording: Recording, clock: Clock) -> None:
        self.busy_s = 0.0
        self._recording = recording
        self._clock = clock
        self._free_at = 0.0

    def submit(self, job: Job[R], timeout_s: float, deadline: float = math.inf) -> Future[R]:
        """The recorded result of `job`, or what comes of one that is ended at `deadline`.

        No job exceeds a limit of its own: one that did is recorded as failed.
        """
        begin = max(self._clock(), self._free_at)
        seconds, result = self._recorded(job)
        end = min(begin + seconds, max(begin, deadline))
        self.busy_s += end - begin
        self._free_at = end

        def answer() -> R:
            return result if begin + seconds <= deadline else job.settle(JobError("the time was up"), _raise_again)

        return Awaited(self._clock, end, answer)

    def start(self) -> None:
        """Nothing has to be started."""

    def ready(self, limit_s: float) -> bool:
        """It always is."""
        return True

    def free(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing runs."""

    def _recorded(self, job: Any) -> tuple[float, Any]:
        """How long `job` takes, and its result."""
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
    """Compiles `processes` codes at once, each in the seconds that were recorded for it."""

    def __init__(self, recording: Recording, clock: Clock, processes: int = PROCESSES) -> None:
        self.processes = processes
        self._recording = recording
        self._clock = clock
        # When each process is free, a heap.
        self._free_at = [0.0] * processes
        self._queue: deque[tuple[float, CompileJob]] = deque()
        self._begun: list[tuple[float, CompileJob]] = []
        # From when to when all were busy: the last of them may end in the future.
        self._full: list[tuple[float, float]] = []

    @property
    def full_seconds(self) -> float:
        """For how long every process has been compiling."""
        self._begin()
        return sum(max(0.0, min(end, self._clock()) - begin) for begin, end in self._full)

    def start(self) -> None:
        """Nothing has to be started."""

    def submit(self, job: CompileJob) -> None:
        """Queue `job` behind those submitted before."""
        self._queue.append((self._clock(), job))

    def results(self, wait_s: float) -> list[tuple[CompileJob, StaticFacts | Failed]]:
        """What is compiled and was not returned before; waits up to `wait_s` for one."""
        self._begin()
        first = min((end for end, _ in self._begun), default=self._clock())
        self._clock.wait_until(min(first, self._clock() + max(0.0, wait_s)))
        self._begin()
        now = self._clock()
        done = [job for end, job in self._begun if end <= now]
        self._begun = [(end, job) for end, job in self._begun if end > now]
        return [(job, self._compiled(job)) for job in done]

    def seconds_of(self, job: CompileJob) -> float:
        """The seconds that were recorded for `job`."""
        found = self._of(job)
        return 0.0 if found is None else found.compile_s

    def forget(self) -> list[CompileJob]:
        """Drop what is queued and return it."""
        self._begin()
        queued, self._queue = [job for _, job in self._queue], deque()
        return queued

    def close(self) -> None:
        """Nothing runs."""

    def _begin(self) -> None:
        """Give what was queued to the processes that have come free by now."""
        while self._queue and max(self._free_at[0], self._queue[0][0]) <= self._clock():
            submitted, job = self._queue.popleft()
            begin = max(heapq.heappop(self._free_at), submitted)
            heapq.heappush(self._free_at, begin + self.seconds_of(job))
            self._begun.append((begin + self.seconds_of(job), job))
            if self._free_at[0] > begin:
                self._full.append((begin, self._free_at[0]))

    def _of(self, job: CompileJob) -> Recorded | None:
        return self._recording.recorded(Task(job.spec, job.batch, job.variant.page_size), job.variant)

    def _compiled(self, job: CompileJob) -> StaticFacts | Failed:
        found = self._of(job)
        if found is None:
            return Failed(job.variant, "compile", NOT_RECORDED)
        if isinstance(found.outcome, Failed) and found.outcome.stage == "compile":
            return found.outcome
        return found.facts or StaticFacts(0, None, None)


def executor_of(recording: Recording, processes: int = PROCESSES) -> Executor:
    """What answers a search's jobs from `recording`, as if `processes` compiled; the clock begins at 0."""

    def environment_of(template: str, gpu: Gpu) -> Environment:
        return recording.environments.get(template) or Environment("", "", "", gpu.driver)

    clock = Clock()
    # The interpreter compiles nothing.
    pool = None if recording.gpu.is_interpreter else RecordedPool(recording, clock, processes)
    return Executor(RecordedWorker(recording, clock), pool, environment_of, clock, recording=recording)


def _measured(found: Recorded) -> Timed | Wrong | Failed:
    outcome = found.outcome
    # What is skipped is known to be so by its facts, before it is measured.
    return outcome if isinstance(outcome, Timed | Wrong | Failed) else Failed(outcome.variant, "check", outcome.reason)


def _raise_again(job: Job[R]) -> R:
    raise JobError("the time was up")
