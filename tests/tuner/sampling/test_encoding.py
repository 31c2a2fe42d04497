from __future__ import annotations

import random

import optuna
import pytest

from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.tuner.sampling.encoding import ByDimension, ByNumber, Encoding
from attention_tuner.tuner.sampling.points import Point, Space

SPACE = Space([
    *(Variant.of("one", 16, {"m": m, "load": load}) for m in (16, 64) for load in ("pointer", "tma")),
    *(Variant.of("two", 16, {"w": w}) for w in (1, 2, 4)),
])
POINTS: list[Point] = [("one", ("tma", 16)), ("one", ("pointer", 64)), ("two", (1,)), ("two", (4,))]
ENCODINGS = [
    ByNumber(POINTS), ByDimension(SPACE, True, random.Random(0)), ByDimension(SPACE, False, random.Random(0)),
]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("point", POINTS)
def test_the_parameters_of_a_point_suggest_it(encoding: Encoding, point: Point) -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    parameters = encoding.parameters(point)
    assert parameters is not None
    study.enqueue_trial(dict(parameters))
    trial = study.ask()
    assert encoding.suggest(trial) == point
    assert trial.params == parameters
    assert trial.distributions == encoding.distributions(parameters)


def test_a_number_names_only_the_points_that_it_counts() -> None:
    assert ByNumber(POINTS).parameters(("two", (2,))) is None


def test_what_other_templates_have_is_a_parameter_only_where_every_trial_has_all() -> None:
    _, conditional, unconditional = ENCODINGS
    assert set(conditional.parameters(POINTS[2]) or ()) == {"template", "two.w"}
    assert set(unconditional.parameters(POINTS[2]) or ()) == {"template", "two.w", "one.load", "one.m"}
