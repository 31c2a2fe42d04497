from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import portfolio_samples as tuned
import pytest
from fakes import DEFAULT, FACTS, GPU, SPEC, TASK, Bench
from portfolio_samples import ENVIRONMENT, SMALL, A, B, C, add_outcomes, add_trials, best_config

from attention_tuner.db import Store
from attention_tuner.db.records import Setting, TrialRecord, utc_now
from attention_tuner.kernel_templates.batch import Batch, BatchBucket, Shape
from attention_tuner.kernel_templates.gpu import TARGETS, Gpu
from attention_tuner.kernel_templates.heuristic import candidates
from attention_tuner.kernel_templates.outcome import (
    BestConfig,
    Check,
    Environment,
    Failed,
    Regime,
    Timed,
    Timing,
    Verdict,
)
from attention_tuner.kernel_templates.task import Task
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.search_spaces.space import survey
from attention_tuner.tuner.leads import (
    NEIGHBOURS,
    WORTH_TRYING,
    first_variants,
    log_ratios,
    merged_ratios,
    neighbours,
    one_step,
    proven,
    rivals,
)
from attention_tuner.tuner.run import Run
from attention_tuner.tuner.settings import Settings

BUCKET = BatchBucket.of(TASK.batch)
VALID = survey(SPEC, BUCKET, TASK.page_size, GPU).valid
LIKELY = candidates(SPEC, BUCKET, TASK.page_size, GPU)
NEAR, FAR = (Task(SPEC, Batch.parse(text), TASK.page_size) for text in ("2x1@60", "64x1@9000"))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def timing(ms: float) -> Timing:
    return Timing((ms,), Regime("graph"))


def store_winner(bench: Bench, batch: str, variant: Variant) -> None:
    shape = Shape.of(SPEC, Batch.parse(batch))
    now = Environment("old", "", "", "")
    bench.store.put_best(
        BestConfig(shape, GPU, variant, timing(1), timing(1), Verdict.FAST, True, now, batch, utc_now()))


def compiled(run: Run, task: Task, *variants: Variant) -> None:
    assert run.builds is not None
    for variant in variants:
        run.builds.request(task, variant)
        run.builds.collect(1.0)


def test_the_nearest_winners_come_first_and_few_of_them(bench: Bench) -> None:
    batches = ("64x1@9000", "2x1@300", "2x1@60", "8x1@3000", "2x1@5000")
    for batch, variant in zip(batches, VALID[10:], strict=False):
        store_winner(bench, batch, variant)
    found = neighbours(TASK, bench.run(Settings()))
    assert len(found) == NEIGHBOURS
    assert found[:2] == (VALID[12], VALID[11])


def test_a_winner_that_cannot_run_here_is_none(bench: Bench) -> None:
    tma = next(v for v in VALID if v.as_dict().get("kv_load") == "tma")
    store_winner(bench, "2x1@60", tma)
    run = bench.run(Settings())
    assert neighbours(TASK, run) == (tma,)
    old = replace(TARGETS["sm_80"], name=GPU.name)
    assert neighbours(TASK, replace(run, gpu=old)) == ()


def test_the_default_leads_and_each_comes_once() -> None:
    first = first_variants(TASK, GPU, (LIKELY[0], VALID[3]), frozenset(VALID))
    assert first[:3] == (DEFAULT, LIKELY[0], VALID[3])
    assert len(set(first)) == len(first)
    assert set(LIKELY) & set(VALID) <= set(first)
    assert first_variants(TASK, GPU, (VALID[3],), frozenset(LIKELY))[1:] == tuple(LIKELY)


def test_variants_that_did_well_on_the_nearest_batch_come_first(bench: Bench) -> None:
    run = bench.run(Settings())
    a, b, c, slow = VALID[:4]
    run.timed[FAR] = {c: timing(1.0)}
    run.timed[NEAR] = {a: timing(2.0), b: timing(1.9), slow: timing(1.9 * WORTH_TRYING * 1.01)}
    run.timed[TASK] = {VALID[9]: timing(0.1)}
    run.timed[Task(SPEC, TASK.batch, 32)] = {VALID[9]: timing(0.1)}
    assert proven(TASK, run) == []
    compiled(run, NEAR, a, b, c, slow, VALID[9])
    assert proven(TASK, run) == [b, a, c]


def test_variants_that_did_not_compile_or_do_not_fit_are_not_proven(bench: Bench) -> None:
    run = bench.run(Settings())
    fused = [v for v in VALID if v.template == "fused"]
    broken, big = fused[0], next(v for v in fused if v.number("num_warps") != fused[0].number("num_warps"))
    run.timed[NEAR] = {broken: timing(1.0), big: timing(1.0)}
    outcomes = {
        broken: Failed(broken, "compile", "abort"),
        big: replace(FACTS, shared_bytes=GPU.shared_memory_bytes + 1),
    }
    bench.pool.facts = outcomes.__getitem__
    compiled(run, NEAR, broken, big)
    assert proven(TASK, run) == []


def test_without_compiling_nothing_is_proven(bench: Bench) -> None:
    run = replace(bench.run(Settings()), builds=None)
    run.timed[NEAR] = {VALID[0]: timing(1.0)}
    assert proven(TASK, run) == []


def test_the_ratios_are_to_the_best_of_the_nearest_batch_that_has_them(bench: Bench) -> None:
    run = bench.run(Settings())
    a, b, c = VALID[:3]
    run.timed[FAR] = {b: timing(5.0), c: timing(10.0)}
    run.timed[NEAR] = {a: timing(2.0), b: timing(3.0)}
    run.timed[TASK] = {VALID[9]: timing(0.1)}
    assert log_ratios(TASK, run) == pytest.approx({a: 0.0, b: math.log(1.5), c: math.log(2.0)})
    assert merged_ratios(TASK, [{}]) == {}


def test_ratios_are_found_in_the_store_where_a_batch_was_tuned(bench: Bench) -> None:
    run = bench.run(Settings())
    store_winner(bench, "2x1@60", VALID[0])
    assert log_ratios(TASK, run) == {}
    setting = Setting(SPEC, NEAR.batch, TASK.page_size, GPU, run.regime)
    for variant, ms in ((VALID[0], 1.0), (VALID[1], 4.0)):
        environment = run.executor.environment_of(variant.template, GPU)
        bench.store.add_trial(TrialRecord(1, setting, environment, Timed(variant, Check(0.5), timing(ms))))
    # A run reads the trials of a batch once.
    assert log_ratios(TASK, bench.run(Settings())) == pytest.approx({VALID[0]: 0.0, VALID[1]: math.log(4.0)})


BEST = best_config(SMALL, B)
FUSED = Variant.of("fused", 16, {
    "block_m": 16, "block_n": 32, "decode_block_m": 16, "decode_block_n": 32, "num_warps": 4, "num_stages": 2,
    "kv_load": "pointer", "order": "items", "waves": 2, "long_weight": 1, "schedule": "long_first",
    "partials": "float32", "reduction": "kernel"})


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "tuner.db") as opened:
        yield opened


def test_one_step_is_one_dimension_by_one_choice() -> None:
    # B has tiles of 16 rows and 64 keys, two segments, one stage and one warp.
    assert set(one_step(B, BEST, tuned.GPU)) == {
        B.replace(block_m=32), B.replace(block_n=32), B.replace(block_n=128), B.replace(num_segments=1),
        B.replace(num_segments=4), B.replace(num_stages=2), B.replace(num_warps=2)}
    near = set(one_step(FUSED, BEST, tuned.GPU))
    # Of dimensions without an order every other choice is one step away; tiles of long rows follow those of short ones.
    assert FUSED.replace(order="heads") in near
    assert FUSED.replace(block_m=32, decode_block_m=32) in near
    assert all(v.number("block_m") == v.number("decode_block_m") for v in near)
    small = Gpu("small", (8, 0), 10, 16 << 10, 1 << 20)
    assert len(set(one_step(B, BEST, small))) < 7


def test_the_default_and_the_runners_up_come_before_the_neighbours(store: Store) -> None:
    before = replace(ENVIRONMENT, driver="before")
    times = {tuned.DEFAULT: 4.0, A: 1.2, B: 1.0, C: 1.1, B.replace(num_warps=2): 1.3}
    add_trials(store, SMALL, times, environment=before)
    found = rivals(BEST, store, tuned.GPU, 20)
    assert found[:5] == [tuned.DEFAULT, B, C, A, B.replace(num_warps=2)]
    # The rest was never timed: what needs no other kernel than the winner's comes first.
    assert found[5] == B.replace(num_segments=1)
    assert len(found) == len(set(found))
    assert rivals(BEST, store, tuned.GPU, 3) == [tuned.DEFAULT, B, C]


def test_a_variant_that_failed_last_or_ran_on_another_batch_is_no_runner_up(store: Store) -> None:
    add_trials(store, SMALL, {A: 1.2, C: 1.1})
    add_outcomes(store, SMALL, Failed(C, "time", "an illegal access"))
    assert rivals(BEST, store, tuned.GPU, 3) == [tuned.DEFAULT, B, A]


def test_a_variant_that_cannot_run_here_is_no_rival(store: Store) -> None:
    gone = replace(A, template="gone")
    add_trials(store, SMALL, {gone: 0.5})
    assert gone not in rivals(BEST, store, tuned.GPU, 20)
