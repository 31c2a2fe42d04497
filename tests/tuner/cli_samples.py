"""What the tests of the commands share: a stored config, and running a command line in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from attention_tuner.db import Store
from attention_tuner.kernel_templates.batch import Batch, Shape
from attention_tuner.kernel_templates.gpu import INTERPRETER, Gpu
from attention_tuner.kernel_templates.heuristic import default_variant
from attention_tuner.kernel_templates.outcome import BestConfig, Environment, Regime, Timing, Verdict
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.tuner.console.app import main

SPEC = AttentionSpec(8, 2, 64, dtype="float16")
BATCH = Batch.parse("1x16@32,2x1@40")
# Too little shared memory for the default's tiles of this layer.
WIDE_SPEC = AttentionSpec(128, 1, 256)
# Smaller than any, so that a wide layer's default cannot run there.
SMALL_GPU = Gpu("NVIDIA L40S", (8, 9), 142, 64 << 10, 96 << 20, "580.1")
H100 = Gpu("NVIDIA H100", (9, 0), 132, 227 << 10, 50 << 20, "580.1")


def config(gpu: Gpu = INTERPRETER, batch: Batch = BATCH, ms: float = 2.0, full_check: bool = True) -> BestConfig:
    regime = Regime("interpreter" if gpu.is_interpreter else "graph")
    return BestConfig(
        shape=Shape.of(SPEC, batch),
        gpu=gpu,
        variant=default_variant(SPEC, batch, 16),
        timing=Timing((ms,), regime),
        default_timing=Timing((2 * ms,), regime),
        verdict=Verdict.FAST,
        full_check=full_check,
        environment=Environment("0123456789abcdef", "3.9.0", "2.13.0", gpu.driver),
        batch=str(batch),
        measured_at="2026-11-29T00:00:00+00:00",
    )


def database(folder: Path, *configs: BestConfig) -> str:
    """A database in `folder` that holds `configs`."""
    path = folder / "tuner.db"
    with Store.open(path) as store:
        store.put_best(*configs)
    return str(path)


class Lines:
    """Runs command lines in this process and keeps what each wrote."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = ""
        self.err = ""

    def run(self, *arguments: str) -> int:
        status = main(arguments)
        self.out, self.err = self._capsys.readouterr()
        return status
