"""Compare the stopwatch with `triton.testing.do_bench` and the profiler, on ten kernels from 5 us to 5 ms.

For each kernel: the busy time by the profiler (CUPTI), the launch time by the stopwatch in three regimes, and the
median of `do_bench`, which clears L2 before each launch and times each launch alone.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import record
import torch

from attention_tuner.kernel_templates.batch import Batch, BatchBucket
from attention_tuner.kernel_templates.gpu import Gpu
from attention_tuner.kernel_templates.heuristic import candidates, default_variant
from attention_tuner.kernel_templates.launch.device import present_gpu
from attention_tuner.kernel_templates.outcome import Regime
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.task import Task
from attention_tuner.tuner.measure.bench import Workbench
from attention_tuner.tuner.measure.stopwatch import Stopwatch, num_buffers

MIB = 1 << 20
LLAMA_3_8B = AttentionSpec(32, 8, 128)
PAGE_SIZE = 16
SAMPLES = 20
# Two ways of timing agree if they differ by at most this share.
AGREE = 0.03
# A launch of this length fills L2 many times, so cold and warm times are equal.
LONG_US = 1000.0
PROFILED_MS = 30.0
COLD, WARM, EAGER = Regime("graph", "cold"), Regime("graph", "warm"), Regime("eager", "cold")


@dataclass(frozen=True)
class Case:
    """A kernel to time."""

    name: str
    # Launches it on one of the buffers.
    run: Callable[[Any], object]
    # The buffers to rotate in a regime.
    buffers: Callable[[Regime], Sequence[Any]]


@dataclass(frozen=True)
class Figures:
    """Microseconds of a launch."""

    name: str
    # Kernels of a launch.
    kernels: int
    # By the profiler: the sum of the kernels' times, and the span from first start to last end; None without profiler.
    busy_cold: float | None
    span_cold: float | None
    busy_warm: float | None
    # Medians.
    stopwatch_cold: float
    stopwatch_warm: float
    stopwatch_eager: float
    do_bench: float

    @property
    def gap(self) -> float | None:
        """The launch time in a graph minus the kernels' busy time."""
        return None if self.busy_cold is None else self.stopwatch_cold - self.busy_cold

    def why(self, empty: float) -> str:
        """The reason that do_bench and the stopwatch differ; `empty` is do_bench's time without a launch."""
        excess = self.do_bench - self.stopwatch_cold
        if abs(excess) <= AGREE * self.stopwatch_cold:
            return "agree"
        if abs(self.stopwatch_cold - self.stopwatch_warm) > AGREE * self.stopwatch_cold and self.do_bench > LONG_US:
            return "power: two windows of the stopwatch differ as much"
        if self.stopwatch_eager < (1 - AGREE) * self.stopwatch_cold:
            return "captured, a plain copy is a node that the driver runs in another way than the kernel"
        if excess < 0:
            warm = self.stopwatch_warm < (1 - AGREE) * self.stopwatch_cold
            return "its L2 or TLB is less cold" if warm else "it pauses, which keeps the GPU cooler"
        eager = max(0.0, self.stopwatch_eager - self.stopwatch_cold)
        if excess <= empty + eager:
            return "its two events and an eager launch"
        return "its two events, an eager launch, and L2 full of what it cleared"


def cases(gpu: Gpu) -> Iterator[Case]:
    """The kernels, one at a time, so that the memory of each can be freed before the next."""
    yield add_case(gpu, MIB)
    yield copy_case(gpu, 8 * MIB)
    yield matmul_case(gpu, 1024)
    yield attention_case(gpu, "default", "8x1@2047")
    yield copy_case(gpu, 64 * MIB)
    yield matmul_case(gpu, 4096)
    yield attention_case(gpu, "fused", "1x512@3584,31x1@4095")
    yield copy_case(gpu, 1024 * MIB)
    yield attention_case(gpu, "default", "1x512@16384")
    yield matmul_case(gpu, 12288)


def add_case(gpu: Gpu, elements: int) -> Case:
    """The sum of two bf16 vectors."""

    def run(rows: torch.Tensor) -> object:
        return torch.add(rows[0], rows[1], out=rows[2])

    return Case(f"add, 3 x {2 * elements // MIB} MiB", run, rotated(gpu, (3, elements)))


def copy_case(gpu: Gpu, size: int) -> Case:
    """A copy of `size` bytes."""

    def run(rows: torch.Tensor) -> object:
        return rows[1].copy_(rows[0])

    return Case(f"copy of {size // MIB} MiB", run, rotated(gpu, (2, size // 2)))


def matmul_case(gpu: Gpu, size: int) -> Case:
    """A product of two square bf16 matrices."""

    def run(matrices: torch.Tensor) -> object:
        return torch.mm(matrices[0], matrices[1], out=matrices[2])

    return Case(f"matmul of {size}", run, rotated(gpu, (3, size, size)))


def attention_case(gpu: Gpu, kind: str, text: str) -> Case:
    """The attention kernel and its reduction, with the grid of a captured launch."""
    batch = Batch.parse(text)
    if kind == "default":
        variant = default_variant(LLAMA_3_8B, batch, PAGE_SIZE)
    else:
        likely = candidates(LLAMA_3_8B, BatchBucket.of(batch), PAGE_SIZE, gpu)
        variant = next(one for one in likely if one.template == kind)
    bench = Workbench(Task(LLAMA_3_8B, batch, PAGE_SIZE), gpu)
    launcher, _ = bench.planned(variant, COLD)
    return Case(f"{kind} {text}", launcher.run, bench.buffers)


def rotated(gpu: Gpu, shape: tuple[int, ...]) -> Callable[[Regime], list[torch.Tensor]]:
    """The buffers to rotate: tensors of random bf16 numbers, each read or written entirely by a launch."""
    made: list[torch.Tensor] = []

    def buffers(regime: Regime) -> list[torch.Tensor]:
        size = 2 * torch.Size(shape).numel()
        count = num_buffers(size, size, gpu.l2_bytes, torch.cuda.mem_get_info()[0], regime)
        while len(made) < count:
            made.append(torch.randn(shape, device="cuda", dtype=torch.bfloat16))
        return made[:count]

    return buffers


def measure(case: Case) -> Figures:
    """All figures of one kernel."""
    from triton.testing import do_bench

    cold = case.buffers(COLD)
    us = {
        regime: 1e3 * statistics.median(Stopwatch(case.run, case.buffers(regime), regime).samples(SAMPLES))
        for regime in (COLD, WARM, EAGER)
    }
    single = 1e3 * do_bench(lambda: case.run(cold[0]), warmup=10, rep=50, return_mode="median")
    launches = max(5, min(200, round(1e3 * PROFILED_MS / us[COLD])))
    profiled_cold = profiled(case.run, cold, launches)
    profiled_warm = profiled(case.run, cold[:1], launches)
    kernels, busy, span = profiled_cold or (0, None, None)
    return Figures(case.name, kernels, busy, span, profiled_warm and profiled_warm[1], us[COLD], us[WARM], us[EAGER],
                   single)  # fmt: skip


def profiled(run: Callable[[Any], object], buffers: Sequence[Any], launches: int) -> tuple[int, float, float] | None:
    """Kernels per launch, and median busy time and span in us; None without CUPTI."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    run(buffers[0])
    torch.cuda.synchronize()
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for index in range(launches):
                run(buffers[index % len(buffers)])
            torch.cuda.synchronize()
        events = profiler.events() or []
    except RuntimeError as error:
        print(f"the profiler failed: {error}", file=sys.stderr)
        return None
    on_gpu = (event.time_range for event in events if event.device_type == DeviceType.CUDA)
    return per_launch([(time_range.start, time_range.end) for time_range in on_gpu], launches)


def per_launch(kernels: Sequence[tuple[float, float]], launches: int) -> tuple[int, float, float] | None:
    """Kernels per launch, and median busy time and span, from (start, end) of each kernel.

    None if there are no kernels, or not the same number in every launch.
    """
    if not kernels or len(kernels) % launches:
        return None
    ordered, count = sorted(kernels), len(kernels) // launches
    groups = [ordered[first : first + count] for first in range(0, len(ordered), count)]
    busy = statistics.median(sum(end - start for start, end in group) for group in groups)
    span = statistics.median(group[-1][1] - group[0][0] for group in groups)
    return count, busy, span


def row(figures: Figures, empty: float) -> list[str]:
    """The cells of one kernel in the table."""

    def cell(us: float | None) -> str:
        return "-" if us is None else f"{us:.1f}" if us < 1000 else f"{us:.0f}"

    f = figures
    ratio = "-" if f.busy_cold is None else f"{f.stopwatch_cold / f.busy_cold:.3f}"
    return [f.name, cell(f.busy_cold), cell(f.stopwatch_cold), cell(f.do_bench), ratio,
            f"{f.do_bench / f.stopwatch_cold:.3f}", cell(f.gap), cell(f.stopwatch_warm), cell(f.busy_warm),
            cell(f.stopwatch_eager), f.why(empty)]  # fmt: skip


def main(arguments: argparse.Namespace) -> None:
    """Measure all kernels, write the JSON and print the table."""
    gpu = present_gpu()
    if gpu is None:
        sys.exit("this needs an NVIDIA GPU")
    from triton.testing import do_bench

    start = time.monotonic()
    # The cost of the two events that do_bench puts around a launch.
    empty = 1e3 * do_bench(lambda: None, warmup=5, rep=20, return_mode="median")
    measured: list[Figures] = []
    for case in cases(gpu):
        measured.append(measure(case))
        del case
        gc.collect()
        torch.cuda.empty_cache()
    has_cupti = any(figures.busy_cold is not None for figures in measured)
    rows = [row(figures, empty) for figures in measured]
    record.write(arguments.out, {
        "unit": "us a launch", "do_bench_of_nothing": empty, "profiler": "CUPTI" if has_cupti else "missing",
        "kernels": [{**asdict(f), "gap": f.gap, "why": f.why(empty)} for f in measured],
        "seconds": time.monotonic() - start,
    })  # fmt: skip
    record.print_table(("kernel", "profiler", "stopwatch", "do_bench", "sw/prof", "db/sw", "gap", "warm", "prof warm",
                        "eager", "why do_bench differs"), rows)  # fmt: skip
    print(f"us a launch; do_bench of nothing {empty:.1f}; profiler {'CUPTI' if has_cupti else 'missing'}; "
          f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main(record.parser(__doc__).parse_args())
