from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attention_tuner.db import Setting, Store, TrialRecord
from attention_tuner.kernel_templates.batch import Batch, Shape
from attention_tuner.kernel_templates.gpu import Gpu
from attention_tuner.kernel_templates.outcome import (
    BestConfig,
    Check,
    Environment,
    Outcome,
    Regime,
    StaticFacts,
    Timed,
    Timing,
    Verdict,
)
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.variant import Variant

# Child processes are given the parent's path, and import `live_reader` by that name.
sys.path.append(str(Path(__file__).parent))

SPEC = AttentionSpec(32, 8, 128)
GPU = Gpu("NVIDIA H200", (9, 0), 132, 232448, 62914560, "580.1")
ENVIRONMENT = Environment("0123456789abcdef", "3.9.0", "2.13.0", "580.1")
COLD = Regime("graph")
UNIFIED = Variant.of("unified", 16, {"block_m": 16, "block_n": 32, "num_segments": 16, "num_warps": 4, "num_stages": 3})
FUSED = Variant.of("fused", 16, {
    "block_m": 64, "block_n": 64, "decode_block_m": 16, "decode_block_n": 32, "num_warps": 4, "num_stages": 2,
    "kv_load": "pointer", "order": "heads", "waves": 2, "long_weight": 1,
    "schedule": "long_first", "partials": "float32", "reduction": "kernel",
})


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "tuner.db") as opened:
        yield opened


@pytest.fixture
def make_config() -> Callable[..., BestConfig]:
    """Make a best config on an H200 for `batch`; keywords replace the other fields."""

    def make(batch: str = "1x512@16384,63x1@32768", variant: Variant = FUSED, **changes: Any) -> BestConfig:
        fields: dict[str, Any] = {
            "shape": Shape.of(SPEC, Batch.parse(batch)),
            "gpu": GPU,
            "variant": variant,
            "timing": Timing((0.25, 0.125, 0.1 + 0.2), COLD, 0.03),
            "default_timing": Timing((1.5, 1.25), COLD, 0.01),
            "verdict": Verdict.FAST,
            "full_check": True,
            "environment": ENVIRONMENT,
            "batch": batch,
            "measured_at": "2026-11-29T12:00:00+00:00",
        }
        return BestConfig(**fields | changes)

    return make


@pytest.fixture
def setting() -> Setting:
    return Setting(SPEC, Batch.parse("1x16@32,2x1@40"), 16, GPU, COLD)


@pytest.fixture
def make_trial(setting: Setting) -> Callable[..., TrialRecord]:
    """Make a trial of run 1 that timed `UNIFIED`; keywords replace fields."""

    def make(outcome: Outcome | None = None, **changes: Any) -> TrialRecord:
        timed = Timed(UNIFIED, Check(0.5, detail="row 3"), Timing((0.2, 0.1), COLD, 0.05))
        fields: dict[str, Any] = {
            "run_id": 1,
            "setting": setting,
            "environment": ENVIRONMENT,
            "outcome": outcome or timed,
            "facts": StaticFacts(65536, 128, 0, "wgmma", "abc"),
            "measured_at": "2026-11-29T12:00:00+00:00",
        }
        return TrialRecord(**fields | changes)

    return make
