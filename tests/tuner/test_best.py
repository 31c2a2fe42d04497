from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import DEFAULT, GPU, TASK, Bench, environment

from attention_tuner.db.records import utc_now
from attention_tuner.kernel_templates.batch import Shape
from attention_tuner.kernel_templates.outcome import BestConfig, Failed, Regime, Timing, Verdict
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.tuner.best import is_newest, keep, stored_best
from attention_tuner.tuner.final import Final
from attention_tuner.tuner.run import Settings
from attention_tuner.tuner.search import Search


@pytest.fixture
def search(tmp_path: Path) -> Search:
    bench = Bench(tmp_path)
    search = Search(TASK, bench.run(Settings(trials=6, sampler="random")))
    search.explore(math.inf)
    return search


def best(search: Search, variant: Variant, ms: float = 0.5, verdict: Verdict = Verdict.FAST) -> BestConfig:
    timing = Timing((ms,), Regime("graph"))
    return BestConfig(Shape.of(TASK.spec, TASK.batch), GPU, variant, timing, timing, verdict, False,
                      environment(variant.template, GPU), str(TASK.batch), utc_now())


def test_a_stored_best_holds_in_its_environment_regime_and_batch(search: Search) -> None:
    store, config = search.run.store, best(search, DEFAULT)
    assert stored_best(search, DEFAULT) is None
    store.put_best(config)
    assert stored_best(search, DEFAULT) == config
    for other in (
        replace(config, environment=replace(config.environment, driver="before")),
        replace(config, batch="2x1@47"),
        replace(config, timing=Timing((0.5,), Regime("graph", "warm"))),
    ):
        store.put_best(other)
    # Another environment's took its place; those of another batch and of another regime stand beside it.
    assert stored_best(search, DEFAULT) is None
    assert len(store.best_configs()) == 3


def test_a_stored_best_that_has_failed_since_does_not_hold(search: Search) -> None:
    search.run.store.put_best(best(search, DEFAULT))
    search.disqualify(Failed(DEFAULT, "time", "an illegal access"))
    baseline = search.baseline
    assert baseline is not None
    assert stored_best(search, baseline) is None


def test_a_stored_best_is_the_newest_while_nothing_was_tried_since(search: Search) -> None:
    config = best(search, DEFAULT)
    assert not is_newest(config, search)
    again = Search(TASK, search.run)
    again.reuse()
    assert is_newest(config, again)
    assert not is_newest(replace(config, measured_at="2020-01-01T00:00:00+00:00"), again)


def test_what_did_not_race_stays_unless_it_is_clearly_beaten(search: Search) -> None:
    elsewhere = Variant.parse(DEFAULT.key()).replace(block_n=128, num_warps=8)
    final = Final(search, DEFAULT)
    final.decide(math.inf)
    assert final.decision is not None
    winner = final.decision[0]
    winner_ms = final.timings[winner].median_ms
    near, far = (best(search, elsewhere, ms=factor * winner_ms) for factor in (1.05, 1.5))
    search.run.store.put_best(near)
    assert keep(search, final) == near
    search.run.store.put_best(far)
    kept = keep(search, final)
    assert kept is not None
    assert kept.variant == winner
    assert search.run.store.best_configs() == [kept]
