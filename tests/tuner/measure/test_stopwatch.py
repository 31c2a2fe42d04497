import contextlib
import itertools
import time
from typing import Any

import pytest
import torch

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.outcome import Regime
from attention_tuner.tuner.measure import stopwatch as module
from attention_tuner.tuner.measure.race import DRIFT
from attention_tuner.tuner.measure.stopwatch import SAMPLE_MS, Sentinel, Stopwatch, num_buffers, plan_ms, timing

MIB = 1 << 20
COLD, WARM = Regime("graph", "cold"), Regime("graph", "warm")


@pytest.mark.parametrize(
    ("touched", "free", "regime", "count"),
    [
        (10 * MIB, 10_000 * MIB, COLD, 11),
        (30 * MIB, 10_000 * MIB, COLD, 5),
        (99 * MIB, 10_000 * MIB, COLD, 3),
        (100 * MIB, 10_000 * MIB, COLD, 1),
        (MIB, 10_000 * MIB, COLD, 64),
        (10 * MIB, 10_000 * MIB, WARM, 1),
        (10 * MIB, 100 * MIB, COLD, 4),
        (10 * MIB, 0, COLD, 1),
    ],
)
def test_buffers_rotate_past_twice_the_l2_within_half_the_memory(
    touched: int, free: int, regime: Regime, count: int
) -> None:
    assert num_buffers(touched, 12 * MIB, 50 * MIB, free, regime) == count


def test_the_interpreters_samples_are_wall_clock_over_every_buffer() -> None:
    calls: list[str] = []

    def run(buffer: str) -> None:
        calls.append(buffer)
        time.sleep(0.01)

    watch = Stopwatch(run, ["a", "b"], Regime("interpreter"))
    taken = timing(watch, 4, plan_ms=0.5)
    assert calls.count("a") == calls.count("b") == 2
    assert len(taken.samples_ms) == 4
    assert taken.median_ms >= 10
    assert (taken.plan_ms, taken.regime) == (0.5, Regime("interpreter"))


class SlowPlan:
    """Plans slowly the first time, on a clock of its own."""

    def __init__(self) -> None:
        self.calls = 0
        self.now_s = 0.0

    def plan(self, batch: Batch, device: torch.device | str) -> None:
        self.calls += 1
        self.now_s += 0.2 if self.calls == 1 else 0.005


def test_the_first_plan_which_allocates_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = SlowPlan()
    monkeypatch.setattr(time, "perf_counter", lambda: launcher.now_s)
    assert plan_ms(launcher, Batch.parse("1x16@32"), "cpu", repeats=3) == pytest.approx(5)
    assert launcher.calls == 4


def copy_buffers(size: int, count: int) -> list[torch.Tensor]:
    return [torch.zeros(2, size, dtype=torch.uint8, device="cuda") for _ in range(count)]


def copy(buffer: torch.Tensor) -> None:
    buffer[1].copy_(buffer[0])


@pytest.mark.gpu
@pytest.mark.parametrize("capture", ["graph", "eager"])
def test_a_sample_is_long_enough_and_covers_every_buffer(capture: str) -> None:
    watch = Stopwatch(copy, copy_buffers(MIB, 7), Regime(capture))
    assert watch.regime.capture == capture
    assert watch._launches % 7 == 0
    samples = watch.samples(10)
    assert len(samples) == 10
    # Eager launches take as long as the host, which other processes can make slower or faster from sample to sample.
    assert capture == "eager" or min(samples) * watch._launches >= 0.8 * SAMPLE_MS


@pytest.mark.gpu
def test_a_graph_replay_costs_no_host_time_and_memory_is_cold() -> None:
    graph = timing(Stopwatch(copy, copy_buffers(4 * MIB, 40), COLD), 20, 0.0)
    warm = timing(Stopwatch(copy, copy_buffers(4 * MIB, 1), WARM), 20, 0.0)
    eager = timing(Stopwatch(copy, copy_buffers(4 * MIB, 1), Regime("eager", "warm")), 20, 0.0)
    assert warm.median_ms < graph.median_ms
    assert warm.median_ms < eager.median_ms


@pytest.mark.gpu
def test_a_flush_makes_few_buffers_as_cold_as_many() -> None:
    evictor, total = torch.zeros(32 * MIB, device="cuda"), torch.zeros((), device="cuda")
    many = timing(Stopwatch(copy, copy_buffers(4 * MIB, 40), COLD), 20, 0.0)
    few = Stopwatch(copy, copy_buffers(4 * MIB, 8), COLD, lambda: torch.sum(evictor, dim=0, out=total))
    assert 1 <= few.launches <= 8
    assert timing(few, 20, 0.0).median_ms == pytest.approx(many.median_ms, rel=0.15)


@pytest.mark.parametrize(
    ("error", "expected"),
    [(RuntimeError, contextlib.nullcontext()), (torch.OutOfMemoryError, pytest.raises(torch.OutOfMemoryError))],
)
def test_memory_that_runs_out_in_a_capture_is_an_error(
    error: type[Exception], expected: contextlib.AbstractContextManager[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def run(buffer: int) -> None:
        calls.append(buffer)
        if len(calls) == 2:
            raise error("while capturing")

    def unmeasured(watch: Stopwatch[int]) -> None:
        return None

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(module, "_capturing", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(Stopwatch, "_fill_sample", unmeasured)
    with expected:
        assert Stopwatch(run, [1], COLD).regime == Regime("eager", "cold")
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("ms", "replays", "spare", "launches"),
    [
        # Long launches: one sample, after one that is dropped, and it counts.
        (0.5, 2, 1, 1),
        # Short ones: three more replays, a new graph of more launches, and two replays of that.
        (0.05, 7, 1, 5),
    ],
)
def test_few_replays_tell_how_many_launches_make_a_sample(
    ms: float, replays: int, spare: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a graph and events that only count what is launched."""
    time_ms = [0.0]
    runs: list[int] = []
    replayed: list[int] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = time_ms[0]

        def elapsed_time(self, end: Any) -> float:
            return end.at - self.at

    class Graph:
        def replay(self) -> None:
            replayed.append(len(self.launches))
            time_ms[0] += ms * len(self.launches)

    @contextlib.contextmanager
    def capturing(graph: Any) -> Any:
        before = len(runs)
        yield
        graph.launches = runs[before:]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(module, "_capturing", capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    watch = Stopwatch(runs.append, [7], COLD, is_loaded=True)
    assert (len(replayed), len(watch.spare), watch.launches) == (replays, spare, launches)
    assert watch.spare[0] == pytest.approx(ms)
    assert watch.samples(2) == pytest.approx((ms, ms))
    # Nothing but what the graphs hold was launched.
    assert len(runs) == (1 if replays == 2 else 1 + launches)


@pytest.mark.gpu
def test_a_capture_gives_nothing_back_that_torch_keeps() -> None:
    kept = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    del kept
    reserved = torch.cuda.memory_reserved()
    Stopwatch(copy, copy_buffers(MIB, 2), COLD)
    assert torch.cuda.memory_reserved() >= reserved


@pytest.mark.gpu
def test_what_cannot_be_captured_is_timed_eagerly() -> None:
    def run(buffer: torch.Tensor) -> None:
        copy(buffer)
        torch.cuda.synchronize()

    watch = Stopwatch(run, copy_buffers(MIB, 2), COLD)
    assert watch.regime == Regime("eager", "cold")
    assert min(watch.samples(3)) > 0


def test_the_sentinel_is_the_time_of_a_matrix_product(monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[tuple[torch.Size, torch.Size]] = []
    multiply = torch.mm

    def mm(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        products.append((left.shape, right.shape))
        return multiply(left, right, out=out)

    monkeypatch.setattr(torch, "mm", mm)
    assert Sentinel("cpu", (8, 16, 32), Regime("interpreter")).ms() > 0
    assert set(products) == {(torch.Size((8, 32)), torch.Size((32, 16)))}


@pytest.mark.gpu
def test_the_sentinel_repeats_within_what_discards_a_block_unless_the_gpu_drifts() -> None:
    sentinel = Sentinel()
    for _ in range(200):
        sentinel.ms()
    times = [sentinel.ms() for _ in range(101)]
    assert 0.02 < times[50] < 2
    # The GPU may warm up meanwhile, and be throttled once or twice: of neighbouring readings, most agree.
    changes = sorted(abs(after / before - 1) for before, after in itertools.pairwise(times))
    assert changes[75] < DRIFT
