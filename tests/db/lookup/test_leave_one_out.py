from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, replace

import pytest

from attention_tuner.db import Setting, Store, TrialRecord, load_table
from attention_tuner.db.lookup.leave_one_out import leave_one_out, measure_losses, pooled
from attention_tuner.db.losses import Loss
from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.heuristic import heuristic_variant
from attention_tuner.kernel_templates.outcome import BestConfig, Check, Timed, Timing

Make = Callable[..., BestConfig]
HYBRID, LIKE_IT, NEAR = "1x512@16384,63x1@32768", "1x513@16384,63x1@32768", "1x1024@16384,63x1@32768"
H200 = "NVIDIA H200"


def test_each_shape_is_left_out_in_turn(make_config: Make):
    fast = make_config().variant
    other = fast.replace(waves=4)
    configs = [make_config(HYBRID, fast), make_config(LIKE_IT, other), make_config(NEAR, other)]
    times = {HYBRID: {fast: 1.0, other: 1.1}, LIKE_IT: {fast: 2.1, other: 2.0}, NEAR: {fast: 4.0, other: 2.0}}
    found = leave_one_out(configs, lambda config: times[config.batch])
    assert [(each.config.batch, each.answer.source, each.answer.config) for each in found] == [
        (HYBRID, "bucket", configs[1]), (LIKE_IT, "bucket", configs[0]), (NEAR, "neighbour", configs[0])]
    assert [each.loss for each in found] == pytest.approx([0.1, 0.05, 1.0])
    assert [astuple(loss) for loss in pooled(found)] == [
        (H200, "bucket", 0.0, 2, pytest.approx(0.075)), (H200, "neighbour", 1.0, 1, pytest.approx(1.0))]


def test_a_variant_that_was_never_timed_has_no_loss(make_config: Make):
    alone = make_config()
    (found,) = leave_one_out([alone], lambda config: {config.variant: 1.0})
    assert (found.answer.source, found.served_ms, found.loss) == ("heuristic", None, None)
    assert pooled([found]) == []
    assert leave_one_out([alone], lambda config: {}) == []


def test_a_heuristic_loss_is_pooled_by_the_distance_of_the_nearest_tuned_bucket(make_config: Make):
    near, far = make_config("64x1@32768"), make_config("4x1@4096")
    heuristic = heuristic_variant(near.shape.spec, near.shape.bucket, 16, near.gpu)
    found = leave_one_out([near, far], lambda config: {heuristic: 1.5, config.variant: 1.0})
    distance = near.shape.bucket.distance(far.shape.bucket)
    assert [(each.answer.source, each.answer.distance) for each in found] == [("heuristic", distance)] * 2
    assert [astuple(loss) for loss in pooled(found)] == [(H200, "heuristic", 16.0, 2, pytest.approx(0.5))]


def test_layers_page_sizes_and_gpus_are_left_out_separately(make_config: Make):
    config = make_config()
    others = [replace(config, gpu=replace(config.gpu, name="NVIDIA H100")),
              replace(config, variant=replace(config.variant, page_size=32)),
              replace(config, shape=replace(config.shape, spec=replace(config.shape.spec, num_q_heads=64)))]
    found = leave_one_out([config, *others], lambda config: {config.variant: 1.0})
    assert {each.answer.source for each in found} == {"heuristic"}


def test_losses_are_measured_from_stored_trials(store: Store, make_config: Make,
                                                        make_trial: Callable[..., TrialRecord]):
    fast = make_config().variant
    other = fast.replace(waves=4)
    configs = [make_config(HYBRID, fast), make_config(NEAR, other), make_config("64x1@4096")]
    store.put_best(*configs)
    store.start_run({})
    for config, times in zip(configs, ({fast: 1.0, other: 1.25}, {fast: 3.0, other: 2.0}, {}), strict=True):
        regime = config.timing.regime
        setting = Setting(config.shape.spec, Batch.parse(config.batch), 16, config.gpu, regime)
        for variant, ms in times.items():
            store.add_trial(make_trial(Timed(variant, Check(0.5), Timing((ms,), regime)), setting=setting))
    assert store.times(configs[0]) == {fast: 1.0, other: 1.25}
    store.put_losses("NVIDIA H100", [Loss("NVIDIA H100", "bucket", 0.0, 1, 0.1)])
    store.put_losses(H200, [Loss(H200, "bucket", 0.0, 1, 0.1)])
    assert [astuple(loss) for loss in measure_losses(store, H200)] == [
        (H200, "neighbour", 1.0, 2, pytest.approx(0.375))]
    assert {loss.gpu_name: loss.source for loss in store.losses()} == {"NVIDIA H100": "bucket", H200: "neighbour"}
    answer = load_table(store.name).lookup(configs[0].shape.spec, Batch.parse("1x2048@16384,63x1@32768"), 16,
                                           configs[0].gpu)
    assert (answer.source, answer.loss) == ("neighbour", pytest.approx(0.375))
