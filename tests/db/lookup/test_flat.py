from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from attention_tuner.db import Chain, ConfigTable
from attention_tuner.db.lookup.flat import read_table, table_rows, write_table
from attention_tuner.kernel_templates.batch import Batch, BatchBucket, Shape
from attention_tuner.kernel_templates.errors import StoreError
from attention_tuner.kernel_templates.outcome import BestConfig

Make = Callable[..., BestConfig]
HYBRID, LIKE_IT, NEAR = "1x512@16384,63x1@32768", "1x513@16384,63x1@32768", "1x1024@16384,63x1@32768"


@pytest.fixture
def configs(make_config: Make) -> list[BestConfig]:
    first = make_config(HYBRID)
    return [
        replace(first, full_check=False),
        make_config(LIKE_IT, first.variant.replace(waves=4)),
        make_config("64x1@4096", gpu=replace(first.gpu, name="NVIDIA H100")),
    ]


@pytest.fixture
def path(tmp_path: Path, configs: list[BestConfig]) -> Path:
    write_table(configs, tmp_path / "configs.tsv")
    return tmp_path / "configs.tsv"


def medians(config: BestConfig) -> BestConfig:
    return replace(config, timing=replace(config.timing, samples_ms=(config.timing.median_ms,)),
                   default_timing=replace(config.default_timing, samples_ms=(config.default_timing.median_ms,)))


def test_a_table_comes_back_with_medians(path: Path, configs: list[BestConfig]):
    assert set(read_table(path)) == set(map(medians, configs))
    rows = table_rows(path, lambda config: config)
    assert set(rows.configs([])) == set(map(medians, configs))


def test_a_table_answers_as_the_configs_do(path: Path, configs: list[BestConfig]):
    tables = [ConfigTable.of(configs), ConfigTable([table_rows(path, lambda config: config)])]
    for batch, config in itertools.product((HYBRID, LIKE_IT, NEAR, "1x512@16384,62x1@32768", "64x1@9"), configs):
        answers = [table.lookup(config.shape.spec, Batch.parse(batch), 16, config.gpu) for table in tables]
        assert len({(answer.variant, answer.source, answer.distance, answer.stale) for answer in answers}) == 1


def test_a_table_is_the_same_text_in_any_order(path: Path, configs: list[BestConfig], tmp_path: Path):
    for order in itertools.permutations(configs):
        write_table(order, tmp_path / "again")
        assert (tmp_path / "again").read_text() == path.read_text()


def read_without_us(text: str, gpu: str, spec: str, page: str, bucket: str) -> str:
    """The variant that the rule in the table's own head gives, by plain means."""
    lines = [line.split("\t") for line in text.splitlines() if not line.startswith("#")]
    rows = [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]
    rows = [row for row in rows if (row["gpu_name"], row["spec"], row["page_size"]) == (gpu, spec, page)]
    asked = [max(int(size), 0.5) for size in bucket.split("-")]

    def distance(row: dict[str, str]) -> float:
        sizes = [max(int(size), 0.5) for size in row["bucket"].split("-")]
        return sum(abs(math.log2(a / b)) for a, b in zip(asked, sizes, strict=True))

    skew = bucket.split("-")[-1]
    alike = [row for row in rows if bucket.startswith("0-") or row["bucket"].split("-")[-1] == skew]
    return min(alike, key=distance)["variant"]


def test_the_rule_in_its_head_gives_the_same_answers(configs: list[BestConfig], tmp_path: Path):
    # The nearer bucket has short sequences of another skew.
    skewed = "1x512@16384,1x1@131072,15x1@26000"
    configs = [*configs, replace(configs[0], batch=skewed, variant=configs[0].variant.replace(waves=8),
                                 shape=Shape.of(configs[0].shape.spec, Batch.parse(skewed)))]
    write_table(configs, tmp_path / "configs.tsv")
    table = ConfigTable.of(configs, chain=Chain(reach=9.0))
    sources: list[str] = []
    for batch in (HYBRID, "1x512@16384,62x1@32768", NEAR, "1x1024@16384,63x1@32768", "1x512@16384,17x1@32768"):
        bucket = BatchBucket.of(Batch.parse(batch))
        answer = table.lookup(configs[0].shape.spec, bucket, 16, configs[0].gpu)
        text = (tmp_path / "configs.tsv").read_text()
        found = read_without_us(text, "NVIDIA H200", configs[0].shape.spec.key(), "16", bucket.key())
        assert found == answer.variant.key()
        sources.append(answer.source)
    assert sources == ["bucket", "bucket", "neighbour", "neighbour", "neighbour"]


def test_a_row_that_cannot_be_read_is_refused_by_an_import_and_set_aside_by_a_lookup(
    path: Path, configs: list[BestConfig]
):
    path.write_text(path.read_text().replace("\tfused:page_size=16", "\tfused:page_size=sixteen", 1))
    with pytest.raises(StoreError, match=r"row 1 of table .* cannot be imported"):
        read_table(path)
    table = ConfigTable([table_rows(path, lambda config: config)])
    with pytest.warns(UserWarning, match=r"row 1 of table .*configs\.tsv") as caught:
        assert len(table.configs) == 2
    assert len(caught) == 1


@pytest.mark.parametrize(("old", "new", "reason"), [
    ("# attention-tuner table", "# another table", "no table of tuned configs of version 1"),
    ("version 1", "version 2", "no table of tuned configs of version 1"),
    ("rows 3", "rows 4", "holds 3 whole rows and not the 4"),
    ("spec\tpage_size", "page_size\tspec", "has other columns"),
    ("\tgraph-cold-burst\t", "", "row 1 of table .* cannot be imported: it has 20 values; expected 24"),
    ("\t16\tNVIDIA", "\nNVIDIA", "holds 6 whole rows"),
])
def test_what_is_no_whole_table_is_refused(path: Path, old: str, new: str, reason: str):
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(StoreError, match=reason):
        read_table(path)


def test_a_number_that_is_none_is_refused_by_an_import_and_set_aside_by_a_lookup(path: Path):
    path.write_text(path.read_text().replace("\t16\tNVIDIA", "\tsixteen\tNVIDIA", 1))
    with pytest.raises(StoreError, match=r"row 1 of table .* cannot be imported: .*sixteen"):
        read_table(path)
    table = ConfigTable([table_rows(path, lambda config: config)])
    with pytest.warns(UserWarning, match=r"row 1 of table .*sixteen"):
        assert len(table.configs) == 2


@pytest.mark.parametrize("part", [0.0, 0.2, 0.7, 0.99])
def test_a_table_that_is_cut_short_is_refused(path: Path, part: float):
    text = path.read_text()
    path.write_text(text[:int(len(text) * part)])
    with pytest.raises(StoreError):
        read_table(path)


def test_a_text_that_would_break_a_row_is_refused_and_nothing_written(tmp_path: Path, make_config: Make):
    odd = make_config(gpu=replace(make_config().gpu, name="NVIDIA\tH200"))
    with pytest.raises(StoreError, match="gpu_name 'NVIDIA\\\\tH200' cannot stand in a table"):
        write_table([odd], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
