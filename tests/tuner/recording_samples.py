"""A small recording, made by hand: two tasks of one layer, every kind of outcome."""

from __future__ import annotations

import itertools
import math

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.gpu import TARGETS
from attention_tuner.kernel_templates.heuristic import default_variant
from attention_tuner.kernel_templates.outcome import (
    Check,
    Environment,
    Failed,
    Regime,
    Skipped,
    StaticFacts,
    Timed,
    Timing,
    Wrong,
)
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.task import Task
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.tuner.recording import Recorded, Recording

SPEC = AttentionSpec(8, 2, 64)
DECODE = Task(SPEC, Batch.parse("16x1@4095"), 16)
CHUNK = Task(SPEC, Batch.parse("1x512@4096"), 16)
REGIME = Regime("graph")
FASTEST = {"block_m": 16, "block_n": 64, "num_segments": 8, "num_warps": 2, "num_stages": 3}


def unified(**values: int) -> Variant:
    return Variant.of("unified", 16, {**FASTEST, **values})


def made_up_ms(task: Task, variant: Variant) -> float:
    """A smooth time, least at `FASTEST`."""
    slope = sum(abs(math.log2(variant.number(name) / value)) for name, value in FASTEST.items())
    return (1.0 if task == DECODE else 2.0) * (1 + 0.1 * slope)


def trial(task: Task, variant: Variant) -> Recorded:
    facts = StaticFacts(1024, 64, 0, "mma.sync", f"code of {variant.replace(num_segments=1).key()}")
    ms = made_up_ms(task, variant)
    # No more digits than a file keeps.
    samples = (float(f"{ms * (1 + 0.001 * step):.6g}") for step in (0, 1, -1, 2, -2))
    timing = Timing(tuple(samples), REGIME, 0.0625)
    return Recorded(Timed(variant, Check(0.25), timing), facts, compile_s=3.5, seconds=0.03125)


def small_recording() -> Recording:
    """54 variants on either task, the default among them: 50 timed on the first, others wrong, failed and skipped."""
    grid = [
        unified(block_m=m, block_n=n, num_segments=s, num_warps=w)
        for m, n, s, w in itertools.product((16, 32), (16, 32, 64), (1, 8, 16), (1, 2, 4))
    ]
    trials = {
        task: {v: trial(task, v) for v in (default_variant(SPEC, task.batch, 16), *grid)} for task in (DECODE, CHUNK)
    }
    wrong, failed, lost, skipped = (unified(block_m=32, block_n=64, num_segments=s, num_warps=w)
                                    for s, w in ((1, 1), (8, 1), (16, 1), (1, 4)))  # fmt: skip
    trials[DECODE] |= {
        wrong: Recorded(Wrong(wrong, Check(math.nan, detail="row 3: its error is nan")), seconds=0.01),
        failed: Recorded(Failed(failed, "compile", "RuntimeError: PassManager::run failed"), compile_s=2.0),
        lost: Recorded(Failed(lost, "check", "killed by SIGSEGV"), StaticFacts(1024, None, None), 2.0, 0.5),
        skipped: Recorded(Skipped(skipped, "its shared memory exceeds the GPU's"), StaticFacts(10**6, 255, 512), 4.0),
    }
    return Recording(
        grid="by hand",
        gpu=TARGETS["sm_90"],
        regime=REGIME,
        environments={"unified": Environment("0123456789abcdef", "3.6.0", "2.11.0", "580.1")},
        recorded_at=("2026-11-30T02:00:00+00:00", "2026-11-30T02:08:00+00:00"),
        trials=trials,
    )
