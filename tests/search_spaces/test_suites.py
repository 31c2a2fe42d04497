"""The suites that ship, and a user's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attention_tuner.kernel_templates.batch import BatchBucket
from attention_tuner.kernel_templates.errors import BatchError, ModelError
from attention_tuner.search_spaces.files import read_object, shipped
from attention_tuner.search_spaces.suites import named_batches, suite


@pytest.mark.parametrize("name", shipped("suites"))
def test_a_suite_says_what_it_is_and_tunes_no_bucket_twice(name: str) -> None:
    assert read_object(shipped("suites")[name]).keys() == {"name", "description", "batches"}
    assert read_object(shipped("suites")[name])["name"] == name
    batches = suite(name)
    assert len({BatchBucket.of(batch) for batch in batches}) == len(batches)


@pytest.mark.parametrize(
    ("name", "short", "long"),
    [("hybrid", True, True), ("decode", True, False), ("prefill", False, True), ("verify", True, False)],
)
def test_a_suite_holds_what_its_name_says(name: str, short: bool, long: bool) -> None:
    for batch in suite(name):
        assert (batch.has_part("short"), batch.has_part("long")) == (short, long)
    queries = {query_len for batch in suite(name) for query_len, _ in batch.sequences}
    assert (queries == {1}) == (name == "decode")
    assert (min(queries) > 1 and max(queries) <= 8) == (name == "verify")


def test_batches_of_hopper13_have_the_published_sizes() -> None:
    batches = named_batches("hopper13")
    assert str(batches["verify_32x6@20k"]) == "32x6@20000"
    assert str(batches["chunk_512@32k"]) == "1x512@32256"
    hybrid = batches["hybrid_512@16k_63dec"]
    assert (hybrid.num_seqs, hybrid.num_tokens, hybrid.sequences[0]) == (64, 575, (512, 16384))
    # 4,920,336,384 bytes were published for 32/8 heads of 128 in bf16: K and V of every token, q and the output.
    kv, rows = 2 * sum(hybrid.kv_lens) * 8 * 128 * 2, 2 * hybrid.num_tokens * 32 * 128 * 2
    assert kv + rows == 4_920_336_384


@pytest.mark.parametrize("batches", [["2x1@48", "1x4@44", "2x1@48"], {"a": "2x1@48", "b": "1x4@44", "c": "2x1@48"}])
def test_a_path_names_a_suite_of_ones_own(tmp_path: Path, batches: object) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"name": "mine", "description": "two", "batches": batches}))
    assert list(map(str, suite(str(path)))) == ["2x1@48", "1x4@44"]


@pytest.mark.parametrize("batches", [None, [], {}, "2x1@48", [1, 2], 7])
def test_a_file_that_is_no_suite_is_named(tmp_path: Path, batches: object) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"name": "mine", "batches": batches}))
    with pytest.raises(ModelError, match=r"mine\.json' is no suite: its 'batches' must be"):
        suite(str(path))


@pytest.mark.parametrize("text", ["2x1", "0x1@5", "1x0@5", "-1x1@5", ""])
def test_a_bad_batch_names_the_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"batches": ["2x1@48", text]}))
    with pytest.raises(BatchError, match=r"mine\.json': "):
        suite(str(path))
