from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attention_tuner.db import ConfigTable, read_misses, write_misses
from attention_tuner.kernel_templates.batch import Batch, BatchBucket
from attention_tuner.kernel_templates.errors import StoreError
from attention_tuner.kernel_templates.outcome import BestConfig

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


def test_no_misses_are_a_file_too(tmp_path: Path):
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
def test_what_is_no_file_of_misses_is_refused(path: Path, change: Callable[[Any], object], reason: str):
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(StoreError, match=reason):
        read_misses(path)


@pytest.mark.parametrize("text", ["", "[", "3", "{}"])
def test_what_is_no_json_object_is_refused(tmp_path: Path, text: str):
    (tmp_path / "in").write_text(text)
    with pytest.raises(StoreError, match="expected a file of misses"):
        read_misses(tmp_path / "in")
