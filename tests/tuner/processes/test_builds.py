from __future__ import annotations

from dataclasses import replace

from fakes import DEFAULT, FACTS, GPU, SPEC, TASK, Clock, FakePool

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.outcome import Failed
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.task import Task
from attention_tuner.tuner.processes.builds import Builds

TWIN = DEFAULT.replace(num_segments=2)
SAME_LAYER = Task(SPEC, Batch.parse("3x1@900"), TASK.page_size)
OTHER_LAYER = Task(AttentionSpec(16, 2, 64), TASK.batch, TASK.page_size)


def test_code_is_compiled_once_for_all_batches_of_a_layer_and_for_each_layer() -> None:
    pool = FakePool(Clock())
    builds = Builds(pool, GPU)
    builds.order(TASK, DEFAULT)
    builds.order(TASK, TWIN)
    builds.order(SAME_LAYER, TWIN)
    assert [job.variant for job in pool.submitted] == [DEFAULT]
    assert builds.result(SAME_LAYER, TWIN) is None
    builds.collect(1.0)
    assert builds.result(SAME_LAYER, TWIN) == FACTS
    assert builds.result(OTHER_LAYER, DEFAULT) is None
    builds.order(SAME_LAYER, DEFAULT)
    assert len(pool.submitted) == 1
    builds.order(OTHER_LAYER, DEFAULT)
    assert pool.submitted[1].spec == OTHER_LAYER.spec
    pool.facts = lambda variant: replace(FACTS, registers=7)
    builds.collect(1.0)
    assert builds.result(OTHER_LAYER, TWIN) == replace(FACTS, registers=7)
    assert builds.result(TASK, TWIN) == FACTS


def test_a_failure_is_of_the_variant_that_is_asked_about() -> None:
    pool = FakePool(Clock())
    pool.facts = lambda variant: Failed(variant, "compile", "abort")
    builds = Builds(pool, GPU)
    builds.order(TASK, DEFAULT)
    builds.collect(1.0)
    assert builds.result(TASK, TWIN) == Failed(TWIN, "compile", "abort")


def test_what_is_forgotten_can_be_ordered_again_and_what_is_being_compiled_need_not_be() -> None:
    pool = FakePool(Clock(), processes=1)
    builds = Builds(pool, GPU)
    other = DEFAULT.replace(num_warps=8)
    builds.order(TASK, DEFAULT)
    builds.order(TASK, other)
    pool.clock.spend(0.1)
    builds.forget()
    builds.order(TASK, DEFAULT)
    builds.order(TASK, other)
    assert [job.variant for job in pool.submitted] == [DEFAULT, other, other]
    pool.clock.spend(1)
    builds.collect(0)
    assert builds.result(TASK, DEFAULT) == builds.result(TASK, other) == FACTS


def test_it_is_said_for_whom_a_kernel_is_compiled() -> None:
    builds = Builds(FakePool(Clock()), GPU)
    assert builds.order(TASK, DEFAULT)
    assert not builds.order(TASK, DEFAULT)
    assert not builds.order(SAME_LAYER, TWIN)
    assert builds.order(OTHER_LAYER, DEFAULT)
