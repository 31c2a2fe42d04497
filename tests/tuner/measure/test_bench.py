from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.gpu import INTERPRETER, TARGETS, Gpu
from attention_tuner.kernel_templates.heuristic import default_variant
from attention_tuner.kernel_templates.outcome import Regime
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.task import Task
from attention_tuner.tuner.measure import bench as workbench
from attention_tuner.tuner.measure.bench import Workbench

TASK = Task(AttentionSpec(4, 2, 64, dtype="float16"), Batch.parse("1x16@32,3x1@40"), 16)
DEFAULT = default_variant(TASK.spec, TASK.batch, 16)


def test_the_reference_is_worked_out_once_for_a_seed() -> None:
    bench = Workbench(TASK, INTERPRETER)
    checker = bench.checker(3)
    assert bench.checker(3) is checker
    assert bench.checker(4) is not checker
    assert len(bench._checkers) == 1


def test_the_interpreter_rotates_nothing() -> None:
    bench = Workbench(TASK, INTERPRETER)
    (buffer,) = bench.buffers(Regime("interpreter"))
    assert bench.buffers(Regime("interpreter"))[0] is buffer
    assert buffer.q.shape == (19, 4, 64)


@pytest.mark.parametrize(
    ("gpu", "regime", "count", "flushes"),
    [
        (TARGETS["sm_90"], Regime("graph"), 64, True),
        (TARGETS["sm_90"], Regime("graph", "warm"), 1, False),
        (TARGETS["sm_90"], Regime("graph"), 10**6, False),
        (INTERPRETER, Regime("interpreter"), 1, False),
    ],
)
def test_l2_is_flushed_where_the_sets_do_not_exceed_it(gpu: Gpu, regime: Regime, count: int, flushes: bool) -> None:
    bench = Workbench(TASK, gpu)
    bench.device = "cpu"
    flush = bench.flush(count, regime)
    assert (flush is not None) == flushes
    if flush is not None:
        flush()
        assert bench._evictor is not None
        assert bench._evictor.nbytes >= 2 * gpu.l2_bytes


@pytest.mark.parametrize(("capture", "padded"), [("graph", True), ("eager", False)])
def test_only_captured_launches_have_the_grid_of_a_captured_one(capture: str, padded: bool) -> None:
    bench = Workbench(TASK, TARGETS["sm_90"])
    bench.device = "cpu"
    launcher, plan_ms = bench.planned(DEFAULT, Regime(capture))
    assert launcher.settings.padded == padded
    assert plan_ms > 0
    assert not Workbench(TASK, INTERPRETER).planned(DEFAULT, Regime(capture))[0].settings.padded


def test_a_launch_that_cannot_be_captured_gets_the_grid_of_eager_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    class Eager:
        regime = Regime("eager")

        def __init__(self, run: Callable[..., object], *_: object) -> None:
            self.launcher: Any = cast("Any", run).__self__

    monkeypatch.setattr(workbench, "Stopwatch", Eager)
    monkeypatch.setattr(Workbench, "buffers", lambda *_: [])
    bench = Workbench(TASK, TARGETS["sm_90"])
    bench.device = "cpu"
    launcher, _ = bench.planned(DEFAULT, Regime("graph"))
    items = launcher._num_items  # pyright: ignore
    watch: Any = bench.stopwatch(launcher, Regime("graph"))
    assert not watch.launcher.settings.padded
    assert watch.launcher._num_items < items


@pytest.mark.gpu
def test_cold_buffers_exceed_l2_twice_and_are_kept() -> None:
    from attention_tuner.kernel_templates.launch.device import present_gpu

    gpu = present_gpu()
    assert gpu is not None
    bench = Workbench(Task(TASK.spec, Batch.parse("64x1@2048"), 16), gpu)
    cold = bench.buffers(Regime("graph", "cold"))
    assert sum(b.k_cache.nbytes + b.v_cache.nbytes for b in cold[1:]) >= 2 * bench.gpu.l2_bytes
    assert bench.buffers(Regime("graph", "warm")) == cold[:1]
    assert bench.buffers(Regime("graph", "cold"))[-1] is cold[-1]
    assert len({b.k_cache.data_ptr() for b in cold}) == len(cold)
    torch.cuda.synchronize()
