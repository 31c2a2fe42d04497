from __future__ import annotations

import math

import pytest
from fakes import DEFAULT, TASK

from attention_tuner.kernel_templates.errors import InputError
from attention_tuner.kernel_templates.outcome import Check, Failed, Regime, Skipped, Timed, Timing, Wrong
from attention_tuner.tuner.settings import Budget, Settings, TaskResult


@pytest.mark.parametrize("name", ["trials", "ahead", "finalists", "samples"])
def test_a_count_below_one_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} must be at least 1, not 0"):
        Settings(**{name: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_an_impossible_time_is_refused(seconds: float) -> None:
    with pytest.raises(InputError, match="seconds must be a positive number"):
        Settings(seconds=seconds)


def test_a_result_counts_outcomes_and_reasons() -> None:
    result = TaskResult(TASK)
    timing = Timing((1.0,), Regime("graph"))
    for outcome in (
        Timed(DEFAULT, Check(0.1), timing), Wrong(DEFAULT, Check(2.0)), Wrong(DEFAULT, Check(math.nan)),
        Failed(DEFAULT, "compile", "too big"), Skipped(DEFAULT, "known"),
    ):  # fmt: skip
        result.count(outcome)
    assert result.outcomes == {"timed": 1, "wrong": 2, "failed": 1, "skipped": 1}
    assert result.reasons == {
        ("wrong", "", "wrong result"): 2, ("failed", "compile", "too big"): 1, ("skipped", "", "known"): 1,
    }  # fmt: skip
    assert result.skipped == 1


def test_trials_are_counted_by_the_second() -> None:
    assert TaskResult(TASK, tried=30, seconds=20.0).measured_per_second == 1.5
    assert TaskResult(TASK).measured_per_second == 0


def test_the_time_of_a_run_is_divided_evenly_among_the_tasks_that_are_left() -> None:
    budget = Budget(end=110.0)
    assert budget.task_end(10.0, tasks_left=4) == 35.0
    assert budget.task_end(35.0, tasks_left=3) == 60.0
    assert budget.before_cross(10.0).task_end(10.0, tasks_left=4) == 30.0


def test_a_share_of_a_tasks_time_is_kept_for_its_race_up_to_a_limit() -> None:
    budget = Budget()
    assert budget.search_end(100.0, task_end=140.0) == 130.0
    assert budget.search_end(100.0, task_end=1100.0) == 1080.0
    assert budget.race_end(130.0, task_end=140.0) == 140.0
    assert budget.race_end(130.0, task_end=math.inf) == 150.0


def test_no_stage_goes_on_after_the_end_of_the_run() -> None:
    budget = Budget(end=100.0)
    assert (budget.overrun_end(50.0), budget.overrun_end(95.0)) == (60.0, 100.0)
    assert (budget.verify_end(10.0), budget.verify_end(90.0)) == (70.0, 100.0)


@pytest.mark.parametrize(("seconds", "expected"), [(None, 2.0), (100.0, 2.0), (5.0, 0.5)])
def test_closing_a_command_takes_a_tenth_of_a_short_time(seconds: float | None, expected: float) -> None:
    assert Budget().seconds_to_close(seconds) == expected
