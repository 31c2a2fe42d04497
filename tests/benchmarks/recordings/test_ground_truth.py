from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from fakes import FACTS, GPU, Bench, environment
from grid_samples import DECODE, HYBRID, SMALL
from grids import read_grid
from ground_truth import (
    COMPILE_SECONDS,
    TRIAL_SECONDS,
    grid_tasks,
    ordered_codes,
    recording_of,
    setting_of,
    short_name,
    task_name,
)

from attention_tuner.db.records import TrialRecord
from attention_tuner.kernel_templates.errors import InputError
from attention_tuner.kernel_templates.outcome import Check, Failed, Regime, Timed, Timing
from attention_tuner.kernel_templates.registry import code_of
from attention_tuner.kernel_templates.task import Task
from attention_tuner.tuner.recording import Recorded

REGIME = Regime("graph")


def test_every_task_of_a_grid_has_its_variants() -> None:
    tasks = grid_tasks(SMALL, GPU)
    # On a decode batch `fused` has one body, so that variants which differ in the long tiles are the same.
    assert {(str(t.batch), t.page_size): len(v) for t, v in tasks.items()} == {
        ("2x1@48", 16): 8 + 2, ("1x16@32,2x1@40", 16): 8 + 4, ("2x1@48", 32): 8}  # fmt: skip


def test_trials_that_share_a_code_are_made_together_and_templates_evenly() -> None:
    declared = read_grid("hopper_llama_3_8b")
    tasks = grid_tasks(declared, GPU)
    codes = ordered_codes(tasks)
    trials = [trial for each in codes for trial in each]
    assert sorted(trials, key=repr) == sorted(((t, v) for t, vs in tasks.items() for v in vs), key=repr)
    assert all(len({code_of(variant) for _, variant in each}) == 1 for each in codes)
    assert len({code_of(each[0][1]) for each in codes}) == len(codes)
    # The first fifth is a sample of all.
    whole = Counter((v.template, v.page_size) for (_, v), *_ in codes)
    part = Counter((v.template, v.page_size) for (_, v), *_ in codes[: len(codes) // 5])
    assert all(abs(part[group] - count / 5) <= 1.5 for group, count in whole.items())
    assert codes == ordered_codes(tasks)


def test_a_recording_holds_the_stored_trials_and_their_costs(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    tasks = grid_tasks(SMALL, GPU)
    task, (one, two, *_) = next(iter(tasks.items()))
    with pytest.raises(InputError, match=r"nothing of grid 'small' is stored for sm_90"):
        recording_of(SMALL, GPU, bench.store, REGIME, environment)
    outcome = Timed(one, Check(0.5), Timing((1.0, 1.5), REGIME, 0.25))
    failed = Failed(two, "check", "hung")
    elsewhere = outcome.variant.replace(num_warps=8)
    first, second = bench.store.start_run({"seconds": 30.0}), bench.store.start_run({})
    for run_id, each in ((first, outcome), (second, failed), (second, Failed(elsewhere, "check", "not of the grid"))):
        setting = setting_of(task, GPU, REGIME)
        bench.store.add_trial(TrialRecord(run_id, setting, environment("unified", GPU), each, FACTS))
    # The later run found the code in the cache.
    for run_id, variant, seconds in ((first, one, 3.0), (second, two, 0.25)):
        bench.store.finish_run(run_id, {
            TRIAL_SECONDS: {task_name(task): {short_name(variant.key()): seconds / 100}},
            COMPILE_SECONDS: {short_name(code_of(one)): seconds},
        })
    made = recording_of(SMALL, GPU, bench.store, REGIME, environment)
    assert made.trials == {task: {
        one: Recorded(outcome, FACTS, 3.0, 0.03),
        two: Recorded(failed, FACTS, 3.0, 0.0025),
    }}
    assert (made.grid, made.gpu, made.regime) == ("small", GPU, REGIME)
    assert made.environments == {"unified": environment("unified", GPU)}
    assert made.recorded_at[0] < made.recorded_at[1]


def test_a_trial_whose_run_noted_no_cost_counts_as_the_median_one(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    task, variants = next(iter(grid_tasks(SMALL, GPU).items()))
    noted, killed = bench.store.start_run({}), bench.store.start_run({})
    for run_id, variant in zip((killed, noted, noted, noted), variants[:4], strict=True):
        outcome = Timed(variant, Check(0.5), Timing((1.0,), REGIME))
        bench.store.add_trial(TrialRecord(run_id, setting_of(task, GPU, REGIME), environment("unified", GPU), outcome,
                                          FACTS))
    with pytest.raises(InputError, match=r"seconds of variant 'unified:.*' is 0; accepted is a number above 0"):
        recording_of(SMALL, GPU, bench.store, REGIME, environment)
    seconds = {short_name(v.key()): cost for v, cost in zip(variants[1:4], (0.01, 0.02, 0.5), strict=True)}
    codes = {short_name(code_of(variants[0])): 2.0}
    bench.store.finish_run(noted, {TRIAL_SECONDS: {task_name(task): seconds}, COMPILE_SECONDS: codes})
    made = recording_of(SMALL, GPU, bench.store, REGIME, environment).trials[task]
    assert [made[v].seconds for v in variants[:4]] == [0.02, 0.01, 0.02, 0.5]
    assert {made[v].compile_s for v in variants[:4]} == {2.0}


def test_tasks_have_different_names_in_notes() -> None:
    tasks = [Task(SMALL.spec, batch, page) for batch in (DECODE, HYBRID) for page in (16, 32)]
    assert len(set(map(task_name, tasks))) == 4
