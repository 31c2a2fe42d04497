"""Settings of a run, its budget of time, and the records and callbacks of its progress."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import ClassVar

from ..kernel_templates.errors import InputError
from ..kernel_templates.outcome import GRAPH, BestConfig, Failed, Outcome, Regime, Skipped, Timed, Wrong
from ..kernel_templates.task import Task
from ..kernel_templates.variant import Variant
from .sampling.samplers import DEFAULT_SAMPLER

Reason = tuple[str, str, str]
"""The kind of an outcome without a time, the stage at which it failed ("" if none), and the reason."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a search. Raises `InputError` for a value out of range."""

    trials: int = 30  # variants tried for each task, stored trials among them
    seconds: float | None = None  # wall time of the whole run; None for no limit
    seed: int = 0  # of the sampler and of the checked inputs
    sampler: str = DEFAULT_SAMPLER  # chooses the variants to try
    ahead: int | None = None  # variants on their way to the GPU; None: see `Run.most_ahead` and `Run.ahead`
    finalists: int = 8  # variants in the final race beside the default
    samples: int = 5  # samples of each trial
    regime: Regime = GRAPH  # regime to time in on a GPU
    cross: bool = False  # try each task's winner on the other tasks too

    def __post_init__(self) -> None:
        for name in ("trials", "ahead", "finalists", "samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1, not {value}")
        if self.seconds is not None and not (math.isfinite(self.seconds) and self.seconds > 0):
            raise InputError(f"seconds must be a positive number, not {self.seconds}")

    def as_json(self) -> dict[str, object]:
        """Settings as values that JSON can hold."""
        return {**asdict(self), "regime": str(self.regime)}


@dataclass(frozen=True, slots=True)
class Budget:
    """Division of a run's time: until when each stage may go on. All moments are of the executor's clock, in seconds.

    `now` is the present moment in each method.
    """

    end: float = math.inf  # end of the run

    cross_share: ClassVar[float] = 0.2  # share of a run kept for trying winners on the other tasks
    race_share: ClassVar[float] = 0.25  # share of a task's time kept for its final race
    race_limit_s: ClassVar[float] = 20.0  # limit of one final race: nine variants take 0.1 to 1 s each
    overrun_s: ClassVar[float] = 10.0  # extra time of a search that has timed only a few variants
    verify_limit_s: ClassVar[float] = 60.0  # limit for verifying one config, its compiles included
    retune_share: ClassVar[float] = 0.5  # share of a run of `verify` kept for tuning anew
    rates_limit_s: ClassVar[float] = 120.0  # limit for measuring the GPU's rates
    closing_s: ClassVar[float] = 2.0  # time of a command for the GPU's rates, ending processes and writing the result
    closing_share: ClassVar[float] = 0.1  # most that closing takes, as a share of the command's time

    def before_cross(self, now: float) -> Budget:
        """Budget of the searches that come before winners are tried on the other tasks."""
        return replace(self, end=now + (1 - self.cross_share) * (self.end - now))

    def task_end(self, now: float, tasks_left: int) -> float:
        """End of a task: the time left is divided evenly among `tasks_left`, this one among them."""
        return now + (self.end - now) / tasks_left

    def search_end(self, now: float, task_end: float) -> float:
        """End of the search of a task, before its final race."""
        return task_end - min(self.race_share * (task_end - now), self.race_limit_s)

    def overrun_end(self, search_end: float) -> float:
        """End of a search that has timed only a few variants by `search_end`."""
        return min(self.end, search_end + self.overrun_s)

    def race_end(self, now: float, task_end: float) -> float:
        """End of a final race that begins now."""
        return min(task_end, now + self.race_limit_s)

    def verify_end(self, now: float) -> float:
        """End of the verification of one config that begins now."""
        return min(self.end, now + self.verify_limit_s)

    @classmethod
    def seconds_to_close(cls, seconds: float | None) -> float:
        """Part of a command's `seconds`, None for no limit, that it needs after its run."""
        return cls.closing_s if seconds is None else min(cls.closing_s, cls.closing_share * seconds)


@dataclass(frozen=True, slots=True)
class Progress:
    """State of the search for a task after one more outcome."""

    task: Task
    outcome: Outcome  # of the latest trial
    done: int  # trials so far
    planned: int  # trials in all
    best_ms: float | None  # fastest median time so far
    default_ms: float | None  # the default's median time
    outcomes: Counter[str]  # number of outcomes of each kind
    seconds_left: float  # wall time left to the run


@dataclass(slots=True)
class TaskResult:
    """Result of one task, counted while it is searched."""

    task: Task
    best: BestConfig | None = None  # None if no variant was right and timed
    baseline: Variant | None = None  # the default, or what stood in for it where it cannot run
    outcomes: Counter[str] = field(default_factory=Counter[str])  # by kind, new and stored trials
    reasons: Counter[Reason] = field(default_factory=Counter[Reason])  # of outcomes without a time
    outdated: Counter[str] = field(default_factory=Counter[str])  # stored trials that cannot be reused, by reason
    tried: int = 0  # new trials
    reused: int = 0  # stored trials
    repeated: int = 0  # new trials with the code and launch of another, whose time they took over
    seconds: float = 0.0  # wall time
    measuring_seconds: float = 0.0  # part of `seconds` in which the GPU measured or checked
    compiling_seconds: float = 0.0  # part of `seconds` in which every compile process was busy
    discarded_blocks: int = 0  # race blocks run again or given up, because the GPU's state had drifted
    compiles: int = 0  # kernels compiled for this task
    shared: int = 0  # variants whose kernel had been compiled for another task of the run
    crossed: int = 0  # trials of other tasks' winners; `tried` does not count them
    cross_seconds: float = 0.0  # wall time of the crossed trials

    @property
    def measured_per_second(self) -> float:
        """New trials per second of wall time; 0 if there was no time."""
        return self.tried / self.seconds if self.seconds else 0.0

    @property
    def skipped(self) -> int:
        """Number of variants that were not tried, for a reason known before."""
        return self.outcomes["skipped"]

    def count(self, outcome: Outcome) -> None:
        """Count an outcome by its kind, and by its reason if it has no time."""
        kind = type(outcome).__name__.lower()
        self.outcomes[kind] += 1
        match outcome:
            case Failed(_, stage, reason):
                self.reasons[kind, stage, reason] += 1
            case Skipped(_, reason):
                self.reasons[kind, "", reason] += 1
            case Wrong():
                self.reasons[kind, "", outcome.reason] += 1
            case Timed():
                pass


class Listener:
    """Progress callbacks; override the ones you need."""

    def started(self, task: Task, valid: int, reused: int) -> None:
        """Called when the search of a task begins, over `valid` variants and with `reused` stored trials."""

    def tried(self, progress: Progress) -> None:
        """Called when a trial is finished and stored."""

    def racing(self, task: Task, variants: tuple[Variant, ...]) -> None:
        """Called when the final race begins."""

    def finished(self, result: TaskResult) -> None:
        """Called when a task is done and its best config is stored."""
