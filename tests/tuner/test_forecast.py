from __future__ import annotations

import pytest
from cli_samples import BATCH, H100, SPEC

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.default import default_variant
from attention_tuner.kernel_templates.gpu import INTERPRETER
from attention_tuner.tuner import forecast
from attention_tuner.tuner.forecast import Forecast
from attention_tuner.tuner.task import Task

TASK = Task(SPEC, BATCH, 16)


def of(task: Task = TASK, trials: int = 10) -> Forecast:
    return forecast.forecast(task, H100, trials, "tpe", 0)


def test_the_default_is_among_as_many_trials_as_asked_for() -> None:
    found = of()
    assert found.trials[0] == default_variant(SPEC, BATCH, 16)
    assert len(set(found.trials)) == 10
    assert sum(found.valid_by_template.values()) == len(found.survey.valid)


def test_variants_that_share_a_kernel_are_compiled_once() -> None:
    found = of(trials=60)
    assert 1 < len(found.compiles) <= 60
    assert forecast.total_compiles([found, found]) == len(found.compiles)
    other = of(Task(SPEC, BATCH, 32), 60)
    assert forecast.total_compiles([found, other]) == len(found.compiles) + len(other.compiles)


def test_more_processes_help_until_measuring_takes_longer() -> None:
    found = of()
    assert forecast.total_seconds([found], 1) == len(found.compiles) * forecast.COMPILE_S
    assert forecast.total_seconds([found], 1000) == found.seconds == 10 * forecast.MEASURE_S + forecast.RACE_S


def test_the_interpreter_compiles_nothing_and_takes_longer_for_more_keys() -> None:
    found = forecast.forecast(TASK, INTERPRETER, 3, "tpe", 0)
    assert found.compiles == frozenset()
    # Two KV heads; 64 rows in 4 tiles that see 36, 40, 44 and 48 keys, and two tiles that see 41: 2 key tiles each.
    assert forecast.interpreted_seconds(TASK) == pytest.approx(2 * 12 * forecast.INTERPRETED_TILE_S)
    assert found.seconds == pytest.approx(3 * forecast.LAUNCHES_PER_TRIAL * forecast.interpreted_seconds(TASK))
    long = Task(SPEC, Batch.parse("1x512@1024"), 16)
    assert forecast.interpreted_seconds(long) > 50 * forecast.interpreted_seconds(TASK)


def test_the_assumptions_are_told() -> None:
    assert "launches" in forecast.assumptions(INTERPRETER, 2)
    assert "7 at a time" in forecast.assumptions(H100, 7)
