from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import attention_tuner.db.export as module
from attention_tuner.db import SCHEMA_VERSION, ConfigTable, Store, export_json, import_json
from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.errors import StoreError
from attention_tuner.kernel_templates.outcome import BestConfig, Regime, Verdict
from attention_tuner.kernel_templates.spec import AttentionSpec

SCHEMA = json.loads((Path(module.__file__).parent / "export_schema.json").read_text())
Make = Callable[..., BestConfig]


@pytest.fixture
def configs(make_config: Make) -> list[BestConfig]:
    """Two GPUs, two environments, two layers, every verdict."""
    first = make_config()
    small = AttentionSpec(8, 8, 64, "float16", scale=0.3)
    return [
        first,
        make_config("64x1@4096", verdict=Verdict.TIE, full_check=False),
        make_config("2x1@48", variant=replace(first.variant, page_size=128), verdict=Verdict.AMBIGUOUS,
                    shape=replace(first.shape, spec=small)),
        make_config(gpu=replace(first.gpu, name="NVIDIA H100"), environment=replace(first.environment, triton="3.6.0")),
    ]


@pytest.fixture
def exported(tmp_path: Path, configs: list[BestConfig]) -> Path:
    export_json(configs, tmp_path / "out.json")
    return tmp_path / "out.json"


def test_an_export_comes_back_exactly(exported: Path, configs: list[BestConfig]):
    assert import_json(exported) == configs
    assert import_json(str(exported)) == configs


def test_a_stream_gets_the_same(exported: Path, configs: list[BestConfig]):
    stream = io.StringIO()
    export_json(iter(configs), stream)
    assert stream.getvalue() == exported.read_text()


def test_an_export_of_nothing_is_an_export(tmp_path: Path):
    export_json([], tmp_path / "out.json")
    jsonschema.validate(json.loads((tmp_path / "out.json").read_text()), SCHEMA)
    assert import_json(tmp_path / "out.json") == []


def test_an_export_follows_the_schema(exported: Path):
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    document = json.loads(exported.read_text())
    jsonschema.validate(document, SCHEMA)
    assert SCHEMA["properties"]["schema_version"]["const"] == SCHEMA_VERSION
    del document["groups"][0]["configs"][0]["verdict"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, SCHEMA)


def test_an_export_can_be_read_by_people(exported: Path, configs: list[BestConfig]):
    group = json.loads(exported.read_text())["groups"][0]
    config = group["configs"][0]
    assert group["gpu"]["name"] == "NVIDIA H200"
    assert group["environment"]["triton"] == "3.9.0"
    assert config["variant"]["key"] == configs[0].variant.key()
    assert config["variant"]["values"]["block_m"] == 64
    assert config["time"]["median_ms"] == 0.25
    assert config["default_time"]["median_ms"] == 1.375
    assert config["speedup"] == 5.5
    assert config["verdict"] == "fast"


def test_export_import_and_store_give_the_same_lookups(tmp_path: Path, exported: Path, configs: list[BestConfig]):
    with Store.open(tmp_path / "other.db") as store:
        store.put_best(*import_json(exported))
        table = ConfigTable.from_store(store)
    original = ConfigTable.of(configs)
    assert table.id == original.id
    for config in configs:
        for batch in ("1x512@16384,63x1@32768", "64x1@4096", "4x700@700"):
            asked = (config.shape.spec, Batch.parse(batch), config.variant.page_size, config.gpu)
            assert table.lookup(*asked) == original.lookup(*asked)


def test_another_schema_version_is_refused(exported: Path):
    document = json.loads(exported.read_text())
    exported.write_text(json.dumps(document | {"schema_version": 2}))
    with pytest.raises(StoreError, match=r"schema version 2; expected .* schema version 1"):
        import_json(exported)


@pytest.mark.parametrize("text", ["{}", "[]", "3", "null", '{"128": {"BLOCK_M": 64}}'])
def test_foreign_json_is_refused(tmp_path: Path, text: str):
    (tmp_path / "in.json").write_text(text)
    with pytest.raises(StoreError, match=r"no export of tuned configs; expected .* schema version 1"):
        import_json(tmp_path / "in.json")


@pytest.mark.parametrize("part", [0.0, 0.3, 0.99])
def test_a_truncated_file_is_refused(exported: Path, part: float):
    text = exported.read_text().strip()
    exported.write_text(text[:int(len(text) * part)])
    with pytest.raises(StoreError, match="no complete JSON file"):
        import_json(exported)


def test_what_is_no_text_or_not_there_is_refused(tmp_path: Path):
    (tmp_path / "in.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(StoreError, match="no complete JSON file"):
        import_json(tmp_path / "in.json")
    with pytest.raises(StoreError, match="cannot be read: No such file"):
        import_json(tmp_path / "missing.json")
    with pytest.raises(StoreError, match="cannot be read: Is a directory"):
        import_json(tmp_path)


def change(document: Any, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for name in parents:
        document = document[int(name) if name.isdigit() else name]
    if value is None:
        del document[last]
    else:
        document[last] = value


CONFIG = "groups.0.configs.0"


@pytest.mark.parametrize(("path", "value", "message"), [
    ("groups", None, "'groups' is missing"),
    ("groups", 3, "not iterable"),
    ("groups.0.gpu.num_sms", None, "num_sms"),
    ("groups.0.gpu.name", 5, "holds a config that cannot be read"),
    ("groups.0.gpu.capability", "9.0", "is no int"),
    ("groups.0.environment.triton", 3.9, "is no str"),
    (f"{CONFIG}.verdict", "good", "'good'"),
    (f"{CONFIG}.full_check", 1, "is no bool"),
    (f"{CONFIG}.batch", None, "'batch' is missing"),
    (f"{CONFIG}.spec.num_kv_heads", "8", "holds a config that cannot be read"),
    (f"{CONFIG}.spec.num_kv_heads", 8.0, "does not name an attention layer"),
    (f"{CONFIG}.spec.num_kv_heads", 7, "not divisible"),
    (f"{CONFIG}.spec.colour", "red", "colour"),
    (f"{CONFIG}.bucket.short_kv", -1, "negative"),
    (f"{CONFIG}.variant.key", "unified", "does not name a variant"),
    (f"{CONFIG}.variant.values", {"block_m": 16}, "not those of the key"),
    (f"{CONFIG}.page_size", 32, "not those of the key"),
    (f"{CONFIG}.time.samples_ms", [], "at least one sample"),
    (f"{CONFIG}.time.regime.capture", "film", "'film'"),
])
def test_a_damaged_config_is_refused(exported: Path, path: str, value: Any, message: str):
    document = json.loads(exported.read_text())
    change(document, path, value)
    exported.write_text(json.dumps(document))
    with pytest.raises(StoreError, match=message) as caught:
        import_json(exported)
    assert "expected a file that `attention-tuner export` wrote, of schema version 1" in str(caught.value)


def test_a_failed_export_leaves_the_old_file(tmp_path: Path, exported: Path, configs: list[BestConfig],
                                             monkeypatch: pytest.MonkeyPatch):
    before = exported.read_bytes()

    def refuse(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(StoreError, match="No space left"):
        export_json(configs[:1], exported)
    assert exported.read_bytes() == before
    assert os.listdir(tmp_path) == [exported.name]


def test_an_export_replaces_the_file_that_a_link_names(tmp_path: Path, exported: Path, configs: list[BestConfig]):
    link = tmp_path / "link.json"
    link.symlink_to(exported)
    export_json(configs[:1], link)
    assert link.is_symlink()
    assert import_json(exported) == configs[:1]


def test_what_cannot_be_written_is_refused(tmp_path: Path, configs: list[BestConfig]):
    (tmp_path / "file").touch()
    for path, message in [(tmp_path, "no regular file"), ("/dev/null", "no regular file"),
                          (tmp_path / "missing" / "out.json", "No such file"),
                          (tmp_path / "file" / "out.json", "Not a directory")]:
        with pytest.raises(StoreError, match=message):
            export_json(configs, path)
    assert os.listdir(tmp_path) == ["file"]


def test_the_interpreters_times_say_so(tmp_path: Path, make_config: Make):
    config = make_config()
    config = replace(config, timing=replace(config.timing, regime=Regime("interpreter")))
    export_json([config], tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["groups"][0]["configs"][0]["time"]["regime"] == {
        "capture": "interpreter", "l2": "cold", "load": "burst"}
