"""The stopwatch, which times launches over rotating buffers, and the sentinel, which times constant work."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from typing import Generic, Protocol, TypeVar

import torch

from ...kernel_templates.batch import Batch
from ...kernel_templates.outcome import GRAPH, Regime, Timing

T = TypeVar("T")

# Long enough that the resolution of an event, 0.5 us, and the gap between two graphs do not show.
SAMPLE_MS = 0.2
# The most sets of tensors to rotate: a sample of the shortest launches then takes each once.
MOST_BUFFERS = 64
# Shape of a product of bf16 matrices, the work that power and clocks affect most. It takes about 100 us on an H200.
SENTINEL_SHAPE = (4096, 4096, 2048)
_SENTINEL_SAMPLES = 5


class Plannable(Protocol):
    """A launcher, as far as planning is concerned."""

    def plan(self, batch: Batch, device: torch.device | str) -> None:
        """Make the plan of `batch`."""
        ...


class Stopwatch(Generic[T]):
    """Times `run` over `buffers` in turn, in `regime`, or eagerly where `run` cannot be captured.

    A sample is the mean over launches that together take `SAMPLE_MS` and use every buffer equally often, so that no
    buffer is in L2 when its turn comes. Where that would take too many buffers, `flush` evicts L2: it is called,
    untimed, before each sample, which then uses no buffer twice. In the interpreter's regime a sample is one call by
    the wall clock. With `is_loaded`, `run` was called before and has nothing left to compile or load. `spare` holds
    good samples that were taken to find the length of one, perhaps none.
    """

    def __init__(
        self,
        run: Callable[[T], object],
        buffers: Sequence[T],
        regime: Regime,
        flush: Callable[[], object] | None = None,
        is_loaded: bool = False,
    ) -> None:
        self._run = run
        self._buffers = buffers
        self._flush = flush
        self._launches = 1 if flush else len(buffers)
        self._turn = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self.regime = regime
        self.spare: tuple[float, ...] = ()
        if regime.capture == "interpreter":
            return
        if not is_loaded:
            # The first use compiles and loads, which must not be timed and cannot be captured.
            run(buffers[0])
            torch.cuda.synchronize()
        self._capture()
        self._fill_sample()

    @property
    def launches(self) -> int:
        """Launches in a sample."""
        return self._launches

    def samples(self, count: int) -> tuple[float, ...]:
        """`count` samples in milliseconds per launch, taken back to back after one that is dropped."""
        if self.regime.capture == "interpreter":
            return tuple(self._wall_ms() for _ in range(count))
        # All samples are queued before the first ends, so that only the first may have waited for the host.
        if self._flush is not None:
            return self._flushed_samples(count, self._flush)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 2)]
        marks[0].record()
        for mark in marks[1:]:
            self._replay()
            mark.record()
        torch.cuda.synchronize()
        return tuple(start.elapsed_time(end) / self._launches for start, end in itertools.pairwise(marks[1:]))

    def _flushed_samples(self, count: int, flush: Callable[[], object]) -> tuple[float, ...]:
        spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        for _ in range(count + 1):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush()
            start.record()
            self._replay()
            end.record()
            spans.append((start, end))
        torch.cuda.synchronize()
        return tuple(start.elapsed_time(end) / self._launches for start, end in spans[1:])

    def _fill_sample(self) -> None:
        """Raise the launches in a sample until it takes `SAMPLE_MS`: by whole turns, or up to one with a flush."""
        # Twice, because the time of a short sample is mostly the cost of a replay.
        for _ in range(2):
            # If launches are long, one sample shows it, and more would take time.
            taken = self.samples(1)
            if taken[0] * self._launches < SAMPLE_MS:
                taken += self.samples(2)
            sample_ms = min(taken) * self._launches
            if sample_ms >= SAMPLE_MS:
                self.spare = taken
                return
            launches = self._launches * math.ceil(1.1 * SAMPLE_MS / sample_ms)
            self._launches = min(launches, len(self._buffers)) if self._flush else launches
            self._capture()

    def _capture(self) -> None:
        """Capture one sample's launches if the regime is a graph's; if that fails, the regime becomes eager."""
        self._graph = None
        if self.regime.capture != "graph":
            return
        graph = torch.cuda.CUDAGraph()
        try:
            with _capturing(graph):
                self._launch()
        except torch.OutOfMemoryError:
            # A lack of memory has nothing to do with capturing.
            raise
        except RuntimeError:
            # Raises again if the CUDA context is lost, which has nothing to do with capturing.
            torch.cuda.synchronize()
            self.regime = Regime("eager", self.regime.l2, self.regime.load)
        else:
            self._graph = graph

    def _replay(self) -> None:
        if self._graph is None:
            self._launch()
        else:
            self._graph.replay()

    def _launch(self) -> None:
        for index in range(self._launches):
            self._run(self._buffers[index % len(self._buffers)])

    def _wall_ms(self) -> float:
        self._turn = (self._turn + 1) % len(self._buffers)
        start = time.perf_counter()
        self._run(self._buffers[self._turn])
        return (time.perf_counter() - start) * 1e3


@contextlib.contextmanager
def _capturing(graph: torch.cuda.CUDAGraph) -> Generator[None]:
    """Capture the launches of the `with` block.

    `torch.cuda.graph` would first free all memory that torch caches, pinned memory too. Each launcher would allocate it
    anew, which takes milliseconds for each variant.
    """
    torch.cuda.synchronize()
    with torch.cuda.stream(_side_stream(torch.cuda.current_device())):
        graph.capture_begin()
        try:
            yield
        finally:
            graph.capture_end()


@functools.cache
def _side_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def timing(stopwatch: Stopwatch[T], samples: int, plan_ms: float) -> Timing:
    """Timing of `samples` samples of `stopwatch`."""
    return Timing(stopwatch.samples(samples), stopwatch.regime, plan_ms)


def plan_ms(launcher: Plannable, batch: Batch, device: str, repeats: int = 5) -> float:
    """Milliseconds that the host needs to plan `batch`: the median of `repeats`, after one that allocates."""
    times: list[float] = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        launcher.plan(batch, device)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[1:])


def num_buffers(touched_bytes: int, held_bytes: int, l2_bytes: int, free_bytes: int, regime: Regime) -> int:
    """Number of sets of tensors to rotate, so that each has left L2 when its turn comes; 1 when warm.

    A launch touches `touched_bytes` of a set, which holds `held_bytes`. The sets may take half of `free_bytes`, and
    there are at most `MOST_BUFFERS`. If that is not enough, L2 has to be flushed.
    """
    if regime.l2 == "warm" or touched_bytes >= 2 * l2_bytes:
        return 1
    # One more, for the set that is being read.
    wanted = math.ceil(2 * l2_bytes / touched_bytes) + 1
    return max(1, min(wanted, MOST_BUFFERS, free_bytes // 2 // held_bytes))


class Sentinel:
    """A matrix product of `shape` (rows, columns, inner size) in bf16, timed in `regime`."""

    def __init__(
        self, device: torch.device | str = "cuda", shape: tuple[int, int, int] = SENTINEL_SHAPE, regime: Regime = GRAPH
    ) -> None:
        rows, columns, inner = shape
        # A failed capture leaves the device's default generator unusable, so the sentinel has its own.
        draw = torch.Generator(device).manual_seed(0)
        right = torch.randn(inner, columns, device=device, dtype=torch.bfloat16, generator=draw)
        left = torch.randn(rows, inner, device=device, dtype=torch.bfloat16, generator=draw)
        product = torch.empty(rows, columns, device=device, dtype=torch.bfloat16)
        self._watch = Stopwatch(lambda factor: torch.mm(factor, right, out=product), [left], regime)

    def ms(self) -> float:
        """Milliseconds of one product: the median of several samples, after as many that are dropped."""
        # The first samples show what ran before rather than the state of the GPU.
        return statistics.median(self._watch.samples(2 * _SENTINEL_SAMPLES)[_SENTINEL_SAMPLES:])
