from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fakes import DEFAULT, GPU, OTHER, SPEC, TASK, Bench, environment, landscape

from attention_tuner.db.records import Setting, utc_now
from attention_tuner.kernel_templates.batch import Batch, BatchBucket, Shape
from attention_tuner.kernel_templates.outcome import BestConfig, Failed, Regime, Timed, Timing, Verdict
from attention_tuner.kernel_templates.task import Task
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.search_spaces.space import survey
from attention_tuner.tuner.cross import cross, winners
from attention_tuner.tuner.run import open_run
from attention_tuner.tuner.settings import Budget, Settings, TaskResult
from attention_tuner.tuner.tune import tune

MORE = Task(SPEC, Batch.parse("5x1@900"), 16)
SETTINGS = Settings(trials=6, sampler="random")
VALID = survey(SPEC, BatchBucket.of(TASK.batch), 16, GPU).valid


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def won(bench: Bench, variant: Variant, batch: str = "64x1@9000", ms: float = 1.0) -> None:
    """Store that `variant` won on a batch which is not tuned here."""
    timing = Timing((ms,), Regime("graph"))
    shape = Shape.of(SPEC, Batch.parse(batch))
    bench.store.put_best(BestConfig(shape, GPU, variant, timing, timing, Verdict.FAST, False,
                                    environment(variant.template, GPU), batch, utc_now()))


def trials(bench: Bench, task: Task) -> dict[Variant, object]:
    setting = Setting(task.spec, task.batch, task.page_size, GPU, Regime("graph"))
    found = bench.store.known_trials(setting, bench.executor.environment_of).reusable
    return {record.outcome.variant: record.outcome for record in found}


def untried(bench: Bench, count: int) -> list[Variant]:
    tried = trials(bench, TASK)
    return [v for v in VALID if v not in tried][:count]


def crossed(bench: Bench, results: list[TaskResult], settings: Settings = SETTINGS) -> list[TaskResult]:
    bench.worker.measured.clear()
    with open_run(GPU, bench.store, settings, bench.executor) as run:
        cross(results, run)
    return results


def test_each_winner_is_tried_on_every_other_batch_of_its_layer_and_page(bench: Bench) -> None:
    results = tune([TASK, MORE, OTHER], GPU, bench.store, replace(SETTINGS, cross=True), bench.executor)
    best = {result.task: result.best for result in results}
    for task, others in ((TASK, (TASK, MORE)), (MORE, (TASK, MORE)), (OTHER, (OTHER,))):
        config = best[task]
        assert config is not None
        for other in others:
            assert isinstance(trials(bench, other)[config.variant], Timed)
    assert all(result.tried == SETTINGS.trials for result in results)


def test_a_variant_that_was_tried_is_not_tried_again(bench: Bench) -> None:
    results = tune([TASK], GPU, bench.store, SETTINGS, bench.executor)
    new = untried(bench, 2)
    for index, variant in enumerate(new):
        won(bench, variant, f"64x1@{9000 + index}")
    bench.worker.faults = lambda v: "an illegal access" if v == new[0] else ""
    (result,) = crossed(bench, results)
    assert set(bench.worker.measured) == set(new)
    assert result.crossed == 2
    assert result.cross_seconds > 0
    assert isinstance(trials(bench, TASK)[new[0]], Failed)
    bench.restart()
    crossed(bench, results)
    assert bench.worker.jobs == []


def test_the_winner_of_most_shapes_comes_first_as_it_runs_here(bench: Bench) -> None:
    often = Variant.of("fused", 16, {
        "block_m": 64, "block_n": 64, "decode_block_m": 16, "decode_block_n": 32, "num_warps": 4, "num_stages": 2,
        "kv_load": "pointer", "order": "heads", "waves": 2, "long_weight": 2, "schedule": "interleaved",
        "partials": "float32", "reduction": "kernel"})
    seldom = often.replace(order="items")
    won(bench, seldom, "1x512@1000,4x1@900")
    won(bench, often, "1x512@2000,4x1@900")
    won(bench, often, "1x512@4000,4x1@900")
    won(bench, replace(DEFAULT, template="gone"), "1x512@8000,4x1@900")
    here = {"block_m": 16, "block_n": 32, "long_weight": 1, "schedule": "long_first"}
    assert winners(TASK, bench.run(SETTINGS)) == [often.replace(**here), seldom.replace(**here)]


def test_a_batch_on_which_another_winner_is_faster_is_raced_again(bench: Bench) -> None:
    (result,) = tune([TASK], GPU, bench.store, SETTINGS, bench.executor)
    (new,) = untried(bench, 1)
    won(bench, new)
    before = result.best
    bench.restart(lambda v: 0.5 if v == new else landscape(v))
    crossed(bench, [result])
    assert before is not None
    assert result.best is not None
    assert (result.best.variant, result.best.verdict) == (new, Verdict.FAST)
    assert before.variant in bench.worker.races[0].variants
    assert result.best in bench.store.best_configs()


def test_a_batch_whose_winner_stays_is_not_raced_again(bench: Bench) -> None:
    (result,) = tune([TASK], GPU, bench.store, SETTINGS, bench.executor)
    before = result.best
    (new,) = untried(bench, 1)
    won(bench, new)
    bench.restart(lambda v: 50.0 if v == new else landscape(v))
    crossed(bench, [result])
    assert bench.worker.races == []
    assert result.best == before


def test_it_ends_with_the_time_of_the_run(bench: Bench) -> None:
    results = tune([TASK, MORE], GPU, bench.store, SETTINGS, bench.executor)
    for index, variant in enumerate(untried(bench, 40)):
        won(bench, variant, f"64x1@{9000 + index}")
    start = bench.clock()
    crossed(bench, results, replace(SETTINGS, seconds=10.0))
    assert 8 <= bench.clock() - start <= 10.5
    assert all(result.crossed > 3 for result in results)


def test_a_run_keeps_a_share_of_its_time_for_it(bench: Bench) -> None:
    bench.restart(cost=5.0)
    start = bench.clock()
    tune([TASK], GPU, bench.store, Settings(trials=500, seconds=100, sampler="random", cross=True), bench.executor)
    assert bench.clock() - start <= (1 - Budget().cross_share) * 100


def test_a_batch_for_which_nothing_was_found_is_left_alone(bench: Bench) -> None:
    bench.worker.faults = lambda v: "it does not run"
    results = tune([TASK], GPU, bench.store, replace(SETTINGS, cross=True), bench.executor)
    assert (results[0].best, results[0].crossed, results[0].cross_seconds) == (None, 0, 0)
