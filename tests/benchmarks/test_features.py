"""The features that are timed, their variants, and the bases of their times."""

from __future__ import annotations

import argparse
import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from attention_tuner.db.lookup.table import ConfigTable
from attention_tuner.kernel_templates.gpu import TARGETS
from attention_tuner.kernel_templates.registry import template_of, why_invalid
from attention_tuner.kernel_templates.sources import environment

H200 = replace(TARGETS["sm_90"], name="NVIDIA H200")
NOTHING_TUNED = ConfigTable.of((), environment)


@pytest.fixture
def features() -> ModuleType:
    return importlib.import_module("features")


def all_cells(features: ModuleType) -> list[Any]:
    names = features.asked_features(None)
    return list(features.cells(features.workloads(), names, 16, H200, NOTHING_TUNED))


def test_every_feature_has_variants_that_run_its_layer(features: ModuleType) -> None:
    cells = all_cells(features)
    everywhere = [name for name, feature in features.FEATURES.items() if not feature.batches]
    assert len(cells) == 13 * len(everywhere) + 3 * (len(features.FEATURES) - len(everywhere))
    for cell in cells:
        assert cell.variants[features.FUSED].template == "fused"
        for variant in cell.variants.values():
            assert variant.page_size == cell.task.page_size
            assert why_invalid(variant, cell.task.spec, H200) is None
            assert template_of(variant).writes_lse or not cell.lse
    layers = {(cell.task.spec, cell.task.page_size, cell.lse) for cell in cells if cell.name == features.FEW[0]}
    assert len(layers) == len(features.FEATURES)


def test_only_a_plain_layer_is_served_by_the_kernel_for_hopper(features: ModuleType) -> None:
    served = {cell.feature: cell.variants[features.SERVED] for cell in all_cells(features) if cell.name == "prefill_8k"}
    hopper = {name for name, variant in served.items() if variant.template == "gluon_hopper"}
    assert hopper == {"plain", "float16"}


def test_the_bases_of_asked_features_are_run_too(features: ModuleType) -> None:
    assert features.asked_features([]) == ["plain"]
    assert features.asked_features(["gpt-oss's window, sinks", "sinks"]) == [
        "plain", "sinks", "gpt-oss's heads", "gpt-oss's window, sinks"]
    for feature in features.FEATURES.values():
        assert set(feature.batches) <= set(features.FEATURES[feature.base].batches or feature.batches)


def test_times_are_multiples_of_the_base_on_the_same_batch(features: ModuleType) -> None:
    def row(feature: str, batch: str, fused_ms: float | None, served_ms: float) -> dict[str, Any]:
        return {"feature": feature, "batch": batch, "floor_ms": 1.0, "fused": {"ms": fused_ms, "reason": "failed: x"},
                "served": {"ms": served_ms}}  # fmt: skip

    rows = [row("plain", "a", 4.0, 2.0), row("sinks", "a", 5.0, 5.0), row("sinks", "b", 5.0, 5.0),
            row("ALiBi", "a", None, 4.0)]  # fmt: skip
    features.compare(rows)
    assert [each["fused"]["of_base"] for each in rows] == [1.0, 1.25, None, None]
    assert [each["served"]["of_base"] for each in rows] == [1.0, 2.5, None, 2.0]
    assert [each["served"]["of_floor"] for each in rows] == [0.5, 0.2, 0.2, 0.25]


def test_a_feature_is_timed_in_the_interpreter(
    features: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = argparse.Namespace(out=tmp_path / "out.json", interpreter=True, page_size=16, batches=["1x4@44"],
                                   features=["log-sum-exp"], db=None, seconds=60.0)  # fmt: skip
    features.main(arguments)
    document = json.loads((tmp_path / "out.json").read_text())
    assert [row["feature"] for row in document["cells"]] == ["plain", "log-sum-exp"]
    assert document["left_out"] == 0
    for row in document["cells"]:
        for way in ("fused", "served"):
            assert row[way]["ms"] > 0, row
            assert row[way]["error_of_tolerance"] <= 1
    assert "served, of the floor" in capsys.readouterr().out
