from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attention_tuner.db import ConfigTable
from attention_tuner.db.lookup.folder import file_name, read_folder, write_folder
from attention_tuner.kernel_templates.batch import Batch, Shape
from attention_tuner.kernel_templates.errors import StoreError
from attention_tuner.kernel_templates.outcome import BestConfig
from attention_tuner.kernel_templates.spec import AttentionSpec

Make = Callable[..., BestConfig]
HYBRID, LIKE_IT = "1x512@16384,63x1@32768", "1x513@16384,63x1@32768"
NAME = ("head_size=128,num_q_heads=32,num_kv_heads=8,page_size=16,device_name=NVIDIA_H200,dtype=bfloat16,"
        "kv_dtype=auto.json")  # fmt: skip


@pytest.fixture
def configs(make_config: Make) -> list[BestConfig]:
    """Two configs of one bucket, and others of another environment, page size, or layer and GPU."""
    first = make_config(HYBRID)
    gpt = AttentionSpec(64, 8, 64, sliding_window=128, has_sinks=True, kv_dtype="float8_e4m3fn",
                        q_dtype="float8_e5m2")
    return [
        first,
        make_config(LIKE_IT, first.variant.replace(waves=4), full_check=False),
        make_config("64x1@4096", environment=replace(first.environment, triton="3.6.0")),
        make_config(variant=replace(first.variant, page_size=128)),
        make_config("2x1@48", shape=Shape.of(gpt, Batch.parse("2x1@48")), gpu=replace(first.gpu, name="NVIDIA H100")),
    ]


def test_a_folder_comes_back_exactly(tmp_path: Path, configs: list[BestConfig]):
    files = write_folder(configs, tmp_path / "out")
    assert len(files) == 3
    assert set(read_folder(tmp_path / "out")) == set(configs)
    assert ConfigTable.of(read_folder(tmp_path / "out")).id == ConfigTable.of(configs).id


def test_files_are_named_like_those_of_vllm(tmp_path: Path, configs: list[BestConfig]):
    assert NAME in [file.name for file in write_folder(configs, tmp_path)]
    assert file_name(configs[4].shape.spec, 16, configs[4].gpu) == (
        "head_size=64,num_q_heads=64,num_kv_heads=8,page_size=16,device_name=NVIDIA_H100,dtype=bfloat16,"
        "kv_dtype=float8_e4m3fn,sliding_window=128,has_sinks=True,q_dtype=float8_e5m2.json")


def test_whole_numbers_lead_to_the_best_config_of_a_bucket(tmp_path: Path, configs: list[BestConfig]):
    write_folder(configs, tmp_path)
    document = json.loads((tmp_path / NAME).read_text())
    assert [key for key in document if not key.isdecimal()] == [
        "version", "spec", "page_size", "levels", "measured_with"]
    level: Any = document
    for size in configs[0].shape.bucket.sizes:
        level = level[str(size)]
    assert level["variant"]["key"] == configs[0].variant.key()
    assert [other["batch"] for other in level["others"]] == [LIKE_IT]


def test_the_texts_do_not_depend_on_the_order_of_the_configs(tmp_path: Path, configs: list[BestConfig]):
    write_folder(configs, tmp_path / "a")
    for order in (configs[::-1], configs[2:] + configs[:2]):
        write_folder(order, tmp_path / "b")
        for file in (tmp_path / "a").iterdir():
            assert (tmp_path / "b" / file.name).read_bytes() == file.read_bytes()


def test_a_file_named_after_another_gpu_is_refused(tmp_path: Path, configs: list[BestConfig]):
    write_folder(configs[:1], tmp_path)
    (tmp_path / NAME).rename(tmp_path / NAME.replace("H200", "H100"))
    with pytest.raises(StoreError, match=r"NVIDIA_H100.* holds a config that belongs into .*NVIDIA_H200"):
        read_folder(tmp_path)


def test_a_folder_without_configs_is_refused(tmp_path: Path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(StoreError, match="holds no file of tuned configs"):
            read_folder(path)


@pytest.mark.parametrize(("change", "reason"), [
    (lambda d: d.update(version=2), "version is missing or not 1"),
    (lambda d: d.pop("version"), "version is missing or not 1"),
    (lambda d: d.update(colour=1), "'colour' is unknown"),
    (lambda d: d.pop("spec"), "'spec' is missing"),
    (lambda d: d.update(levels=["short_kv"]), "'levels' is"),
    (lambda d: d.update(page_size=32), r"'64\..*cannot be used"),
    (lambda d: d["64"].update(wide={}), "is no whole number"),
    (lambda d: d["64"].update({"64": 3}), "expected an object"),
    (lambda d: d["64"].update({"64": {"2097152": {"1": {"512": {"16384": {"1": {}}}}}}}), "measured_with"),
    (lambda d: d["measured_with"].clear(), "names entry 0 of 'measured_with', which has 0"),
])
def test_a_document_that_no_export_wrote_is_refused(tmp_path: Path, make_config: Make, change: Callable[[Any], object],
                                               reason: str):
    write_folder([make_config(HYBRID)], tmp_path)
    document = json.loads((tmp_path / NAME).read_text())
    change(document)
    (tmp_path / NAME).write_text(json.dumps(document))
    with pytest.raises(StoreError, match=reason):
        read_folder(tmp_path)


@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
def test_a_truncated_file_is_refused(tmp_path: Path, make_config: Make, part: float):
    write_folder([make_config(HYBRID)], tmp_path)
    text = (tmp_path / NAME).read_text().strip()
    (tmp_path / NAME).write_text(text[:int(part * len(text))])
    with pytest.raises(StoreError, match="no complete JSON file"):
        read_folder(tmp_path)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, make_config: Make):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be made"):
        write_folder([make_config()], tmp_path / "file" / "out")
