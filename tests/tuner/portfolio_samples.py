"""Tuned shapes for the tests of what is decided from stored trials."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from attention_tuner.db import Setting, Store, TrialRecord
from attention_tuner.kernel_templates.batch import Batch, Shape
from attention_tuner.kernel_templates.gpu import Gpu
from attention_tuner.kernel_templates.heuristic import default_variant
from attention_tuner.kernel_templates.outcome import (
    BestConfig,
    CaseResult,
    Check,
    Environment,
    FullCheck,
    Outcome,
    Regime,
    Timed,
    Timing,
    Verdict,
)
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.variant import Variant

SPEC = AttentionSpec(8, 2, 64)
GPU = Gpu("NVIDIA H200", (9, 0), 132, 227 << 10, 60 << 20, "580.1")
ENVIRONMENT = Environment("hash", "3.9", "2.13", "580.1")
REGIME = Regime("graph")
SMALL, MIDDLE, LARGE = (Batch.parse(text) for text in ("8x1@1100", "8x1@2000", "8x1@4000"))
DEFAULT = default_variant(SPEC, SMALL, 16)


def unified(block_n: int, segments: int = 2, page_size: int = 16) -> Variant:
    """A variant whose kernel is told by its `block_n`; how many segments there are is only planned."""
    values = {"block_m": 16, "block_n": block_n, "num_segments": segments, "num_stages": 1, "num_warps": 1}
    return Variant.of("unified", page_size, values)


A, B, C = unified(16), unified(64), unified(128)
A2 = unified(16, segments=4)


def best_config(
    batch: Batch, variant: Variant, ms: float = 1.0, verdict: Verdict = Verdict.FAST,
    environment: Environment = ENVIRONMENT,
) -> BestConfig:
    return BestConfig(
        Shape.of(SPEC, batch), GPU, variant, Timing((ms,), REGIME), Timing((4 * ms,), REGIME), verdict, False,
        environment, str(batch), "2026-11-29T00:00:00+00:00")


def add_trials(
    store: Store, batch: Batch, times: Mapping[Variant, float], environment: Environment = ENVIRONMENT,
    regime: Regime = REGIME,
) -> None:
    add_outcomes(store, batch, *(Timed(v, Check(0.5), Timing((ms,), regime)) for v, ms in times.items()),
                 environment=environment, regime=regime)


def add_outcomes(
    store: Store, batch: Batch, *outcomes: Outcome, environment: Environment = ENVIRONMENT, regime: Regime = REGIME
) -> None:
    run_id = store.start_run({})
    for outcome in outcomes:
        setting = Setting(SPEC, batch, outcome.variant.page_size, GPU, regime)
        store.add_trial(TrialRecord(run_id, setting, environment, outcome))


def full_check(variant: Variant, state: str = "passed") -> FullCheck:
    case = CaseResult("large logits", state, 0.5, "" if state == "passed" else "row 3 is wrong")
    return FullCheck(SPEC, variant, GPU.name, ENVIRONMENT, (case,), "2026-11-30T00:00:00+00:00")


def tuned(folder: Path, times: Mapping[Batch, Mapping[Variant, float]], environment: Environment = ENVIRONMENT) -> str:
    """The path of a database with the trials of `times`, and each batch's fastest as its best config."""
    path = str(folder / "tuner.db")
    with Store.open(path) as store:
        for batch, by_variant in times.items():
            add_trials(store, batch, by_variant, environment)
            fastest = min(by_variant, key=by_variant.__getitem__)
            store.put_best(best_config(batch, fastest, by_variant[fastest], environment=environment))
    return path
