from __future__ import annotations

from collections import Counter

from cli_samples import BATCH

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.search_spaces.suites import suite
from attention_tuner.tuner.console import text


def test_a_batch_of_many_lengths_is_shortened_to_their_range() -> None:
    assert text.batch_text(BATCH) == text.batch_text(str(BATCH)) == str(BATCH)
    many = Batch(((512, 16384), *((1, 4096 + 7 * i) for i in range(64))))
    assert text.batch_text(many) == text.batch_text(str(many)) == "1x512@16384,64x1@4096..4537"
    assert text.batch_text(Batch(((6, 20000), (1, 20000)) * 9)) == "9x6@20000,9x1@20000"
    assert all(len(text.batch_text(batch)) < 80 for batch in suite("hopper13"))


def test_reasons_that_differ_in_numbers_are_one() -> None:
    reasons = Counter({("failed", "compile", f"Required: {size}"): 1 for size in (131072, 262144)})
    reasons["failed", "time", "hung 3 s"] = 4
    assert text.grouped(reasons) == Counter(
        {("failed", "compile", "Required: N"): 2, ("failed", "time", "hung 3 s"): 4})
