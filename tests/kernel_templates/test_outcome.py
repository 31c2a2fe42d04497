import math

import pytest

from attention_tuner.kernel_templates.errors import TunerError
from attention_tuner.kernel_templates.outcome import Check, Regime, Timing


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


def test_median_and_quartiles():
    timing = Timing((4.0, 1.0, 2.0, 3.0, 5.0), Regime("graph"))
    assert timing.median_ms == 3.0
    assert timing.quartiles_ms == (2.0, 4.0)
    assert Timing((2.0,), Regime("graph")).quartiles_ms == (2.0, 2.0)


def test_nan_does_not_pass_a_check():
    assert Check(1.0).passed
    assert not Check(1.01).passed
    assert not Check(math.nan).passed
