"""The stopwatch: how long a launch takes on the GPU, and the buffers that it is timed over."""

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
# Sets of tensors to rotate at most: with so many, a sample of the shortest launches takes each once.
MOST_BUFFERS = 64
# A product of bf16 matrices that takes about 100 us on an H200: of the work there is, it feels power and clocks most.
SENTINEL_SHAPE = (4096, 4096, 2048)
_SENTINEL_SAMPLES = 5


class Plannable(Protocol):
    """What has a plan that is made on the host."""

    def plan(self, batch: Batch, device: torch.device | str) -> None:
        """Make the plan of `batch`."""
        ...


class Stopwatch(Generic[T]):
    """Times `run` over `buffers` in turn, in a `regime` that is eager instead of graph where `run` cannot be captured.

    A sample is the mean over as many launches as take `SAMPLE_MS`, and over every buffer equally often, so that no
    buffer is in L2 when its turn comes. Where that would take too many buffers, `flush` is given, which evicts L2: it
    is called before each sample, is not timed, and a sample then takes no buffer twice. `regime.capture` "interpreter"
    is one call by the wall clock. With `is_loaded`, `run` was called before: it has nothing left to compile or load.
    `spare` are good samples that were taken to see how long one is, perhaps none.
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
            # What is compiled or loaded at first use must not be timed, and cannot be captured.
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
        # All are queued before the first ends, so that no sample waits for the host; the first one may have.
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
        # Twice: a short sample's time is mostly what a replay costs.
        for _ in range(2):
            # One is enough to see that launches are long, which is where more would take time.
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
        """Capture one sample's launches in a graph, in that regime; where they cannot be, the regime is eager."""
        self._graph = None
        if self.regime.capture != "graph":
            return
        graph = torch.cuda.CUDAGraph()
        try:
            with _capturing(graph):
                self._launch()
        except torch.OutOfMemoryError:
            # No matter of capturing either.
            raise
        except RuntimeError:
            # Raises again where the device is lost, which is no matter of capturing.
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
    """Capture what is launched inside.

    `torch.cuda.graph` would first give back all memory that torch keeps, pinned memory too, which each launcher would
    then allocate anew: milliseconds for each variant.
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
    """The `Timing` of that many samples of `stopwatch`."""
    return Timing(stopwatch.samples(samples), stopwatch.regime, plan_ms)


def plan_ms(launcher: Plannable, batch: Batch, device: str, repeats: int = 5) -> float:
    """Milliseconds that the host needs to plan `batch`: the median of `repeats` after one that allocates."""
    times: list[float] = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        launcher.plan(batch, device)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[1:])


def num_buffers(touched_bytes: int, held_bytes: int, l2_bytes: int, free_bytes: int, regime: Regime) -> int:
    """How many sets of tensors to rotate so that a set has left L2 when its turn comes again: 1 when warm.

    A launch touches `touched_bytes` of a set, which holds `held_bytes`; the sets may take half of `free_bytes`. There
    are `MOST_BUFFERS` at most: where they, or the memory, are not enough, L2 has to be flushed.
    """
    if regime.l2 == "warm" or touched_bytes >= 2 * l2_bytes:
        return 1
    # One more than twice L2, for the set that is being read.
    wanted = math.ceil(2 * l2_bytes / touched_bytes) + 1
    return max(1, min(wanted, MOST_BUFFERS, free_bytes // 2 // held_bytes))


class Sentinel:
    """A matrix product of `shape` (rows, columns, inner size) in bf16, timed in `regime`."""

    def __init__(
        self, device: torch.device | str = "cuda", shape: tuple[int, int, int] = SENTINEL_SHAPE, regime: Regime = GRAPH
    ) -> None:
        rows, columns, inner = shape
        # A generator of its own: a capture that failed before leaves the device's default one unusable.
        draw = torch.Generator(device).manual_seed(0)
        right = torch.randn(inner, columns, device=device, dtype=torch.bfloat16, generator=draw)
        left = torch.randn(rows, inner, device=device, dtype=torch.bfloat16, generator=draw)
        product = torch.empty(rows, columns, device=device, dtype=torch.bfloat16)
        self._watch = Stopwatch(lambda factor: torch.mm(factor, right, out=product), [left], regime)

    def ms(self) -> float:
        """Milliseconds of one product: the median of several samples, taken after as many that are dropped."""
        # Dropped, because they would tell what ran before rather than how the card is.
        return statistics.median(self._watch.samples(2 * _SENTINEL_SAMPLES)[_SENTINEL_SAMPLES:])
