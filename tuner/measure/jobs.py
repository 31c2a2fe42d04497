"""What a child process can be asked to do: picklable records, readable without torch."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...kernel_templates.outcome import GRAPH, Failed, JobError, Regime, Timed, Timing, Wrong
from ...kernel_templates.registry import template_of
from ...kernel_templates.task import Task
from ...kernel_templates.variant import Variant
from ..processes.child import Context, Job
from .blocks import TURN_MS, Course, equal_turns, run_blocks
from .gpu_state import WATCH_PERIOD_S, ThrottleWatch

if TYPE_CHECKING:
    from ...kernel_templates.launch.launcher import Launcher, Tensors
    from .bench import Workbench
    from .stopwatch import Stopwatch

# What so many samples show to be more than so many times as slow as the best so far cannot win, and is sampled no more:
# one variant's times differ by a tenth at most.
LOOKS = ((1, 3.0), (2, 1.25))
# Of the time for a race, what ending its watch and answering take.
ANSWER_S = 2 * WATCH_PERIOD_S


@dataclass(frozen=True, slots=True)
class PrepareJob(Job[float]):
    """Work out what all measurements of a task share: the inputs, the reference's answer and the buffers timed over.

    `seed` and `regime` are those of the measurements to come.
    """

    task: Task
    seed: int = 0
    regime: Regime = GRAPH

    def run(self, context: Context) -> float:
        """The seconds that it took."""
        start = time.perf_counter()
        bench = _workbench(context, self.task)
        bench.checker(self.seed)
        bench.buffers(self.regime)
        return time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class MeasureJob(Job[Timed | Wrong | Failed]):
    """Check a variant against the reference and, if it is right, time it.

    `seed` is that of the checked inputs. `regime` is the one asked for: the interpreter, and a variant that cannot be
    captured, are timed in their own, which the timing names. One that is clearly slower than `rival_ms` is timed with
    as few samples as `LOOKS` says. `code` tells variants apart whose code differs, "" being that of its template and
    values: what has the code and the launch of a variant that was measured before is not measured again.
    """

    task: Task
    variant: Variant
    samples: int
    seed: int = 0
    regime: Regime = GRAPH
    rival_ms: float | None = None
    code: str = ""

    def run(self, context: Context) -> Timed | Wrong:
        """The outcome; what goes wrong is raised."""
        context.report_stage("check", self.variant)
        bench = _workbench(context, self.task)
        launcher, plan_ms = bench.planned(self.variant, self.regime)
        code = self.code or template_of(self.variant).code_key(self.variant)
        key = (code, launcher.launch_key(), self.samples, self.seed, self.regime)
        known = bench.measured.get(key)
        if isinstance(known, Timed):
            return replace(known, variant=self.variant, same_as=known.variant)
        if known is not None:
            return replace(known, variant=self.variant)
        outcome = bench.measured[key] = self._measured(context, bench, launcher, plan_ms)
        return outcome

    def _measured(self, context: Context, bench: Workbench, launcher: Launcher, plan_ms: float) -> Timed | Wrong:
        check = bench.checker(self.seed).check(launcher)
        if not check.passed:
            return Wrong(self.variant, check)
        context.report_stage("time", self.variant)
        watch = bench.stopwatch(launcher, self.regime, is_loaded=True)
        samples = watch.spare
        rival_ms = math.inf if self.rival_ms is None else self.rival_ms
        for count, most in (*LOOKS, (self.samples, math.inf)):
            missing = min(count, self.samples) - len(samples)
            if missing > 0:
                samples += watch.samples(missing)
            if min(samples) > most * rival_ms:
                break
        return Timed(self.variant, check, Timing(samples, watch.regime, plan_ms))

    def result_after(
        self, error: JobError, run: Callable[[Job[Timed | Wrong | Failed]], Timed | Wrong | Failed]
    ) -> Failed:
        """The variant is to blame."""
        return Failed(self.variant, error.stage or "check", error.reason)


@dataclass(frozen=True, slots=True)
class RaceResult:
    """The timings of a race, and how many of its blocks were discarded because the card was not in its usual state.

    `blocks` were asked for; `sentinels_ms` are those of all that were run. A race without sentinels discards nothing.
    """

    timings: dict[Variant, Timing | Failed]
    blocks: int = 0
    discarded: int = 0
    sentinels_ms: tuple[float, ...] = ()

    @property
    def is_steady(self) -> bool:
        """Whether as many blocks count as were asked for; a verdict on fewer means nothing."""
        return not self.sentinels_ms or len(self.sentinels_ms) - self.discarded >= self.blocks


@dataclass(frozen=True, slots=True)
class RaceJob(Job[RaceResult]):
    """Time variants in turn, in balanced orders and equal heat: sample i of one and of another are a pair.

    On a GPU, blocks of rounds in which the card was not in its usual state are run again, as long as that ends before
    `deadline` of `time.monotonic`, which is one clock for all processes. A variant that fails leaves the race, which is
    then run again without it.
    """

    task: Task
    variants: tuple[Variant, ...]
    rounds: int
    seed: int = 0
    regime: Regime = GRAPH
    deadline: float = math.inf

    def run(self, context: Context) -> RaceResult:
        """A timing for every variant, of `rounds` samples unless blocks were discarded for good."""
        bench = _workbench(context, self.task)
        watches: dict[Variant, Stopwatch[Tensors]] = {}
        plans: dict[Variant, float] = {}
        lengths: dict[Variant, float] = {}
        for variant in self.variants:
            context.report_stage("time", variant)
            launcher, plans[variant] = bench.planned(variant, self.regime)
            watch = watches[variant] = bench.stopwatch(launcher, self.regime)
            lengths[variant] = TURN_MS if context.interpret else watch.launches * watch.samples(1)[0]
        counts = equal_turns(lengths)

        def sentinel() -> float:
            context.report_stage("sentinel")
            return bench.sentinel.ms()

        def turn(variant: Variant) -> float:
            context.report_stage("time", variant)
            # The first half of a turn heats the card; one sample of it the stopwatch drops itself.
            samples = watches[variant].samples(2 * counts[variant] - 1)
            return statistics.fmean(samples[-counts[variant]:])

        with ThrottleWatch(bench.uuid) as card:
            course = Course(turn, None if context.interpret else sentinel, card.throttled)
            patience_s = self.deadline - ANSWER_S - time.monotonic()
            raced = run_blocks(course, self.variants, self.rounds, self.seed, patience_s)
        timings = {v: Timing(raced.samples_ms[v], watch.regime, plans[v]) for v, watch in watches.items()}
        return RaceResult(dict(timings), raced.blocks, raced.discarded, raced.sentinels_ms)

    def result_after(self, error: JobError, run: Callable[[Job[RaceResult]], RaceResult]) -> RaceResult:
        """The race without the variant that is to blame. Raises `error` when none is."""
        if error.variant is None:
            raise error
        rest = tuple(variant for variant in self.variants if variant != error.variant)
        lost = Failed(error.variant, error.stage, error.reason)
        try:
            result = run(replace(self, variants=rest)) if rest else RaceResult({})
        except JobError:
            # Who is to blame for the first failure is not forgotten for a second one.
            result = RaceResult({})
        return replace(result, timings={error.variant: lost, **result.timings})


def _workbench(context: Context, task: Task) -> Workbench:
    from .bench import Workbench

    return context.cached(task, lambda: Workbench(task, context.gpu()))
