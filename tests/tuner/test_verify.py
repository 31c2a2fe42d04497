from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import DEFAULT, GPU, SPEC, TASK, Bench, environment, landscape

from attention_tuner.kernel_templates.batch import Batch, BatchBucket
from attention_tuner.kernel_templates.heuristic import candidates
from attention_tuner.kernel_templates.outcome import BestConfig, Environment, Verdict
from attention_tuner.kernel_templates.task import Task
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.tuner.leads import one_step
from attention_tuner.tuner.run import open_run
from attention_tuner.tuner.settings import Settings
from attention_tuner.tuner.tune import tune
from attention_tuner.tuner.verify import (
    BEATEN,
    CHANGED_TIME,
    ENTRANTS,
    HELD,
    LOST,
    UNDECIDED,
    Verified,
    retune,
    stale,
    verify,
)

MORE = Task(SPEC, Batch.parse("5x1@900"), 16)
SETTINGS = Settings(trials=8, sampler="random")
# What wins on both batches, for nothing comes near it; each search tries it early.
STAR = candidates(SPEC, BatchBucket.of(TASK.batch), 16, GPU)[0]


def steady(variant: Variant) -> float:
    return 1.0 if variant == STAR else 1.1 + landscape(variant)


def newer(template: str, gpu: object) -> Environment:
    return replace(environment(template, GPU), driver="590.2")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A bench on which two batches were tuned, and whose driver is another since."""
    bench = Bench(tmp_path, steady)
    tune([TASK, MORE], GPU, bench.store, SETTINGS, bench.executor)
    renew(bench)
    return bench


def renew(bench: Bench, ms: Callable[[Variant], float] = steady) -> None:
    bench.restart(ms)
    bench.executor = replace(bench.executor, environment_of=newer)


def verified(bench: Bench, settings: Settings = SETTINGS) -> list[Verified]:
    configs = stale(bench.store.best_configs(), GPU, newer)
    with open_run(GPU, bench.store, settings, bench.executor) as run:
        return verify(configs, run)


def winners(bench: Bench) -> dict[str, BestConfig]:
    return {config.batch: config for config in bench.store.best_configs()}


def test_a_winner_that_holds_is_stored_with_the_present_environment(bench: Bench) -> None:
    before = winners(bench)
    found = verified(bench)
    assert [each.state for each in found] == [HELD, HELD]
    assert [each.ratio for each in found] == pytest.approx([1.0, 1.0])
    after = winners(bench)
    for batch, config in after.items():
        assert config.variant == before[batch].variant == STAR
        assert config.environment == newer(config.variant.template, GPU)
        assert config.default_timing.median_ms == steady(DEFAULT)
        assert config.measured_at > before[batch].measured_at
    assert all(DEFAULT in race.variants and STAR in race.variants for race in bench.worker.races)
    assert len(bench.worker.measured) <= 2 * ENTRANTS
    assert stale(bench.store.best_configs(), GPU, newer) == []


def test_a_winner_that_is_beaten_has_moved_and_stays_stored(bench: Bench) -> None:
    before = winners(bench)
    renew(bench, lambda v: 0.97 if v == near else steady(v))
    near = next(one_step(STAR, before[str(TASK.batch)], GPU))
    found = {each.task: each for each in verified(bench)}
    assert found[TASK].state == BEATEN
    assert found[TASK].fastest == near
    assert found[TASK].ratio == pytest.approx(1.0)
    assert found[TASK].has_moved
    assert winners(bench)[str(TASK.batch)] == before[str(TASK.batch)]


def test_a_winner_that_is_far_behind_is_beaten_without_a_race_of_its_own(bench: Bench) -> None:
    renew(bench, lambda v: 9.0 if v == STAR else steady(v))
    found = {each.task: each for each in verified(bench)}
    assert found[TASK].state == BEATEN
    assert found[TASK].ratio == pytest.approx(9.0)


@pytest.mark.parametrize(("factor", "state"), [(1.04, HELD), (1.06, CHANGED_TIME), (0.9, CHANGED_TIME)])
def test_a_time_that_changed_by_more_than_a_twentieth_has_moved(bench: Bench, factor: float, state: str) -> None:
    renew(bench, lambda v: factor * steady(v))
    assert {each.state for each in verified(bench)} == {state}
    assert len(stale(bench.store.best_configs(), GPU, newer)) == (0 if state == HELD else 2)


def test_a_winner_that_is_wrong_or_cannot_run_any_more_is_lost(bench: Bench) -> None:
    gone = replace(winners(bench)[str(MORE.batch)], variant=replace(STAR, template="gone"))
    bench.store.put_best(gone)
    bench.worker.faults = lambda v: "wrong" if v == STAR else ""
    assert [each.state for each in verified(bench)] == [LOST, LOST]


def test_a_winner_that_fails_in_the_race_is_lost(bench: Bench) -> None:
    bench.worker.race_faults = lambda v: "an illegal access" if v == STAR else ""
    found = {each.task: each for each in verified(bench)}
    assert found[TASK].state == LOST


def test_an_equal_that_is_simpler_does_not_beat_it(bench: Bench) -> None:
    renew(bench, lambda v: 1.0)
    found = {each.task: each for each in verified(bench)}
    assert found[TASK].state == HELD
    assert found[TASK].fresh is not None
    assert (found[TASK].fresh.variant, found[TASK].fresh.verdict) == (STAR, Verdict.TIE)


def test_an_unsteady_gpu_decides_nothing(bench: Bench) -> None:
    renew(bench, lambda v: 1.0 if v == STAR else 1.05)
    bench.worker.sentinels = (9, 9, tuple([1.0] * 9))
    assert {each.state for each in verified(bench)} == {UNDECIDED}
    assert len(stale(bench.store.best_configs(), GPU, newer)) == 2


def test_the_next_run_verifies_what_the_time_did_not_suffice_for(bench: Bench) -> None:
    tune([Task(SPEC, Batch.parse(f"5x1@{2000 + i}"), 16) for i in range(4)], GPU, bench.store, SETTINGS,
         replace(bench.executor, environment_of=environment))
    renew(bench)
    states = [each.state for each in verified(bench, replace(SETTINGS, seconds=20.0))]
    assert set(states) == {HELD, UNDECIDED}
    left = len(stale(bench.store.best_configs(), GPU, newer))
    assert left == states.count(UNDECIDED)
    measured = len(bench.worker.measured)
    renew(bench)
    assert {each.state for each in verified(bench)} == {HELD}
    # Of the one that was interrupted, runners-up may be others than before.
    assert len(bench.worker.measured) + measured <= 6 * ENTRANTS + 2


def test_only_winners_that_moved_are_tuned_anew(bench: Bench) -> None:
    bench.worker.faults = lambda v: "it does not run" if v == STAR and bench.worker.jobs[-1].task == TASK else ""
    found = verified(bench)
    retune(found, GPU, bench.store, SETTINGS, bench.executor)
    by_task = {each.task: each for each in found}
    assert by_task[MORE].retuned is None
    retuned = by_task[TASK].retuned
    assert retuned is not None
    assert retuned.variant != STAR
    assert not by_task[TASK].has_moved
    assert winners(bench)[str(TASK.batch)] == retuned
    assert stale(bench.store.best_configs(), GPU, newer) == []
