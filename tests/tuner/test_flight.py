from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fakes import DEFAULT, TASK

from attention_tuner.kernel_templates.outcome import Check, Failed, JobError, Outcome, Regime, Timed, Timing
from attention_tuner.tuner.costs import Costs
from attention_tuner.tuner.flight import Flight
from attention_tuner.tuner.measure.jobs import MeasureJob
from attention_tuner.tuner.run import Executor

TIMED = Timed(DEFAULT, Check(0.5), Timing((1.0,), Regime("graph")))
FAILED = Failed(DEFAULT, "time", "it hung")
TOOK_S, BUSY_S = 4.0, 3.0


def flight(end: Callable[[Future[Outcome]], None], deadline: float = math.inf) -> Flight:
    """One whose job ended after `TOOK_S` seconds, as `end` says."""
    worker = SimpleNamespace(busy_s=1.0)
    executor = SimpleNamespace(worker=worker, clock=lambda: 10.0)
    future: Future[Outcome] = Future()
    worker.submit = lambda *_: future
    made = Flight(cast(Executor, executor), MeasureJob(TASK, DEFAULT, 3), 60.0, deadline)
    worker.busy_s += BUSY_S
    executor.clock = lambda: 10.0 + TOOK_S
    end(future)
    # What the search does until it looks is not the trial's.
    executor.clock = lambda: 100.0
    return made


def test_it_lands_with_its_outcome_and_what_it_took() -> None:
    noted: list[Any] = []
    costs = cast(Costs, SimpleNamespace(note=lambda *values: noted.append(values)))
    landed = flight(lambda future: future.set_result(TIMED))
    assert landed.land(costs) is TIMED
    assert noted == [(TIMED, TOOK_S, BUSY_S)]
    assert landed.busy_s == BUSY_S


@pytest.mark.parametrize(("deadline", "expected"), [(10.0 + TOOK_S, None), (10.1 + TOOK_S, FAILED)])
def test_no_variant_is_to_blame_for_a_budget_that_ran_out(deadline: float, expected: Failed | None) -> None:
    assert flight(lambda future: future.set_result(FAILED), deadline).land(Costs(TASK, False)) is expected


def test_what_never_had_its_turn_has_no_outcome() -> None:
    ended = flight(lambda future: future.set_exception(JobError("the card was taken")))
    with pytest.raises(JobError):
        ended.land(Costs(TASK, False))
    assert ended.busy_s == BUSY_S
