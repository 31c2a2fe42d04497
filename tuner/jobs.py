"""What a child process can be asked to do: picklable records, readable without torch."""

from __future__ import annotations

import importlib.metadata
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..kernel_templates.batch import Batch
from ..kernel_templates.errors import JobError
from ..kernel_templates.gpu import INTERPRETER, Gpu
from ..kernel_templates.outcome import Failed, Regime, StaticFacts, Timed, Timing, Wrong
from ..kernel_templates.spec import AttentionSpec
from ..kernel_templates.variant import Variant
from .child import Context, Job
from .task import Task

if TYPE_CHECKING:
    from ..kernel_templates.launch import Tensors
    from .timing import Stopwatch
    from .workbench import Workbench

GRAPH = Regime("graph")


@dataclass(frozen=True, slots=True)
class Description:
    """What a child process sees: its GPU (None where there is none), and the versions of what runs there."""

    gpu: Gpu | None
    triton: str
    torch: str


@dataclass(frozen=True, slots=True)
class Rates:
    """What the GPU was measured to do: reading memory, in TB/s, and multiplying bf16 matrices, in TFLOP/s."""

    read_tb_per_s: float
    matmul_tflops: float


@dataclass(frozen=True, slots=True)
class DescribeJob(Job[Description]):
    """Say what there is to run on."""

    def run(self, context: Context) -> Description:
        """What this process sees."""
        import torch

        return Description(_gpu(context), importlib.metadata.version("triton"), str(torch.__version__))


@dataclass(frozen=True, slots=True)
class RatesJob(Job[Rates]):
    """Measure the physical limits of the GPU."""

    def run(self, context: Context) -> Rates:
        """The rates of the present GPU; raises where there is none."""
        from .rates import measure_rates

        return Rates(*measure_rates())


@dataclass(frozen=True, slots=True)
class MeasureJob(Job[Timed | Wrong | Failed]):
    """Check a variant against the reference and, if it is right, time it.

    `seed` is that of the checked inputs. `regime` is the one asked for: the interpreter, and a variant that cannot be
    captured, are timed in their own, which the timing names.
    """

    task: Task
    variant: Variant
    samples: int
    seed: int = 0
    regime: Regime = GRAPH

    def run(self, context: Context) -> Timed | Wrong:
        """The outcome; what goes wrong is raised."""
        from .timing import timing

        context.at("check", self.variant)
        bench = _workbench(context, self.task)
        launcher, plan_ms = bench.planned(self.variant)
        check = bench.checker(self.seed).check(launcher)
        if not check.passed:
            return Wrong(self.variant, check)
        context.at("time", self.variant)
        stopwatch = bench.stopwatch(launcher, self.regime)
        return Timed(self.variant, check, timing(stopwatch, self.samples, plan_ms))

    def settle(self, error: JobError, again: Callable[[Job[Timed | Wrong | Failed]], Timed | Wrong | Failed]) -> Failed:
        """The variant is to blame."""
        return Failed(self.variant, error.stage or "check", error.reason)


@dataclass(frozen=True, slots=True)
class RaceJob(Job[dict[Variant, Timing | Failed]]):
    """Time variants in turn, in an order drawn anew each round: sample i of one and of another are a pair.

    A variant that fails leaves the race, which is then run again without it.
    """

    task: Task
    variants: tuple[Variant, ...]
    rounds: int
    seed: int = 0
    regime: Regime = GRAPH

    def run(self, context: Context) -> dict[Variant, Timing | Failed]:
        """A timing of `rounds` samples for every variant."""
        bench = _workbench(context, self.task)
        watches: dict[Variant, Stopwatch[Tensors]] = {}
        plans: dict[Variant, float] = {}
        for variant in self.variants:
            context.at("time", variant)
            launcher, plans[variant] = bench.planned(variant)
            watches[variant] = bench.stopwatch(launcher, self.regime)
        samples: dict[Variant, list[float]] = {variant: [] for variant in watches}
        order = list(watches)
        draw = random.Random(self.seed)
        for _ in range(self.rounds):
            draw.shuffle(order)
            for variant in order:
                context.at("time", variant)
                samples[variant] += watches[variant].samples(1)
        return {v: Timing(tuple(samples[v]), watch.regime, plans[v]) for v, watch in watches.items()}

    def settle(
        self, error: JobError, again: Callable[[Job[dict[Variant, Timing | Failed]]], dict[Variant, Timing | Failed]]
    ) -> dict[Variant, Timing | Failed]:
        """The race without the variant that is to blame. Raises `error` when none is."""
        if error.variant is None:
            raise error
        rest = tuple(variant for variant in self.variants if variant != error.variant)
        lost = Failed(error.variant, error.stage, error.reason)
        return {error.variant: lost} | (again(replace(self, variants=rest)) if rest else {})


@dataclass(frozen=True, slots=True)
class CompileJob(Job[StaticFacts | Failed]):
    """Compile a variant for `gpu`, which need not be present, into the cache that measuring reads."""

    variant: Variant
    spec: AttentionSpec
    gpu: Gpu
    batch: Batch

    def run(self, context: Context) -> StaticFacts:
        """What the compiler said of the variant."""
        from ..kernel_templates.compiler import compile_variant

        context.at("compile", self.variant)
        return compile_variant(self.variant, self.spec, self.gpu, self.batch)

    def settle(self, error: JobError, again: Callable[[Job[StaticFacts | Failed]], StaticFacts | Failed]) -> Failed:
        """The variant is to blame."""
        return Failed(self.variant, "compile", error.reason)


def _gpu(context: Context) -> Gpu | None:
    from ..kernel_templates.device import present_gpu

    return INTERPRETER if context.interpret else present_gpu()


def _workbench(context: Context, task: Task) -> Workbench:
    from .workbench import Workbench

    return context.keep(task, lambda: Workbench(task, _gpu(context)))
