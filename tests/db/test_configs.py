"""The shipped configs in db/configs: each may be served on its GPU, and was worth tuning."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from attention_tuner.db import ConfigTable, export_json, import_json
from attention_tuner.db.lookup.lookup import SHIPPED
from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.gpu import INTERPRETER
from attention_tuner.kernel_templates.outcome import BestConfig, Regime, Timing
from attention_tuner.kernel_templates.registry import templates, why_invalid

FILES = sorted(SHIPPED.glob("*.json"))
SCHEMA = json.loads((SHIPPED.parent / "export_schema.json").read_text())
# 64 configs (four layers, eight batches, two page sizes) are to stay within 300 KB.
BYTES_A_CONFIG = 4800

Make = Callable[..., BestConfig]


def faults(path: Path) -> list[str]:
    """Reasons why the file at `path` must not ship."""
    jsonschema.validate(json.loads(path.read_text()), SCHEMA)
    configs = import_json(path)
    found = [f"{config.batch} of {config.shape.spec.key()}, pages of {config.variant.page_size}: {fault}"
             for config in configs for fault in faults_of(config, path.stem)]
    questions = Counter((c.shape.spec, c.batch, c.variant.page_size, c.gpu.num_sms, c.timing.regime) for c in configs)
    found += [f"{count} configs for {question}" for question, count in questions.items() if count > 1]
    if not configs:
        found.append("it holds nothing")
    elif path.stat().st_size > BYTES_A_CONFIG * len(configs):
        found.append(f"it has {path.stat().st_size} bytes for {len(configs)} configs")
    return found


def faults_of(config: BestConfig, name: str) -> list[str]:
    """Reasons why `config` must not ship in the file `name`."""
    found = [f"it is of {config.gpu.name}"] if config.gpu.slug != name else []
    if config.variant.template not in templates():
        return [*found, f"template {config.variant.template} is not installed"]
    invalid = why_invalid(config.variant, config.shape.spec, config.gpu)
    if invalid:
        return [*found, invalid]
    # Quartiles overlap if two times differ by noise only.
    if config.timing.quartiles_ms[0] > config.default_timing.quartiles_ms[1]:
        found.append("it is slower than the default")
    asked = (config.shape.spec, Batch.parse(config.batch), config.variant.page_size, config.gpu)
    answer = ConfigTable.of([], None, [config]).lookup(*asked)
    if (answer.source, answer.origin, answer.config) != ("exact", "shipped", config):
        found.append("it does not answer for the batch that it was tuned on")
    return found


def test_the_folder_holds_exports_and_a_readme():
    assert {path.suffix for path in SHIPPED.iterdir()} <= {".json", ".md"}
    assert "export --gpu" in (SHIPPED / "README.md").read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_config_of_a_file_may_ship(path: Path):
    assert faults(path) == []


def test_a_good_file_has_no_faults(tmp_path: Path, make_config: Make):
    tie = Timing((1.25, 1.5, 1.5), Regime("graph"))
    export_json([make_config(), make_config("64x1@4096", timing=tie)], tmp_path / "NVIDIA_H200.json")
    assert faults(tmp_path / "NVIDIA_H200.json") == []


@pytest.mark.parametrize(("changes", "fault"), [
    ({"gpu": {"name": "NVIDIA H100"}}, "it is of NVIDIA H100"),
    ({"variant": {"template": "gone"}}, "template gone is not installed"),
    ({"variant": {"page_size": 24}}, "the page size is no multiple of 16"),
    ({"variant": {"values": (("block_m", 64),)}}, "its dimensions are not the template's"),
    ({"gpu": {"capability": (8, 0), "shared_memory_bytes": 1024}}, "shared memory"),
    ({"timing": {"samples_ms": (1.6, 1.7)}}, "it is slower than the default"),
    ({"timing": {"regime": Regime("interpreter")}}, "it does not answer for the batch that it was tuned on"),
])
def test_a_config_that_must_not_ship_is_found(
    tmp_path: Path, make_config: Make, changes: dict[str, dict[str, Any]], fault: str
):
    good = make_config("64x1@4096")
    bad = make_config()
    bad = replace(bad, **{name: replace(getattr(bad, name), **values) for name, values in changes.items()})
    export_json([good, bad], tmp_path / "NVIDIA_H200.json")
    (found,) = faults(tmp_path / "NVIDIA_H200.json")
    assert found.startswith(f"{bad.batch} of ")
    assert fault in found


def test_a_file_that_must_not_ship_is_found(tmp_path: Path, make_config: Make):
    path = tmp_path / "NVIDIA_H200.json"
    export_json([], path)
    assert faults(path) == ["it holds nothing"]
    export_json([make_config(), make_config(measured_at="2026-12-01T00:00:00+00:00")], path)
    assert [fault[:13] for fault in faults(path)] == ["2 configs for"]
    export_json([make_config(timing=Timing((0.1 + 0.2,) * 1000, Regime("graph")))], path)
    assert [fault[:6] for fault in faults(path)] == ["it has"]
    path = tmp_path / "Triton_interpreter.json"
    export_json([make_config(gpu=INTERPRETER)], path)
    assert len(faults(path)) == 1
