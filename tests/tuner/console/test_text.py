from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from cli_samples import BATCH, H100, SMALL_GPU, SPEC, WIDE_SPEC, config

from attention_tuner.db import ConfigTable
from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.heuristic import default_variant
from attention_tuner.kernel_templates.outcome import CaseResult, Failed, FullCheck
from attention_tuner.kernel_templates.task import Task
from attention_tuner.search_spaces.suites import suite
from attention_tuner.tuner.console import text as wording
from attention_tuner.tuner.settings import Progress, TaskResult

VARIANT = default_variant(SPEC, BATCH, 16)


def test_a_batch_of_many_lengths_is_shortened_to_their_range() -> None:
    assert wording.short(BATCH) == str(BATCH)
    many = Batch(((512, 16384), *((1, 4096 + 7 * i) for i in range(64))))
    assert wording.short(many) == "1x512@16384,64x1@4096..4537"
    alternating = Batch(((6, 20000), (1, 20000)) * 9)
    assert wording.short(alternating) == "9x6@20000,9x1@20000"
    assert all(len(wording.short(batch)) < 80 for batch in suite("hopper13"))


@pytest.mark.parametrize(
    ("ms", "text"), [(0.0123, "12.3 us"), (0.9, "900.0 us"), (1.5, "1.5 ms"), (123.4, "123 ms"), (2500.0, "2.5 s")])
def test_times_have_a_unit_that_reads_well(ms: float, text: str) -> None:
    assert wording.milliseconds(ms) == text


@pytest.mark.parametrize(("count", "text"), [(3.4, "3 s"), (99, "99 s"), (600, "10 min"), (9000, "2.5 h")])
def test_durations_have_a_unit_that_reads_well(count: float, text: str) -> None:
    assert wording.seconds(count) == text


def test_a_variant_in_words_names_every_value() -> None:
    words = wording.values(VARIANT).split()
    assert words[0] == "unified"
    assert "block_m=16" in words
    assert len(words) == 1 + len(VARIANT.values)


def test_progress_says_only_what_is_known() -> None:
    task, failed = Task(SPEC, BATCH, 16), Failed(VARIANT, "time", "hung")
    assert wording.progress_text(Progress(task, failed, 1, 9, None, None, Counter(), math.inf)) == ""
    none = Progress(task, failed, 1, 9, None, None, Counter(failed=1, wrong=2), 30.0)
    assert wording.progress_text(none) == "1 failed; 2 wrong; at most 30 s left"
    some = Progress(task, failed, 4, 9, 1.5, 3.0, Counter(timed=3, failed=1), math.inf)
    assert wording.progress_text(some) == "best 1.5 ms, 2.00x over the default; 1 failed"


def test_a_stored_config_in_a_row() -> None:
    stored = config(full_check=False)
    cells = wording.config_cells(stored)
    assert cells == (str(BATCH), "16", wording.values(stored.variant), "2 ms", "2.00x", "fast", "quick")
    assert wording.config_cells(config())[-1] == "full"


def test_an_answer_is_told_with_whose_it_is() -> None:
    stored = config(H100)
    tables = {"in your database": ConfigTable.of([stored]), "shipped": ConfigTable.of([], None, [stored])}
    for whose, table in tables.items():
        text = wording.origin(table.lookup(SPEC, BATCH, 16, H100))
        assert text.startswith(f"{whose}, tuned on {BATCH}, 2 ms there, 2.00x over the default")
    assert wording.origin(ConfigTable.of([]).lookup(SPEC, BATCH, 16, H100)).startswith("nothing tuned fits")
    answer = ConfigTable.of([stored]).lookup(SPEC, BATCH, 16, H100)
    lent = wording.origin(replace(answer, origin="file", lender="NVIDIA H200", loss=0.0234))
    assert lent.startswith("in a file, tuned on NVIDIA H200 on ")
    assert lent.endswith("; such answers lose 2.3% in the median")


def test_a_full_check_says_how_many_cases_it_leaves_open() -> None:
    passed, unrun = CaseResult("a", "passed"), CaseResult("b", "not run", reason="the GPU's memory does not hold it")
    check = FullCheck(SPEC, VARIANT, "NVIDIA H200", config().environment, (passed,), "2026")
    assert wording.full_check_result(check) == "passed"
    assert wording.full_check_result(replace(check, cases=(passed, unrun, unrun))) == "passed, 2 cases not run"
    failed = CaseResult("c", "failed", reason="it hung")
    assert wording.full_check_result(replace(check, cases=(passed, unrun, failed))) == "failed"


def test_a_speed_up_is_over_the_default_or_over_what_stood_in_for_it() -> None:
    assert wording.rival(TaskResult(Task(SPEC, BATCH, 16), baseline=VARIANT), H100) == "the default"
    other = VARIANT.replace(num_warps=8)
    failed = TaskResult(Task(SPEC, BATCH, 16), baseline=other)
    assert wording.rival(failed, H100) == f"{other.key()}, the default was not right and timed"
    wide = TaskResult(Task(WIDE_SPEC, BATCH, 16), baseline=other)
    assert wording.rival(wide, SMALL_GPU) == f"{other.key()}, the default cannot run"


def test_the_shares_of_several_tasks_are_of_the_time_of_all() -> None:
    task = Task(SPEC, BATCH, 16)
    one = TaskResult(task, tried=30, repeated=2, seconds=10.0, measuring_seconds=9.0, compiling_seconds=1.0)
    two = TaskResult(task, tried=30, seconds=30.0, measuring_seconds=3.0, compiling_seconds=25.0)
    assert wording.shares([one, two]) == (
        "variants were measured or checked for 30% of the time and all compiling processes were busy for 65%; "
        "1.5 variants a second, 2 of them by the result of a variant with the same code and launch")
    assert "same code" not in wording.shares([two])
    assert wording.shares([TaskResult(task)]) == "nothing was to be done"


def test_trials_that_are_not_used_are_told_with_the_reason() -> None:
    counts = Counter({"measured with another kernel source": 12, "measured with another driver": 1})
    assert wording.unused(counts) == [
        "12 stored trials were measured with another kernel source and are not used",
        "1 stored trial was measured with another driver and is not used",
    ]


def test_reasons_that_differ_in_numbers_only_are_one() -> None:
    reasons = Counter({
        ("failed", "compile", "out of resource: shared memory, Required: 262144, Hardware limit: 232448"): 2,
        ("failed", "compile", "out of resource: shared memory, Required: 294912, Hardware limit: 232448"): 3,
        ("failed", "check", "illegal access at 0x7f00a"): 1,
        ("failed", "time", "took more than 60 s of CPU time"): 1,
        ("wrong", "", "wrong result"): 4,
    })
    assert wording.grouped(reasons) == {
        ("failed", "compile", "out of resource: shared memory, Required: N, Hardware limit: N"): 5,
        ("failed", "check", "illegal access at 0x7f00a"): 1,
        ("failed", "time", "took more than 60 s of CPU time"): 1,
        ("wrong", "", "wrong result"): 4,
    }
    assert wording.grouped(Counter()) == {}


def costs(count: int, **of_each: list[int]) -> list[TaskResult]:
    results = [TaskResult(Task(SPEC, BATCH, 16)) for _ in range(count)]
    for name, numbers in of_each.items():
        for result, number in zip(results, numbers, strict=True):
            setattr(result, name, number)
    return results


def test_the_cost_of_a_shape_is_told_by_parts_of_the_run() -> None:
    results = costs(6, seconds=[30, 20, 9, 11, 8, 8], tried=[16] * 6, compiles=[16, 12, 4, 2, 1, 0],
                    shared=[0, 4, 12, 14, 15, 16])
    assert wording.cost_cells(results) == [
        ("1-2", "25.0", "16.0", "14.0", "2.0"),
        ("3-4", "10.0", "16.0", "3.0", "13.0"),
        ("5-6", "8.0", "16.0", "0.5", "15.5"),
    ]


def test_there_is_no_cost_of_what_was_known_before_or_needs_no_compiling() -> None:
    assert wording.cost_cells(costs(3, seconds=[9, 9, 9], tried=[5, 0, 0], compiles=[5, 0, 0])) == []
    assert wording.cost_cells(costs(2, seconds=[9, 9], tried=[5, 5])) == []


def test_crossing_is_told_where_it_was_asked_for() -> None:
    assert wording.crossing(costs(2)) == ""
    text = wording.crossing(costs(2, crossed=[3, 4], cross_seconds=[2, 5]))
    assert "7 more trials in 7 s" in text
