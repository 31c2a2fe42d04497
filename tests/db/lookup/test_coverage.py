from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attention_tuner.db import ConfigTable, read_misses, write_misses
from attention_tuner.db.answer import Answer, Chain
from attention_tuner.db.lookup.coverage import CachedAnswer, Coverage, require_question
from attention_tuner.kernel_templates.batch import Batch, BatchBucket
from attention_tuner.kernel_templates.errors import InputError, NotTunedError, StoreError
from attention_tuner.kernel_templates.outcome import BestConfig

Make = Callable[..., BestConfig]
HYBRID = "1x512@16384,63x1@32768"


def asked(config: BestConfig, source: str, count: int, exact: int = 0) -> CachedAnswer:
    made = CachedAnswer(Answer(config.variant, source), {}, None)  # pyright: ignore
    made.count, made.exact_count = count, exact
    return made


def test_lookups_are_counted_by_source_and_misses_are_kept(make_config: Make):
    config = make_config(HYBRID)
    table = ConfigTable.of([config], chain=Chain(reach=3.0))
    assert table.coverage() == Coverage()
    for query_len, times in ((512, 3), (513, 2), (1024, 5), (2048, 4)):
        batch = f"1x{query_len}@16384,63x1@32768"
        for _ in range(times):
            table.lookup(config.shape.spec, Batch.parse(batch), 16, config.gpu)
    table.lookup(config.shape.spec, Batch.parse(HYBRID), 32, config.gpu)
    table.lookup(config.shape.spec, config.shape.bucket, 16, config.gpu)
    found = table.coverage()
    assert found.counts == {"exact": 3, "bucket": 3, "neighbour": 9, "heuristic": 1}
    assert [(miss.source, miss.count) for miss in found.misses] == [
        ("neighbour", 5), ("neighbour", 4), ("heuristic", 1)]
    assert found.misses[0].question == (
        config.shape.spec, BatchBucket.of(Batch.parse("1x1024@16384,63x1@32768")), 16, config.gpu)
    assert found.misses[2].question[2] == 32
    assert table.coverage() == found


def test_a_question_that_a_strict_chain_refuses_is_a_miss(make_config: Make):
    config = make_config(HYBRID)
    table = ConfigTable.of([config], chain=Chain("bucket"))
    for _ in range(2):
        with pytest.raises(NotTunedError):
            table.lookup(config.shape.spec, Batch.parse("1x1024@16384,63x1@32768"), 16, config.gpu)
    found = table.coverage()
    assert (found.counts["neighbour"], [miss.count for miss in found.misses]) == (2, [2])


def test_the_most_frequent_misses_are_kept(make_config: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Coverage, "MISSES", 3)
    config = make_config(HYBRID)
    questions = [(config.shape.spec, config.shape.bucket, page, config.gpu) for page in range(16, 96, 16)]
    found = Coverage().plus({q: asked(config, "heuristic", n) for q, n in zip(questions, (1, 5, 2, 4, 3), strict=True)})
    assert [miss.count for miss in found.misses] == [5, 4, 3]
    assert found.counts["heuristic"] == 15
    more = found.plus({questions[4]: asked(config, "heuristic", 3), questions[1]: asked(config, "bucket", 9, exact=2)})
    assert [miss.count for miss in more.misses] == [6, 5, 4]
    assert more.counts == {"exact": 2, "bucket": 9, "neighbour": 0, "heuristic": 18}


def test_counting_continues_when_remembered_answers_are_dropped(make_config: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Coverage, "QUESTIONS", 4)
    config = make_config(HYBRID)
    table = ConfigTable.of([config])
    answers = {
        page: table.lookup(replace(config.shape.spec, num_q_heads=8 * page), config.shape.bucket, 16, config.gpu)
        for _ in range(2) for page in range(1, 11)
    }
    assert {answer.source for answer in answers.values()} == {"bucket", "heuristic"}
    found = table.coverage()
    assert sum(found.counts.values()) == 20
    assert [miss.count for miss in found.misses] == [2] * 9


def test_a_question_may_hold_a_bucket_and_numpy_integers(make_config: Make):
    config = make_config()
    for question in (config.shape.bucket, Batch.parse(config.batch)):
        require_question(config.shape.spec, question, np.int64(16), config.gpu)
    with pytest.raises(InputError, match=r"page size 16\.0, of type float; expected a whole number"):
        require_question(config.shape.spec, config.shape.bucket, 16.0, config.gpu)


Make = Callable[..., BestConfig]
HYBRID = "1x512@16384,63x1@32768"


@pytest.fixture
def path(tmp_path: Path, make_config: Make) -> Path:
    config = make_config(HYBRID)
    table = ConfigTable.of([config])
    for batch, page, times in ((HYBRID, 16, 9), ("3x1000@5000,17x2@40000,1x1@900000", 16, 2), ("64x1@4096", 32, 3)):
        for _ in range(times):
            table.lookup(config.shape.spec, Batch.parse(batch), page, config.gpu)
    assert write_misses(table.coverage(), tmp_path / "misses.json") == 2
    return tmp_path / "misses.json"


def test_misses_come_back_with_a_batch_of_their_bucket(path: Path, make_config: Make):
    first, second = read_misses(path)
    assert (first.page_size, first.count, first.source, str(first.batch)) == (32, 3, "heuristic", "64x1@4095")
    assert (second.page_size, second.count, second.source) == (16, 2, "heuristic")
    asked = Batch.parse("3x1000@5000,17x2@40000,1x1@900000")
    assert BatchBucket.of(second.batch) == BatchBucket.of(asked)
    assert (first.gpu_name, first.spec) == ("NVIDIA H200", make_config().shape.spec)
    document = json.loads(path.read_text())
    assert document["lookups"] == {"exact": 9, "bucket": 0, "neighbour": 0, "heuristic": 5}


def test_a_file_may_hold_no_misses(tmp_path: Path):
    assert write_misses(ConfigTable.of([]).coverage(), tmp_path / "none.json") == 0
    assert read_misses(tmp_path / "none.json") == []


@pytest.mark.parametrize(("change", "reason"), [
    (lambda d: d.update(misses_version=2), "'misses_version' is 2"),
    (lambda d: d.pop("misses"), "'misses' is missing"),
    (lambda d: d["misses"][1].pop("gpu"), r"misses\[1\]\.gpu' is missing"),
    (lambda d: d["misses"][1].update(batch="many"), r"misses\[1\]\.batch' cannot be used"),
    (lambda d: d["misses"][0].update(spec="x"), r"misses\[0\]\.spec' cannot be used"),
    (lambda d: d["misses"][0].update(source="luck"), "expected one of exact, bucket, neighbour, heuristic"),
    (lambda d: d["misses"][0].update(count=0), "count' is 0"),
])
def test_a_damaged_file_of_misses_is_refused(path: Path, change: Callable[[Any], object], reason: str):
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(StoreError, match=reason):
        read_misses(path)


@pytest.mark.parametrize("text", ["", "[", "3", "{}"])
def test_a_file_without_a_json_object_is_refused(tmp_path: Path, text: str):
    (tmp_path / "in").write_text(text)
    with pytest.raises(StoreError, match="expected a file of misses"):
        read_misses(tmp_path / "in")
