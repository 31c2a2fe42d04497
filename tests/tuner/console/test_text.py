from __future__ import annotations

import math
from collections import Counter

import pytest
from cli_samples import BATCH, H100, SMALL_GPU, SPEC, WIDE_SPEC

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.heuristic import default_variant
from attention_tuner.kernel_templates.outcome import Failed
from attention_tuner.kernel_templates.task import Task
from attention_tuner.search_spaces.suites import suite
from attention_tuner.tuner.console import text
from attention_tuner.tuner.settings import Progress, TaskResult

VARIANT = default_variant(SPEC, BATCH, 16)
TASK = Task(SPEC, BATCH, 16)


def test_a_batch_of_many_lengths_is_shortened_to_their_range() -> None:
    assert text.batch_text(BATCH) == text.batch_text(str(BATCH)) == str(BATCH)
    many = Batch(((512, 16384), *((1, 4096 + 7 * i) for i in range(64))))
    assert text.batch_text(many) == text.batch_text(str(many)) == "1x512@16384,64x1@4096..4537"
    assert text.batch_text(Batch(((6, 20000), (1, 20000)) * 9)) == "9x6@20000,9x1@20000"
    assert all(len(text.batch_text(batch)) < 80 for batch in suite("hopper13"))


@pytest.mark.parametrize(
    ("ms", "shown"), [(0.0123, "12.3 us"), (0.9, "900.0 us"), (1.5, "1.5 ms"), (123.4, "123 ms"), (2500.0, "2.5 s")])
def test_times_have_a_unit_that_reads_well(ms: float, shown: str) -> None:
    assert text.milliseconds(ms) == shown


@pytest.mark.parametrize(("count", "shown"), [(3.4, "3 s"), (99, "99 s"), (600, "10 min"), (9000, "2.5 h")])
def test_durations_have_a_unit_that_reads_well(count: float, shown: str) -> None:
    assert text.seconds(count) == shown


@pytest.mark.parametrize(("count", "shown"), [(0, "0 B"), (512, "512 B"), (1536, "1.5 KiB"), (159 << 20, "159 MiB")])
def test_memory_has_a_unit_that_reads_well(count: int, shown: str) -> None:
    assert text.size_text(count) == shown


def test_counts_and_shares_are_put_in_words() -> None:
    assert (text.counted(1, "batch"), text.counted(2, "batch"), text.counted(0, "case")) == (
        "1 batch", "2 batches", "0 cases")
    assert (text.percent(0.0153), text.percent(0), text.percent(None)) == ("1.5%", "0.0%", "unknown")


def test_progress_shows_only_what_is_known() -> None:
    failed = Failed(VARIANT, "time", "hung")
    assert text.progress_text(Progress(TASK, failed, 1, 9, None, None, Counter(), math.inf)) == ""
    none = Progress(TASK, failed, 1, 9, None, None, Counter(failed=1, wrong=2), 30.0)
    assert text.progress_text(none) == "1 failed; 2 wrong; at most 30 s left"
    some = Progress(TASK, failed, 4, 9, 1.5, 3.0, Counter(timed=3, failed=1), math.inf)
    assert text.progress_text(some) == "best 1.5 ms, 2.00x over the default; 1 failed"


def test_a_speed_up_is_over_the_default_or_over_its_replacement() -> None:
    assert text.baseline_text(TaskResult(TASK, baseline=VARIANT), H100) == "the default"
    other = VARIANT.replace(num_warps=8)
    failed = text.baseline_text(TaskResult(TASK, baseline=other), H100)
    assert failed == f"{other.key()}, the default was not right and timed"
    wide = text.baseline_text(TaskResult(Task(WIDE_SPEC, BATCH, 16), baseline=other), SMALL_GPU)
    assert wide == f"{other.key()}, the default cannot run"


def test_reasons_that_differ_in_numbers_are_one() -> None:
    reasons = Counter({("failed", "compile", f"Required: {size}"): 1 for size in (131072, 262144)})
    reasons["failed", "time", "hung 3 s"] = 4
    assert text.grouped(reasons) == Counter(
        {("failed", "compile", "Required: N"): 2, ("failed", "time", "hung 3 s"): 4})
