import math

import pytest

from attention_tuner.kernel_templates.batch import Batch, Shape
from attention_tuner.kernel_templates.errors import TunerError
from attention_tuner.kernel_templates.gpu import TARGETS
from attention_tuner.kernel_templates.outcome import (
    BestConfig,
    CaseResult,
    Check,
    Environment,
    FullCheck,
    Regime,
    Timing,
    Verdict,
)
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.variant import Variant


def test_a_regime_is_read_back_and_unknown_ones_are_refused():
    regime = Regime("graph", "warm", "sustained")
    assert Regime.parse(str(regime)) == regime
    for text in ("graph", "cuda-cold-burst", "graph-cold"):
        with pytest.raises(TunerError):
            Regime.parse(text)


@pytest.mark.parametrize("samples", [(), (0.0,), (1.0, math.inf), (math.nan,)])
def test_a_timing_holds_only_real_times(samples: tuple[float, ...]):
    with pytest.raises(TunerError):
        Timing(samples, Regime("graph"))


@pytest.mark.parametrize("plan", [math.nan, math.inf, -0.001])
def test_planning_takes_a_real_time(plan: float):
    with pytest.raises(TunerError, match=f"at least 0, not {plan}"):
        Timing((1.0,), Regime("graph"), plan)
    assert Timing((1.0,), Regime("graph"), 0.0).plan_ms == 0


@pytest.mark.parametrize(("batch", "message"), [("garbage", "cannot read 'garbage'"), ("9x1@9", "is of bucket 8-8-64")])
def test_a_best_config_is_of_its_batch(batch: str, message: str):
    timing = Timing((1.0,), Regime("graph"))
    spec = AttentionSpec(32, 8, 128)
    environment = Environment("", "", "", "")
    of = (TARGETS["sm_90"], Variant.of("fused", 16, {}), timing, timing, Verdict.FAST, True, environment)
    BestConfig(Shape.of(spec, Batch.parse("1x1@9")), *of, batch="1x1@9", measured_at="")
    with pytest.raises(TunerError, match=message):
        BestConfig(Shape.of(spec, Batch.parse("1x1@9")), *of, batch=batch, measured_at="")


def test_the_median_and_quartiles_are_those_of_the_samples():
    timing = Timing((4.0, 1.0, 2.0, 3.0, 5.0), Regime("graph"))
    assert timing.median_ms == 3.0
    assert timing.quartiles_ms == (2.0, 4.0)
    assert Timing((2.0,), Regime("graph")).quartiles_ms == (2.0, 2.0)


def test_nan_does_not_pass_a_check():
    assert Check(1.0).passed
    assert not Check(1.01).passed
    assert not Check(math.nan).passed


def full_check(*cases: CaseResult) -> FullCheck:
    variant = Variant.of("unified", 16, {"block_m": 16})
    environment = Environment("h", "3.9", "2.13", "")
    return FullCheck(AttentionSpec(8, 2, 64), variant, "NVIDIA H200", environment, cases, "2026")


def test_a_full_check_passes_when_no_case_failed():
    passed, worse = CaseResult("a", "passed", 0.25), CaseResult("b", "passed", 0.5)
    unrun, failed = CaseResult("c", "not run", reason="no GPU"), CaseResult("d", "failed", reason="it hung")
    assert full_check(passed, worse, unrun).passed
    assert full_check(passed, worse, unrun).worst == worse
    assert (full_check(passed).unrun, full_check(passed, unrun).unrun) == (0, 1)
    assert full_check(CaseResult("a", "passed")).worst is None
    check = full_check(passed, failed, CaseResult("e", "failed", 9.0))
    assert not check.passed
    assert check.failure == failed
    with pytest.raises(TunerError, match="no case"):
        full_check(unrun)
    with pytest.raises(TunerError, match="'fine'"):
        CaseResult("a", "fine")
