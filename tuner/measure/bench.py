"""The objects that the jobs of one task share in the measuring process: checker, buffers, stopwatches, outcomes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable

import torch

from ...kernel_templates.batch import minimum_traffic
from ...kernel_templates.gpu import Gpu
from ...kernel_templates.launch.device import present_uuid
from ...kernel_templates.launch.launcher import Launcher, Settings, Tensors, make_launcher
from ...kernel_templates.oracle.inputs import make_tensors
from ...kernel_templates.outcome import Regime, Timed, Wrong
from ...kernel_templates.task import Task
from ...kernel_templates.variant import Variant
from .check import Checker
from .stopwatch import Sentinel, Stopwatch, num_buffers, plan_ms


class Workbench:
    """The shared objects of one task on one GPU."""

    def __init__(self, task: Task, gpu: Gpu) -> None:
        self.task = task
        self.gpu = gpu
        self.device = "cpu" if gpu.is_interpreter else "cuda"
        # Outcomes by code, launch and way of measuring.
        self.measured: dict[Hashable, Timed | Wrong] = {}
        self._checkers: dict[int, Checker] = {}
        self._buffers: list[Tensors] = []
        # Counted once, because free memory changes and all variants must be timed over as many sets.
        self._counts: dict[Regime, int] = {}
        self._evictor: torch.Tensor | None = None

    @functools.cached_property
    def uuid(self) -> str | None:
        """UUID of the GPU, None for the interpreter."""
        return None if self.gpu.is_interpreter else present_uuid()

    @functools.cached_property
    def sentinel(self) -> Sentinel:
        """The sentinel of the task's races. Needs a GPU."""
        return Sentinel(self.device)

    def planned(self, variant: Variant, regime: Regime) -> tuple[Launcher, float]:
        """The launcher of `variant` with the task's batch planned, and the milliseconds of one plan.

        In the graph regime the grid is padded as an engine captures it; otherwise it is as large as the batch needs.
        """
        padded = regime.capture == "graph" and not self.gpu.is_interpreter
        launcher = make_launcher(variant, self.task.spec, self.gpu, Settings(padded=padded))
        return launcher, plan_ms(launcher, self.task.batch, self.device)

    def checker(self, seed: int) -> Checker:
        """The checker of inputs drawn from `seed`. Only that of the last seed is kept."""
        if seed not in self._checkers:
            self._checkers.clear()
            task = self.task
            self._checkers[seed] = Checker(task.spec, task.batch, task.page_size, self.device, seed)
        return self._checkers[seed]

    def stopwatch(self, launcher: Launcher, regime: Regime, is_loaded: bool = False) -> Stopwatch[Tensors]:
        """A stopwatch of `launcher` in `regime`, or in the interpreter's. A launcher that `is_loaded` has run before.

        A launch that cannot be captured is timed by a new launcher with the grid of eager launches.
        """
        if self.gpu.is_interpreter:
            regime = Regime("interpreter")
        buffers = self.buffers(regime)
        flush = self.flush(len(buffers), regime)
        watch = Stopwatch(launcher.run, buffers, regime, flush, is_loaded)
        if launcher.settings.padded and watch.regime.capture == "eager":
            launcher, _ = self.planned(launcher.variant, watch.regime)
            watch = Stopwatch(launcher.run, buffers, watch.regime, flush)
        return watch

    def buffers(self, regime: Regime) -> list[Tensors]:
        """The sets of tensors to rotate. In a cold regime, each has left L2 when its turn comes."""
        if not self._buffers:
            self._buffers.append(self._make_buffer())
        if regime not in self._counts:
            self._counts[regime] = self._count(regime)
        count = self._counts[regime]
        while len(self._buffers) < count:
            self._buffers.append(self._make_buffer())
        return self._buffers[:count]

    def _count(self, regime: Regime) -> int:
        """Number of sets of tensors to rotate."""
        first = self._buffers[0]
        held = sum(t.untyped_storage().nbytes() for t in (first.q, first.k_cache, first.v_cache, first.out))
        touched, _ = minimum_traffic(self.task.spec, self.task.batch)
        free = 0 if self.gpu.is_interpreter else torch.cuda.mem_get_info()[0]
        return num_buffers(touched, held, self.gpu.l2_bytes, free + held * len(self._buffers), regime)

    def flush(self, count: int, regime: Regime) -> Callable[[], object] | None:
        """The function that evicts L2, None where it is warm or `count` sets exceed it twice.

        It reads, so that nothing is left to write back.
        """
        touched, _ = minimum_traffic(self.task.spec, self.task.batch)
        if self.gpu.is_interpreter or regime.l2 == "warm" or count * touched >= 2 * self.gpu.l2_bytes:
            return None
        return self._evict

    def _evict(self) -> None:
        if self._evictor is None:
            self._evictor = torch.zeros(2 * self.gpu.l2_bytes // 4 + 1, device=self.device)
        torch.sum(self._evictor[1:], dim=0, out=self._evictor[0])

    def _make_buffer(self) -> Tensors:
        task = self.task
        seed = len(self._buffers)
        return make_tensors(task.spec, task.batch, task.page_size, self.device, seed, needles=False)
