from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import DEFAULT, GPU, SPEC, TASK, Bench, FakeWorker, environment

from attention_tuner.db.records import utc_now
from attention_tuner.kernel_templates.batch import BatchBucket, Shape
from attention_tuner.kernel_templates.heuristic import candidates
from attention_tuner.kernel_templates.outcome import BestConfig, Check, Failed, JobError, Regime, Timed, Timing, Verdict
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.tuner.final import CLEAR_RATIO, STAGES, Final, is_newest, keep, stored_best
from attention_tuner.tuner.measure.jobs import RaceResult
from attention_tuner.tuner.measure.race import compare
from attention_tuner.tuner.search import Search
from attention_tuner.tuner.settings import Settings

LIKELY = candidates(SPEC, BatchBucket.of(TASK.batch), TASK.page_size, GPU)
HEURISTIC = next(v for v in LIKELY if {"num_warps", "num_stages"} <= v.as_dict().keys()).replace(num_stages=3)
THIRD = HEURISTIC.replace(num_stages=1)


def searched(bench: Bench, screened: dict[Variant, float], finalists: int = 8) -> Search:
    """A search that has timed these variants, in milliseconds."""
    search = Search(TASK, bench.run(Settings(finalists=finalists)))
    search.timed = {v: Timing((ms,) * 5, Regime("graph")) for v, ms in screened.items()}
    return search


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_the_default_races_although_it_was_slow(bench: Bench) -> None:
    final = Final(searched(bench, {DEFAULT: 5.0, HEURISTIC: 1.0, THIRD: 1.05}), DEFAULT)
    bench.worker.ms = {DEFAULT: 5.0, HEURISTIC: 1.0, THIRD: 1.05}.__getitem__
    assert final.decide(math.inf) == (HEURISTIC, Verdict.FAST)
    assert bench.worker.races[0].variants == (DEFAULT, HEURISTIC, THIRD)
    assert final.timings[DEFAULT].median_ms == 5.0


def test_a_winner_of_the_search_that_is_slower_in_the_race_is_not_kept(bench: Bench) -> None:
    final = Final(searched(bench, {DEFAULT: 1.0, HEURISTIC: 0.9, THIRD: 0.95}), DEFAULT)
    bench.worker.ms = {DEFAULT: 1.0, HEURISTIC: 1.02, THIRD: 1.04}.__getitem__
    assert final.decide(math.inf) == (DEFAULT, Verdict.FAST)


def test_a_variant_that_was_far_slower_in_the_search_does_not_race(bench: Bench) -> None:
    final = Final(searched(bench, {DEFAULT: 1.0, HEURISTIC: 0.5, THIRD: 0.5 * CLEAR_RATIO * 1.01}), DEFAULT)
    bench.worker.ms = {DEFAULT: 1.0, HEURISTIC: 0.5}.__getitem__
    final.decide(math.inf)
    assert bench.worker.races[0].variants == (DEFAULT, HEURISTIC)


def test_no_more_than_the_finalists_race_beside_the_default(bench: Bench) -> None:
    variants = {HEURISTIC.replace(num_warps=w, num_stages=s): 1.0 + w / 1000 for w in (1, 2, 4, 8) for s in (1, 2, 3)}
    final = Final(searched(bench, {DEFAULT: 1.0, **variants}, finalists=3), DEFAULT)
    bench.worker.ms = lambda v: 1.0
    final.decide(math.inf)
    assert len(bench.worker.races[0].variants) == 4
    assert bench.worker.races[0].variants[0] == DEFAULT


def test_the_race_goes_on_until_it_is_clear_and_only_among_those_in_question(bench: Bench) -> None:
    final = Final(searched(bench, {DEFAULT: 1.0, HEURISTIC: 0.7, THIRD: 0.7}), DEFAULT)
    bench.worker.noise = 0.01
    bench.worker.ms = {DEFAULT: 1.0, HEURISTIC: 0.7, THIRD: 0.7005}.__getitem__
    decision = final.decide(math.inf)
    rounds = [race.rounds for race in bench.worker.races]
    assert decision is not None
    assert decision[1] is Verdict.AMBIGUOUS
    assert len(rounds) == STAGES
    assert rounds[1:] == [rounds[0], 2 * rounds[0]]
    assert len({race.seed for race in bench.worker.races}) == STAGES
    assert len(final.timings[HEURISTIC].samples_ms) == sum(rounds)


def test_those_clearly_beaten_leave_the_race_but_the_default_stays(bench: Bench) -> None:
    fourth = THIRD.replace(num_stages=2)
    final = Final(searched(bench, dict.fromkeys((DEFAULT, HEURISTIC, THIRD, fourth), 1.0)), DEFAULT)
    bench.worker.noise = 0.01
    bench.worker.ms = {DEFAULT: 2.0, HEURISTIC: 0.7, THIRD: 0.702, fourth: 1.0}.__getitem__
    final.decide(math.inf)
    assert set(bench.worker.races[0].variants) == {DEFAULT, HEURISTIC, THIRD, fourth}
    assert set(bench.worker.races[1].variants) == {DEFAULT, HEURISTIC, THIRD}


def test_without_time_only_what_is_far_faster_displaces_the_default(bench: Bench) -> None:
    now = bench.clock()
    near, far = ({DEFAULT: 1000.0, HEURISTIC: ms} for ms in (950.0, 500.0))
    assert Final(searched(bench, near), DEFAULT).decide(now + 1) == (DEFAULT, Verdict.AMBIGUOUS)
    assert Final(searched(bench, far), DEFAULT).decide(now + 1) == (HEURISTIC, Verdict.AMBIGUOUS)
    assert bench.worker.races == []
    assert bench.clock() == now


def test_with_little_time_fewer_race(bench: Bench) -> None:
    times = {DEFAULT: 100.0, HEURISTIC: 90.0, THIRD: 91.0}
    bench.worker.ms = times.__getitem__
    final = Final(searched(bench, times), DEFAULT)
    start = bench.clock()
    decision = final.decide(start + 3.5)
    assert bench.worker.races[0].variants == (DEFAULT, HEURISTIC)
    assert bench.clock() - start <= 3.5
    assert decision == (HEURISTIC, Verdict.FAST)


def test_a_race_on_a_gpu_in_an_unusual_state_is_never_clear(bench: Bench) -> None:
    final = Final(searched(bench, {DEFAULT: 5.0, HEURISTIC: 1.0}), DEFAULT)
    bench.worker.ms = {DEFAULT: 5.0, HEURISTIC: 1.0}.__getitem__
    bench.worker.sentinels = (4, 5, (0.1,) * 8)
    assert final.decide(math.inf) == (HEURISTIC, Verdict.AMBIGUOUS)
    assert final._search.result.discarded_blocks == 5
    bench.worker.sentinels = (4, 3, (0.1,) * 7)
    assert Final(searched(bench, {DEFAULT: 5.0, HEURISTIC: 1.0}), DEFAULT).decide(math.inf) == (HEURISTIC, Verdict.FAST)


def test_a_race_that_is_lost_leaves_the_decision_to_the_search(bench: Bench) -> None:
    bench.worker.fail_next_race = JobError("killed by SIGKILL")
    final = Final(searched(bench, {DEFAULT: 1.0, HEURISTIC: 0.5}), DEFAULT)
    assert final.decide(math.inf) == (HEURISTIC, Verdict.AMBIGUOUS)
    assert final.timings[HEURISTIC].median_ms == 0.5


def test_the_default_alone_ties_with_itself(bench: Bench) -> None:
    assert Final(searched(bench, {DEFAULT: 1.0}), DEFAULT).decide(math.inf) == (DEFAULT, Verdict.TIE)
    assert bench.worker.races == []


def test_times_of_another_regime_are_not_compared(bench: Bench) -> None:
    search = searched(bench, {DEFAULT: 1.0})
    eager = Timed(HEURISTIC, Check(0.1), Timing((0.1,) * 5, Regime("eager")))
    search.timed[HEURISTIC] = eager.timing
    assert Final(search, DEFAULT).decide(math.inf) == (DEFAULT, Verdict.TIE)


def test_the_kept_variant_is_not_slower_than_the_default_in_the_race(bench: Bench) -> None:
    bench.worker.noise = 0.02
    for shift in (0.98, 0.995, 1.0, 1.005, 1.02):
        bench.worker.ms = {DEFAULT: 1.0, HEURISTIC: shift, THIRD: shift * 1.001}.__getitem__
        final = Final(searched(bench, {DEFAULT: 1.0, HEURISTIC: 0.95, THIRD: 0.96}), DEFAULT)
        decision = final.decide(math.inf)
        assert decision is not None
        assert compare(final.timings[decision[0]], final.timings[DEFAULT]).median <= 0


def test_a_winner_of_a_near_batch_races_even_if_it_was_slow(bench: Bench) -> None:
    fourth = THIRD.replace(num_stages=2)
    search = searched(bench, {DEFAULT: 1.0, HEURISTIC: 0.5, THIRD: 0.9})
    search.neighbours = (THIRD, fourth)
    bench.worker.ms = {DEFAULT: 1.0, HEURISTIC: 0.5, THIRD: 0.9}.__getitem__
    Final(search, DEFAULT).decide(math.inf)
    assert bench.worker.races[0].variants == (DEFAULT, HEURISTIC, THIRD)


def test_the_simplest_of_variants_with_the_same_code_and_launch_races(bench: Bench) -> None:
    simple = HEURISTIC.replace(num_warps=1)
    twin = HEURISTIC.replace(num_warps=8)
    of_default = DEFAULT.replace(num_segments=1)
    search = searched(bench, dict.fromkeys((DEFAULT, of_default, HEURISTIC, simple, twin), 1.0))
    search.same_as = {simple: HEURISTIC, twin: HEURISTIC, DEFAULT: of_default}
    bench.worker.ms = lambda v: 1.0
    Final(search, DEFAULT).decide(math.inf)
    assert set(bench.worker.races[0].variants) == {DEFAULT, simple}


def test_the_race_has_a_process_of_its_own_and_other_work_is_done_during_it(bench: Bench) -> None:
    racer = FakeWorker(bench.clock)
    bench.executor = replace(bench.executor, racer=racer)
    times = {DEFAULT: 1.0, HEURISTIC: 0.7, THIRD: 0.7005}
    search = searched(bench, times)
    racer.ms, racer.noise = times.__getitem__, 0.01
    called: list[int] = []
    Final(search, DEFAULT).decide(math.inf, lambda: called.append(len(racer.races)))
    assert bench.worker.jobs == []
    assert len(racer.races) == STAGES
    assert called == [1]
    assert search.result.measuring_seconds > 0


def test_a_racer_that_does_not_start_in_time_leaves_the_decision_to_the_search(bench: Bench) -> None:
    bench.worker.start_cost = 60.0
    start = bench.clock()
    final = Final(searched(bench, {DEFAULT: 1.0, HEURISTIC: 0.5}), DEFAULT)
    assert final.decide(start + 20) == (HEURISTIC, Verdict.AMBIGUOUS)
    assert bench.clock() - start == pytest.approx(20)
    assert bench.worker.races == []


def test_a_default_that_is_far_faster_than_all_others_has_won_without_a_race(bench: Bench) -> None:
    final = Final(searched(bench, {DEFAULT: 1.0, HEURISTIC: 1.5, THIRD: 2.0}), DEFAULT)
    assert final.decide(math.inf) == (DEFAULT, Verdict.FAST)
    assert bench.worker.races == []


def test_a_default_whose_rivals_have_its_code_and_launch_ties(bench: Bench) -> None:
    search = searched(bench, {DEFAULT: 1.0, HEURISTIC: 1.0})
    search.same_as = {HEURISTIC: DEFAULT}
    assert Final(search, DEFAULT).decide(math.inf) == (DEFAULT, Verdict.TIE)
    assert bench.worker.races == []


@pytest.mark.parametrize("then", [None, JobError("killed by SIGKILL")])
def test_a_variant_that_fails_in_the_race_is_never_kept(bench: Bench, then: JobError | None) -> None:
    times = {DEFAULT: 1.0, HEURISTIC: 0.5, HEURISTIC.replace(num_warps=8): 0.5, THIRD: 0.52}
    search = searched(bench, times)
    search.same_as = {HEURISTIC.replace(num_warps=8): HEURISTIC}
    bench.worker.ms = times.__getitem__
    bench.worker.race_faults = lambda v: "crash" if v not in (DEFAULT, THIRD) or (then and v == THIRD) else ""
    decision = Final(search, DEFAULT).decide(math.inf)
    assert decision == ((THIRD, Verdict.FAST) if then is None else (DEFAULT, Verdict.TIE))
    assert set(search.timed) == ({DEFAULT, THIRD} if then is None else {DEFAULT})
    assert search.result.reasons["failed", "time", "crash"] == (2 if then is None else 3)


def test_a_default_that_is_lost_in_the_race_is_replaced(bench: Bench) -> None:
    search = searched(bench, {DEFAULT: 1.0, HEURISTIC: 0.5, THIRD: 0.52})
    bench.worker.ms = {HEURISTIC: 0.5, THIRD: 0.52}.__getitem__
    bench.worker.race_faults = lambda v: "crash" if v == DEFAULT else ""
    final = Final(search, DEFAULT)
    assert final.decide(math.inf) == (HEURISTIC, Verdict.FAST)
    assert final.baseline == search.baseline == HEURISTIC
    bench.worker.race_faults = lambda v: "crash"
    last = Final(search, HEURISTIC)
    assert last.decide(math.inf) is None
    assert search.timed == {}


def test_a_race_for_which_a_process_cannot_be_prepared_in_time_is_not_begun(bench: Bench) -> None:
    racer = FakeWorker(bench.clock)
    racer.prepare_cost = 8.0
    bench.executor = replace(bench.executor, racer=racer)
    search = searched(bench, {DEFAULT: 1.0, HEURISTIC: 0.95})
    search.costs.prepared_s = 8.0
    racer.ms = {DEFAULT: 1.0, HEURISTIC: 0.95}.__getitem__
    assert Final(search, DEFAULT).decide(bench.clock() + 8.5) == (DEFAULT, Verdict.AMBIGUOUS)
    assert racer.jobs == []
    assert Final(search, DEFAULT).decide(bench.clock() + 10) == (HEURISTIC, Verdict.FAST)


def test_waiting_for_the_gpu_does_not_count_as_measuring(bench: Bench) -> None:
    search = searched(bench, {DEFAULT: 1.0, HEURISTIC: 0.5})
    bench.worker.ms = {DEFAULT: 1.0, HEURISTIC: 0.5}.__getitem__
    bench.worker.wait_cost = 7.0
    Final(search, DEFAULT).decide(math.inf)
    assert 0 < search.result.measuring_seconds < 1


def test_an_unsteady_stage_decides_nothing_and_is_the_last(bench: Bench) -> None:
    times = {DEFAULT: 1.0, HEURISTIC: 0.7, THIRD: 0.7005}
    final = Final(searched(bench, times), DEFAULT)
    bench.worker.noise, bench.worker.ms = 0.01, times.__getitem__
    bench.worker.sentinels = (4, 5, (0.1,) * 8)
    decision = final.decide(math.inf)
    assert decision is not None
    assert decision[1] is Verdict.AMBIGUOUS
    assert len(bench.worker.races) == 1
    assert not final.has_raced(DEFAULT)


@pytest.mark.parametrize(("faster_ms", "is_kept"), [(0.4, True), (0.95, False)])
def test_few_sound_samples_keep_only_what_is_far_ahead(bench: Bench, faster_ms: float, is_kept: bool) -> None:
    final = Final(searched(bench, {DEFAULT: 1.0, HEURISTIC: faster_ms}), DEFAULT)
    few = {v: Timing((ms,) * 3, Regime("graph")) for v, ms in ((DEFAULT, 1.0), (HEURISTIC, faster_ms))}
    final._race = lambda *_: RaceResult(few, 4, 5, (0.1,) * 8)
    assert final.decide(math.inf) == (HEURISTIC if is_kept else DEFAULT, Verdict.AMBIGUOUS)
    assert final.timings == few


@pytest.fixture
def search(tmp_path: Path) -> Search:
    bench = Bench(tmp_path)
    search = Search(TASK, bench.run(Settings(trials=6, sampler="random")))
    search.try_variants(math.inf)
    return search


def best(search: Search, variant: Variant, ms: float = 0.5, verdict: Verdict = Verdict.FAST) -> BestConfig:
    timing = Timing((ms,), Regime("graph"))
    return BestConfig(Shape.of(TASK.spec, TASK.batch), GPU, variant, timing, timing, verdict, False,
                      environment(variant.template, GPU), str(TASK.batch), utc_now())


def test_a_stored_best_holds_in_its_environment_regime_and_batch(search: Search) -> None:
    store, config = search.run.store, best(search, DEFAULT)
    assert stored_best(search, DEFAULT, store.best_configs()) is None
    store.put_best(config)
    assert stored_best(search, DEFAULT, store.best_configs()) == config
    for other in (
        replace(config, environment=replace(config.environment, driver="before")),
        replace(config, batch="2x1@47"),
        replace(config, timing=Timing((0.5,), Regime("graph", "warm"))),
    ):
        store.put_best(other)
    # Another environment's took its place; those of another batch and of another regime stand beside it.
    assert stored_best(search, DEFAULT, store.best_configs()) is None
    assert len(store.best_configs()) == 3


def test_a_stored_best_that_has_failed_since_does_not_hold(search: Search) -> None:
    search.run.store.put_best(best(search, DEFAULT))
    search.mark_failed(Failed(DEFAULT, "time", "an illegal access"))
    baseline = search.baseline
    assert baseline is not None
    assert stored_best(search, baseline, search.run.store.best_configs()) is None


def test_a_stored_best_is_the_newest_while_nothing_was_tried_since(search: Search) -> None:
    config = best(search, DEFAULT)
    assert not is_newest(config, search)
    again = Search(TASK, search.run)
    again.reuse()
    assert is_newest(config, again)
    assert not is_newest(replace(config, measured_at="2020-01-01T00:00:00+00:00"), again)


def test_a_stored_best_that_did_not_race_stays_unless_it_is_clearly_beaten(search: Search) -> None:
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
