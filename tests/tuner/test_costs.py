import pytest

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.outcome import Check, Failed, Regime, Timed, Timing
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.task import Task
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.tuner.costs import HANG_FACTOR, HANG_S, JOB_LIMIT_S, RECENT, Costs

TASK = Task(AttentionSpec(4, 2, 64), Batch.parse("1x1@40"), 16)
VARIANT, TWIN = (Variant.of("x", 16, {"y": number}) for number in (1, 2))
TIMED = Timed(VARIANT, Check(0.5), Timing((1.0,), Regime("graph")))
FAILED = Failed(VARIANT, "time", "hung")


def test_the_next_trial_takes_what_the_last_ones_did_twins_left_out():
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
