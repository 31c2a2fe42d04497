"""The jobs of the measuring process: prepare a task, measure a variant, race several. Loads no torch when imported."""

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

# (samples, factor): if the fastest of the first `samples` samples exceeds the best variant's time by `factor`, sampling
# stops. The variant cannot win, because one variant's times differ by a tenth at most.
EARLY_STOPS = ((1, 3.0), (2, 1.25))
# Time at the end of a race for its watch and its answer.
ANSWER_S = 2 * WATCH_PERIOD_S


@dataclass(frozen=True, slots=True)
class PrepareJob(Job[float]):
    """Make the objects that all measurements of a task share: inputs, reference output and buffers."""

    task: Task
    # Seed of the inputs.
    seed: int = 0
    # Regime of the measurements to come.
    regime: Regime = GRAPH

    def run(self, context: Context) -> float:
        """The seconds that the preparation took."""
        start = time.perf_counter()
        bench = _workbench(context, self.task)
        bench.checker(self.seed)
        bench.buffers(self.regime)
        return time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class MeasureJob(Job[Timed | Wrong | Failed]):
    """Check a variant against the reference and, if it is right, time it.

    A variant with the code and launch of one measured before is not measured again: it takes over the outcome.
    """

    task: Task
    variant: Variant
    samples: int
    # Seed of the checked inputs.
    seed: int = 0
    # The timing names another one for the interpreter, and for a variant that cannot be captured.
    regime: Regime = GRAPH
    # A variant that is clearly slower than this takes few samples, as `EARLY_STOPS` says.
    rival_ms: float | None = None
    # Names the compiled code; "" stands for the code key of the template.
    code: str = ""

    def run(self, context: Context) -> Timed | Wrong:
        """The outcome. Raises any error of the variant."""
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
        for count, most in (*EARLY_STOPS, (self.samples, math.inf)):
            missing = min(count, self.samples) - len(samples)
            if missing > 0:
                samples += watch.samples(missing)
            if min(samples) > most * rival_ms:
                break
        return Timed(self.variant, check, Timing(samples, watch.regime, plan_ms))

    def result_after(
        self, error: JobError, run: Callable[[Job[Timed | Wrong | Failed]], Timed | Wrong | Failed]
    ) -> Failed:
        """A failure of the variant, which is to blame."""
        return Failed(self.variant, error.stage or "check", error.reason)


@dataclass(frozen=True, slots=True)
class RaceResult:
    """The timings of a race. One without sentinels discards no block."""

    timings: dict[Variant, Timing | Failed]
    # Blocks asked for.
    blocks: int = 0
    # Blocks run and discarded because the GPU was not in its usual state.
    discarded: int = 0
    # Sentinel times of all blocks that were run.
    sentinels_ms: tuple[float, ...] = ()

    @property
    def is_steady(self) -> bool:
        """True if as many blocks count as were asked for; a verdict on fewer means nothing."""
        return not self.sentinels_ms or len(self.sentinels_ms) - self.discarded >= self.blocks


@dataclass(frozen=True, slots=True)
class RaceJob(Job[RaceResult]):
    """Time variants in turn, in balanced orders and equal heat, so that samples i of any two are a pair.

    On a GPU, blocks in which the GPU was not in its usual state are run again. A variant that fails leaves the race,
    which is then run again without it.
    """

    task: Task
    variants: tuple[Variant, ...]
    rounds: int
    seed: int = 0
    regime: Regime = GRAPH
    # No block is run again that would end later. `time.monotonic` is one clock for all processes.
    deadline: float = math.inf

    def run(self, context: Context) -> RaceResult:
        """A timing of every variant, with `rounds` samples unless blocks were discarded for good."""
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

        def _sentinel() -> float:
            context.report_stage("sentinel")
            return bench.sentinel.ms()

        def _turn(variant: Variant) -> float:
            context.report_stage("time", variant)
            # The first half of a turn heats the GPU; the stopwatch itself drops one sample of it.
            samples = watches[variant].samples(2 * counts[variant] - 1)
            return statistics.fmean(samples[-counts[variant]:])

        with ThrottleWatch(bench.uuid) as watch_gpu:
            course = Course(_turn, None if context.interpret else _sentinel, watch_gpu.throttled)
            patience_s = self.deadline - ANSWER_S - time.monotonic()
            raced = run_blocks(course, self.variants, self.rounds, self.seed, patience_s)
        timings = {v: Timing(raced.samples_ms[v], watch.regime, plans[v]) for v, watch in watches.items()}
        return RaceResult(dict(timings), raced.blocks, raced.discarded, raced.sentinels_ms)

    def result_after(self, error: JobError, run: Callable[[Job[RaceResult]], RaceResult]) -> RaceResult:
        """The result of the race without the variant to blame. Raises `error` when none is."""
        if error.variant is None:
            raise error
        rest = tuple(variant for variant in self.variants if variant != error.variant)
        lost = Failed(error.variant, error.stage, error.reason)
        try:
            result = run(replace(self, variants=rest)) if rest else RaceResult({})
        except JobError:
            # A second failure must not hide the variant that is to blame for the first.
            result = RaceResult({})
        return replace(result, timings={error.variant: lost, **result.timings})


def _workbench(context: Context, task: Task) -> Workbench:
    from .bench import Workbench

    return context.cached(task, lambda: Workbench(task, context.gpu()))
