from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from attention_tuner.db.merit import merit
from attention_tuner.kernel_templates.outcome import BestConfig, Regime, Timing

Make = Callable[..., BestConfig]


def test_the_better_comes_first_whatever_the_order(make_config: Make):
    def at(ms: float, regime: Regime = Regime("graph"), **changes: object) -> BestConfig:  # noqa: B008
        return make_config(timing=Timing((ms,), regime), **changes)

    ranked = [at(2.0), at(3.0), at(1.0, Regime("graph", "warm")), at(0.5, Regime("eager")), at(0.1, full_check=False)]
    assert sorted(random.Random(0).sample(ranked, len(ranked)), key=merit) == ranked


def test_what_takes_as_long_is_told_apart_by_what_it_is(make_config: Make):
    config = make_config()
    other = replace(config, variant=config.variant.replace(waves=4))
    assert merit(config) != merit(other)
    assert merit(config) == merit(replace(config, measured_at="2026-12-01T00:00:00+00:00"))
