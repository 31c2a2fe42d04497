from __future__ import annotations

import time

import pytest
from cli_samples import BATCH, H100, SPEC

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.gpu import INTERPRETER
from attention_tuner.kernel_templates.heuristic import default_variant
from attention_tuner.kernel_templates.launch.tiles import cut_tiles
from attention_tuner.kernel_templates.outcome import Check, Failed, Regime, Timed, Timing
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.task import Task
from attention_tuner.kernel_templates.template import Body
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.tuner.costs import (
    COMPILE_S,
    HANG_FACTOR,
    HANG_S,
    INTERPRETED_TILE_S,
    JOB_LIMIT_S,
    LAUNCHES_PER_TRIAL,
    MEASURE_S,
    RACE_S,
    RECENT,
    Costs,
    Forecast,
    assumptions,
    fewest_seconds,
    forecast,
    interpreted_seconds,
    total_compiles,
    total_seconds,
)

TASK = Task(AttentionSpec(4, 2, 64), Batch.parse("1x1@40"), 16)
MIXED_TASK = Task(SPEC, BATCH, 16)
VARIANT, TWIN = (Variant.of("x", 16, {"y": number}) for number in (1, 2))
TIMED = Timed(VARIANT, Check(0.5), Timing((1.0,), Regime("graph")))
FAILED = Failed(VARIANT, "time", "hung")


def test_the_expected_cost_of_a_trial_is_that_of_the_latest_measured_ones():
    costs = Costs(TASK, is_interpreted=False)
    assert costs.trial_s == 0
    costs.note(TIMED, 100.0, 100.0)
    for _ in range(RECENT):
        costs.note(TIMED, 2.0, 1.0)
        costs.note(Timed(TWIN, TIMED.check, TIMED.timing, same_as=VARIANT), 0.01, 0.01)
    assert costs.trial_s == 2.0


def test_a_job_has_hung_that_takes_far_longer_than_the_slowest_that_did_not_fail():
    costs = Costs(TASK, is_interpreted=False)
    costs.note(FAILED, 50.0, 50.0)
    assert costs.limit_s == JOB_LIMIT_S
    costs.prepared_s = 1.0
    costs.note(TIMED, 2.0, 0.5)
    assert costs.limit_s == pytest.approx(HANG_S + HANG_FACTOR * 1.5)
    costs.note(TIMED, 90.0, 90.0)
    assert costs.limit_s == JOB_LIMIT_S


def test_the_interpreter_is_given_more_time():
    assert Costs(TASK, is_interpreted=True).limit_s > JOB_LIMIT_S


def of(task: Task = MIXED_TASK, trials: int = 10) -> Forecast:
    return forecast(task, H100, trials, "tpe", 0)


def test_the_default_is_among_as_many_trials_as_asked_for() -> None:
    found = of()
    assert found.trials[0] == default_variant(SPEC, BATCH, 16)
    assert len(set(found.trials)) == 10
    assert sum(found.valid_by_template.values()) == len(found.survey.valid)


def test_variants_that_share_a_kernel_are_compiled_once() -> None:
    found = of(trials=60)
    assert 1 < len(found.compiles) <= 60
    assert total_compiles([found, found]) == len(found.compiles)
    other = of(Task(SPEC, BATCH, 32), 60)
    assert total_compiles([found, other]) == len(found.compiles) + len(other.compiles)


def test_more_processes_help_until_measuring_takes_longer() -> None:
    found = of()
    assert total_seconds([found], 1) == len(found.compiles) * COMPILE_S
    assert total_seconds([found], 1000) == found.seconds == 10 * MEASURE_S + RACE_S


def test_the_interpreter_compiles_nothing_and_takes_longer_for_more_keys() -> None:
    found = forecast(MIXED_TASK, INTERPRETER, 3, "tpe", 0)
    assert found.compiles == frozenset()
    # Two KV heads; 64 rows in 4 tiles that see 36, 40, 44 and 48 keys, and two tiles that see 41: 2 key tiles each.
    assert interpreted_seconds(MIXED_TASK) == pytest.approx(2 * 12 * INTERPRETED_TILE_S)
    assert found.seconds == pytest.approx(3 * LAUNCHES_PER_TRIAL * interpreted_seconds(MIXED_TASK))
    long = Task(SPEC, Batch.parse("1x512@1024"), 16)
    assert interpreted_seconds(long) > 50 * interpreted_seconds(MIXED_TASK)


def test_the_estimate_states_its_assumptions() -> None:
    assert "launches" in assumptions(INTERPRETER, 2)
    assert "7 at a time" in assumptions(H100, 7)


@pytest.mark.parametrize("text", ["1x100000000@0", "65536x4096@4096", "1x1073741823@0"])
def test_the_estimate_of_a_batch_that_is_far_too_large_takes_no_time(text: str) -> None:
    task = Task(SPEC, Batch.parse(text), 16)
    start = time.perf_counter()
    assert interpreted_seconds(task) > 1e6
    assert time.perf_counter() - start < 0.5


@pytest.mark.parametrize("text", ["1x512@1024", "3x1@5000", "2x77@0", "1x7@9,4x300@11,1x7@9"])
@pytest.mark.parametrize("spec", [SPEC, AttentionSpec(7, 1, 128), AttentionSpec(20, 1, 128)])
def test_the_estimate_is_that_of_the_plan(spec: AttentionSpec, text: str) -> None:
    task = Task(spec, Batch.parse(text), 16)
    variant = default_variant(spec, task.batch, 16)
    body = Body(variant.number("block_m"), variant.number("block_n"))
    tiles = cut_tiles(task.batch, spec.group_size, body, body)
    planned = INTERPRETED_TILE_S * spec.num_kv_heads * int((-(-tiles.stop // body.block_n)).sum())
    assert interpreted_seconds(task) == pytest.approx(planned, rel=0.3)


def test_the_fewest_seconds_are_for_the_largest_task_times_their_number() -> None:
    long = Task(SPEC, Batch.parse("1x512@1024"), 16)
    two = fewest_seconds([MIXED_TASK, long], INTERPRETER, 30)
    assert two == 2 * 2 * LAUNCHES_PER_TRIAL * interpreted_seconds(long)
    assert fewest_seconds([MIXED_TASK, long], INTERPRETER, 1) == two / 2
    assert fewest_seconds([MIXED_TASK], H100, 30) > COMPILE_S + RACE_S
