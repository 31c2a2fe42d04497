from __future__ import annotations

import functools
import io
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from attention_tuner.db import (
    SCHEMA_VERSION,
    ConfigTable,
    Exported,
    Store,
    export_json,
    import_json,
    read_configs,
    write_configs,
)
from attention_tuner.db.engine import is_database
from attention_tuner.db.lookup import export as module
from attention_tuner.db.lookup.export import FORMATS, read_json
from attention_tuner.db.losses import Loss
from attention_tuner.kernel_templates.batch import Batch, Shape
from attention_tuner.kernel_templates.errors import InputError, StoreError
from attention_tuner.kernel_templates.outcome import BestConfig, Verdict
from attention_tuner.kernel_templates.spec import AttentionSpec

SCHEMA = json.loads((Path(module.__file__).parents[1] / "export_schema.json").read_text())
Make = Callable[..., BestConfig]


@pytest.fixture
def configs(make_config: Make) -> list[BestConfig]:
    """Two GPUs, two environments, two layers, every verdict."""
    first = make_config()
    small = AttentionSpec(8, 8, 64, "float16", "float8_e5m2", scale=0.3, q_dtype="float8_e4m3fn")
    return [
        first,
        make_config("64x1@4096", verdict=Verdict.TIE, full_check=False),
        make_config("2x1@48", variant=replace(first.variant, page_size=128), verdict=Verdict.AMBIGUOUS,
                    shape=Shape.of(small, Batch.parse("2x1@48"))),
        make_config(gpu=replace(first.gpu, name="NVIDIA H100"), environment=replace(first.environment, triton="3.6.0")),
    ]


@pytest.fixture
def exported(tmp_path: Path, configs: list[BestConfig]) -> Path:
    export_json(configs, tmp_path / "out.json")
    return tmp_path / "out.json"


def test_an_export_comes_back_exactly(exported: Path, configs: list[BestConfig]):
    assert len(import_json(exported)) == len(configs)
    assert set(import_json(exported)) == set(configs)
    assert import_json(str(exported)) == import_json(exported)


def test_the_text_has_a_line_for_each_config_in_a_fixed_order(exported: Path, configs: list[BestConfig]):
    text = exported.read_text()
    for order in (configs[::-1], iter(configs[1:] + configs[:1])):
        stream = io.StringIO()
        export_json(order, stream)
        assert stream.getvalue() == text
    stream = io.StringIO()
    export_json(configs[1:], stream)
    (gone,) = set(text.splitlines()) - set(stream.getvalue().splitlines())
    assert json.loads(gone.rstrip(","))["variant"]["key"] == configs[0].variant.key()


def test_an_export_may_be_empty(tmp_path: Path):
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


def test_another_schema_version_is_refused(exported: Path):
    document = json.loads(exported.read_text())
    for version in (2, True, 1.0, "1"):
        exported.write_text(json.dumps(document | {"schema_version": version}))
        with pytest.raises(StoreError, match=rf"schema version {version!r}; expected .* schema version 1"):
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


def test_a_file_that_is_missing_or_no_text_is_refused(tmp_path: Path):
    (tmp_path / "in.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(StoreError, match="no text in UTF-8; expected a file that `attention-tuner export` wrote"):
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
        document[int(last) if last.isdigit() else last] = value


CONFIG = "groups.0.configs.0"


@pytest.mark.parametrize(("path", "value", "message"), [
    ("groups", None, "'groups' is missing"),
    ("groups", 3, "'groups' is 3; expected a list"),
    ("groups.0", [], r"'groups\[0\]' is \[\]; expected an object"),
    ("groups.0.gpu.num_sms", None, r"'groups\[0\].gpu.num_sms' is missing"),
    ("groups.0.gpu.num_sms", 4.5, "num_sms' is 4.5; expected a whole number"),
    ("groups.0.gpu.num_sms", True, "num_sms' is True; expected a whole number"),
    ("groups.0.gpu.l2_bytes", 2**70, "l2_bytes' is 1180591620717411303424; expected a whole number"),
    ("groups.0.gpu.name", 5, "name' is 5; expected a text"),
    ("groups.0.gpu.name", "H200\ud800", "name' is .* lone surrogates"),
    ("groups.0.gpu.name", "H200\0", "name' is .* without null characters"),
    ("groups.0.gpu.name", " ", "gpu' cannot be used: a GPU needs a name"),
    ("groups.0.gpu.capability", "9.0", "capability' is '9.0'; expected a list"),
    ("groups.0.gpu.capability", [9], "expected a list of two numbers"),
    ("groups.0.environment.triton", 3.9, "triton' is 3.9; expected a text"),
    ("groups.0.environment.colour", "red", "environment.colour' is unknown; expected one of kernel_hash, triton"),
    (f"{CONFIG}.verdict", "good", "verdict' is 'good'; expected one of fast, tie, ambiguous"),
    (f"{CONFIG}.full_check", 1, "full_check' is 1; expected true or false"),
    (f"{CONFIG}.batch", None, "batch' is missing"),
    (f"{CONFIG}.batch", "garbage", "batch' cannot be used: cannot read 'garbage'"),
    (f"{CONFIG}.batch", "1x1@1", "batch' cannot be used: batch '1x1@1' is of bucket 1-1-2-0-0-0-1, not"),
    (f"{CONFIG}.spec.num_kv_heads", "8", "num_kv_heads' is '8'; expected a whole number"),
    (f"{CONFIG}.spec.num_kv_heads", 8.0, "num_kv_heads' is 8.0; expected a whole number"),
    (f"{CONFIG}.spec.num_kv_heads", 7, "spec' cannot be used: .* not divisible"),
    (f"{CONFIG}.spec.has_sinks", 0, "has_sinks' is 0; expected true or false"),
    (f"{CONFIG}.spec.scale", math.inf, "scale' is inf; expected a number"),
    (f"{CONFIG}.spec.colour", "red", "spec.colour' is unknown"),
    (f"{CONFIG}.bucket.short_kv", -1, "short_kv' is -1; expected a whole number from 0"),
    (f"{CONFIG}.variant.key", "unified", "key' cannot be used: .* does not name a variant"),
    (f"{CONFIG}.variant.values", {"block_m": 16}, "differ from its key"),
    (f"{CONFIG}.variant.values", {"block_m": 16.0}, "values.block_m' is 16.0"),
    (f"{CONFIG}.page_size", 32, "differ from its key"),
    (f"{CONFIG}.page_size", 16.0, "page_size' is 16.0"),
    (f"{CONFIG}.time.samples_ms", [], "samples_ms' cannot be used: .* at least one sample"),
    (f"{CONFIG}.time.samples_ms", "123", "samples_ms' is '123'; expected a list"),
    (f"{CONFIG}.time.samples_ms", [0.1, "1"], r"samples_ms\[1\]' is '1'; expected a number"),
    (f"{CONFIG}.time.samples_ms", [10**400], r"samples_ms\[0\]' is 1000.*; expected a number"),
    (f"{CONFIG}.time.plan_ms", math.nan, "plan_ms' is nan; expected a number from 0"),
    (f"{CONFIG}.time.plan_ms", -1, "plan_ms' is -1; expected a number from 0"),
    (f"{CONFIG}.time.median_ms", "1", "median_ms' is '1'; expected a number"),
    (f"{CONFIG}.time.regime.capture", "film", "regime' cannot be used: .*'film'"),
    (f"{CONFIG}.measured_at", "yesterday", "measured_at' is 'yesterday'; expected a time in UTC"),
    (f"{CONFIG}.measured_at", "2026-11-29T12:00:00", "measured_at' is .*; expected a time in UTC"),
])
def test_a_damaged_config_is_refused_by_name(exported: Path, path: str, value: Any, message: str):
    document = json.loads(exported.read_text())
    change(document, path, value)
    exported.write_text(json.dumps(document))
    with pytest.raises(StoreError, match=rf"out\.json' cannot be imported: .*{message}") as caught:
        import_json(exported)
    place = re.sub(r"\.([0-9]+)", r"[\1]", path)
    assert str(caught.value).split("'")[3].startswith(place.rpartition(".")[0])
    assert len(str(caught.value)) < 600


def leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    for name, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from leaves(each, (*place, name))


@pytest.mark.parametrize("value", [None, True, -1, 4.5, 2**70, math.nan, "x", "\ud800", [], {}])
def test_any_value_at_any_place_is_refused_or_can_be_stored(tmp_path: Path, configs: list[BestConfig], value: Any):
    export_json(configs[:1], tmp_path / "out.json")
    text = (tmp_path / "out.json").read_text()
    with Store.open(tmp_path / "a.db") as store:
        for *parents, last in [place for place in leaves(json.loads(text)) if place]:
            document = json.loads(text)
            functools.reduce(lambda each, name: each[name], parents, document)[last] = value
            (tmp_path / "in.json").write_text(json.dumps(document))
            try:
                found = import_json(tmp_path / "in.json")
            except StoreError:
                continue
            store.put_best(*found)
            assert set(found) <= set(store.best_configs())
            export_json(found, tmp_path / "again.json")
            assert import_json(tmp_path / "again.json") == found


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


def test_an_export_through_a_link_replaces_the_linked_file(tmp_path: Path, exported: Path, configs: list[BestConfig]):
    link = tmp_path / "link.json"
    link.symlink_to(exported)
    export_json(configs[:1], link)
    assert link.is_symlink()
    assert import_json(exported) == configs[:1]


def test_a_target_that_cannot_be_written_is_refused(tmp_path: Path, configs: list[BestConfig]):
    (tmp_path / "file").touch()
    for path, message in [(tmp_path, "no regular file"), ("/dev/null", "no regular file"),
                          (tmp_path / "missing" / "out.json", "No such file"),
                          (tmp_path / "file" / "out.json", "Not a directory")]:
        with pytest.raises(StoreError, match=message):
            export_json(configs, path)
    assert os.listdir(tmp_path) == ["file"]


LOSSES = [Loss("NVIDIA H200", "bucket", 0.0, 4, 0.0125), Loss("NVIDIA H200", "neighbour", 2.0, 3, -0.001),
          Loss("NVIDIA H100", "heuristic", 0.0, 1, 0.5)]


def test_losses_are_exported_with_the_configs_of_their_gpu(tmp_path: Path, configs: list[BestConfig]):
    export_json(configs, tmp_path / "out.json", reversed(LOSSES))
    jsonschema.validate(json.loads((tmp_path / "out.json").read_text()), SCHEMA)
    found = read_json(tmp_path / "out.json")
    assert (set(found.configs), set(found.losses)) == (set(configs), set(LOSSES))
    export_json([c for c in configs if c.gpu.name == "NVIDIA H100"], tmp_path / "out.json", LOSSES)
    assert read_json(tmp_path / "out.json").losses == LOSSES[2:]
    export_json(configs, tmp_path / "out.json")
    assert read_json(tmp_path / "out.json").losses == []


@pytest.mark.parametrize(("name", "value"), [
    ("source", "exact"), ("source", 3), ("upto", 3.5), ("shapes", 0), ("loss", -2), ("loss", None), ("colour", 1)])
def test_an_impossible_loss_is_refused(tmp_path: Path, configs: list[BestConfig], name: str, value: object):
    export_json(configs, tmp_path / "out.json", LOSSES)
    document = json.loads((tmp_path / "out.json").read_text())
    document["losses"][1][name] = value
    (tmp_path / "out.json").write_text(json.dumps(document))
    with pytest.raises(StoreError, match=r"losses\[1\]"):
        read_json(tmp_path / "out.json")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, SCHEMA)


Make = Callable[..., BestConfig]
HYBRID, LIKE_IT = "1x512@16384,63x1@32768", "1x513@16384,63x1@32768"
ASKED = (HYBRID, LIKE_IT, "1x514@16384,63x1@32768", "1x2048@16384,63x1@32768", "64x1@9", "1x4096@0")


@pytest.fixture
def alike(make_config: Make) -> list[BestConfig]:
    first = make_config(HYBRID)
    return [
        first, make_config(LIKE_IT, first.variant.replace(waves=4)), make_config("64x1@4096", full_check=False),
        make_config(variant=replace(first.variant, page_size=128)),
        make_config("8x512@16384", gpu=replace(first.gpu, name="NVIDIA H100")),
    ]


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_comes_back_to_the_same_lookups(tmp_path: Path, alike: list[BestConfig], form: str):
    write_configs(Exported(alike), tmp_path / "out", form)
    back = read_configs(tmp_path / "out").configs
    assert len(back) == len(alike)
    tables = [ConfigTable.of(alike), ConfigTable.of(back)]
    for batch, config, page_size in itertools.product(ASKED, alike, (16, 128)):
        answers = [table.lookup(config.shape.spec, Batch.parse(batch), page_size, config.gpu) for table in tables]
        assert len({(answer.variant, answer.source, answer.distance, answer.stale) for answer in answers}) == 1


def test_only_json_keeps_losses(tmp_path: Path, alike: list[BestConfig]):
    losses = [Loss("NVIDIA H200", "bucket", 0.0, 2, 0.01)]
    for form, kept in zip(FORMATS, (losses, []), strict=True):
        write_configs(Exported(alike, losses), tmp_path / form, form)
        assert read_configs(tmp_path / form).losses == kept


def test_an_unknown_format_is_refused_before_anything_is_written(tmp_path: Path, alike: list[BestConfig]):
    with pytest.raises(InputError, match="unknown format 'xml'; accepted are json, folder"):
        write_configs(Exported(alike), tmp_path / "out", "xml")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_is_reported(tmp_path: Path):
    with pytest.raises(StoreError, match="cannot be read: No such file"):
        read_configs(tmp_path / "none")


def test_a_database_is_recognised_by_its_first_bytes(tmp_path: Path, alike: list[BestConfig]):
    Store.open(tmp_path / "a.db").close()
    write_configs(Exported(alike), tmp_path / "a.json")
    asked = ("a.db", "a.json", "none", ".")
    assert [is_database(str(tmp_path / name)) for name in asked] == [True, False, False, False]
    assert is_database("postgresql://host/name")
