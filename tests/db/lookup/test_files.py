from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from attention_tuner.db import ConfigTable, Exported, Store, read_configs, write_configs
from attention_tuner.db.lookup.files import FORMATS, is_database, rows_of
from attention_tuner.db.losses import Loss
from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.errors import InputError, StoreError
from attention_tuner.kernel_templates.outcome import BestConfig

Make = Callable[..., BestConfig]
HYBRID, LIKE_IT = "1x512@16384,63x1@32768", "1x513@16384,63x1@32768"
ASKED = (HYBRID, LIKE_IT, "1x514@16384,63x1@32768", "1x2048@16384,63x1@32768", "64x1@9", "1x4096@0")


@pytest.fixture
def configs(make_config: Make) -> list[BestConfig]:
    first = make_config(HYBRID)
    return [
        first, make_config(LIKE_IT, first.variant.replace(waves=4)), make_config("64x1@4096", full_check=False),
        make_config(variant=replace(first.variant, page_size=128)),
        make_config("8x512@16384", gpu=replace(first.gpu, name="NVIDIA H100")),
    ]


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_comes_back_to_the_same_lookups(tmp_path: Path, configs: list[BestConfig], form: str):
    write_configs(Exported(configs), tmp_path / "out", form)
    back = read_configs(tmp_path / "out").configs
    assert len(back) == len(configs)
    rows, _ = rows_of(tmp_path / "out", lambda config: config)
    tables = [ConfigTable.of(configs), ConfigTable.of(back), ConfigTable([rows])]
    for batch, config, page_size in itertools.product(ASKED, configs, (16, 128)):
        answers = [table.lookup(config.shape.spec, Batch.parse(batch), page_size, config.gpu) for table in tables]
        assert len({(answer.variant, answer.source, answer.distance, answer.stale) for answer in answers}) == 1


def test_only_json_keeps_losses(tmp_path: Path, configs: list[BestConfig]):
    losses = [Loss("NVIDIA H200", "bucket", 0.0, 2, 0.01)]
    for form, kept in zip(FORMATS, (losses, []), strict=True):
        write_configs(Exported(configs, losses), tmp_path / form, form)
        assert read_configs(tmp_path / form).losses == kept
    assert rows_of(tmp_path / "json", lambda config: config)[1].losses == losses


def test_an_unknown_format_is_refused_before_anything_is_written(tmp_path: Path, configs: list[BestConfig]):
    with pytest.raises(InputError, match="unknown format 'xml'; accepted are json, folder"):
        write_configs(Exported(configs), tmp_path / "out", "xml")
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_there_is_told(tmp_path: Path):
    with pytest.raises(StoreError, match="cannot be read: No such file"):
        read_configs(tmp_path / "none")


def test_a_database_is_known_by_its_beginning(tmp_path: Path, configs: list[BestConfig]):
    Store.open(tmp_path / "a.db").close()
    write_configs(Exported(configs), tmp_path / "a.json")
    asked = ("a.db", "a.json", "none", ".")
    assert [is_database(str(tmp_path / name)) for name in asked] == [True, False, False, False]
    assert is_database("postgresql://host/name")
