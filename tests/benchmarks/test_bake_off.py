"""The bake-off computes the right figures on a small made-up recording."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.gpu import TARGETS
from attention_tuner.kernel_templates.outcome import Check, Failed, Outcome, Regime, Skipped, Timed, Timing
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.task import Task
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.tuner.recording import Recorded, Recording
from attention_tuner.tuner.sampling.study import Study

GPU, REGIME = TARGETS["sm_90"], Regime("graph")
CHUNK, DECODE = (Task(AttentionSpec(8, 2, 64), Batch.parse(text), 16) for text in ("1x512@1024", "4x1@5000"))
GRID = {
    "block_m": (16, 32, 64), "block_n": (16, 32, 64), "num_segments": (1, 4), "num_stages": (2, 3), "num_warps": (2, 4),
}  # fmt: skip
VARIANTS = [Variant.of("unified", 16, dict(zip(GRID, each, strict=True))) for each in itertools.product(*GRID.values())]


@pytest.fixture
def bake_off() -> ModuleType:
    return importlib.import_module("bake_off")


def outcome(variant: Variant) -> Outcome:
    if variant.number("block_m") == variant.number("block_n") == 64 and variant.number("num_stages") == 3:
        return Skipped(variant, "its shared memory exceeds the GPU's")
    if variant.number("num_warps") == 4 and variant.number("block_m") == 16:
        return Failed(variant, "compile", "no")
    ms = 1 + math.log2(variant.number("block_m") / 16) + 0.5 * math.log2(variant.number("block_n") / 16)
    return Timed(variant, Check(0.5), Timing((ms + 0.1 * variant.number("num_segments"),), REGIME))


TRUTH = {variant: outcome(variant) for variant in VARIANTS}
RECORDING = Recording("small", GPU, REGIME, {}, ("a", "b"), {
    task: {variant: Recorded(each, seconds=0.01) for variant, each in TRUTH.items()} for task in (CHUNK, DECODE)
})


def test_a_search_measures_each_variant_once_and_no_skipped_one(bake_off: ModuleType) -> None:
    found = bake_off.replay(TRUTH, Study(VARIANTS, sampler="random"), 1000, 4)
    assert set(found.measured) == {v for v, each in TRUTH.items() if not isinstance(each, Skipped)}
    assert len(set(found.measured)) == len(found.measured)
    curve = found.curve(TRUTH)
    assert curve[-1] == pytest.approx(1.1)
    assert curve == sorted(curve, reverse=True)
    assert len(bake_off.replay(TRUTH, Study(VARIANTS), 7, 4).measured) == 7


def test_the_measurements_until_good_are_the_median_of_the_runs(bake_off: ModuleType) -> None:
    found = bake_off.summary([[2.0, 1.02, 1.0], [math.inf, 1.5, 1.01], [3.0, 3.0, 3.0]])
    assert (found["measurements_to_good"], found["final_worst"], found["share_good"]) == (3, 3.0, pytest.approx(2 / 3))
    assert bake_off.summary([[2.0, 2.0], [1.0, 1.0], [3.0, 3.0]])["measurements_to_good"] is None


def test_leads_from_neighbours_are_the_variants_of_the_other_searches(bake_off: ModuleType) -> None:
    entry = bake_off.Entry("kriging", "neighbours", 1)
    others = {DECODE: bake_off.Replay(tuple(VARIANTS[:4]), 0.0)}
    found = bake_off.search(RECORDING, CHUNK, entry, 0, 5, others)
    assert found.measured[0] == bake_off.best(bake_off.times_ms(TRUTH, VARIANTS[:4]))[0]
    alone = bake_off.search(RECORDING, CHUNK, bake_off.Entry("kriging", "none", 1), 0, 5, {})
    assert alone.measured != found.measured


def test_all_entries_are_searched_and_written(
    bake_off: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    RECORDING.save(tmp_path / "small.json.gz")
    out = tmp_path / "out.json"
    command = ["bake_off.py", "--recording", str(tmp_path / "small.json.gz"), "--out", str(out), "--seeds", "2",
               "--trials", "15", "--processes", "1", "--samplers", "random", "kriging"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    bake_off.main(bake_off.options().parse_args())
    lines = [line for line in capsys.readouterr().out.splitlines() if re.match(r"\| `\w+` \|", line)]
    assert len(lines) == 2 + 5
    for leads in ("structured", "none"):
        assert any(line.startswith(f"| `random` | {leads} | 8 | 4 |") for line in lines)
    entries = json.loads(out.read_text())["entries"]
    assert len(entries) == 7
    assert all(entry["final_mean"] >= 1 for entry in entries)
