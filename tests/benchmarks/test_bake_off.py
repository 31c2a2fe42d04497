"""The bake-off reckons rightly on a small recording that is made up."""

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
def bake_off(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
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


def test_a_search_measures_each_variant_once_and_what_is_skipped_is_no_measurement(bake_off: ModuleType) -> None:
    found = bake_off.replay(TRUTH, Study(VARIANTS, sampler="random"), 1000, 4)
    assert set(found.measured) == {v for v, each in TRUTH.items() if not isinstance(each, Skipped)}
    assert len(set(found.measured)) == len(found.measured)
    curve = found.curve(TRUTH)
    assert curve[-1] == pytest.approx(1.1)
    assert curve == sorted(curve, reverse=True)
    assert len(bake_off.replay(TRUTH, Study(VARIANTS), 7, 4).measured) == 7


def test_what_it_took_to_be_good_is_the_middle_of_the_runs(bake_off: ModuleType) -> None:
    found = bake_off.summary([[2.0, 1.02, 1.0], [math.inf, 1.5, 1.01], [3.0, 3.0, 3.0]])
    assert (found["measurements_to_good"], found["final_worst"], found["share_good"]) == (3, 3.0, pytest.approx(2 / 3))
    assert bake_off.summary([[2.0, 2.0], [1.0, 1.0], [3.0, 3.0]])["measurements_to_good"] is None


def test_neighbours_are_what_the_other_searches_measured(bake_off: ModuleType) -> None:
    entry = bake_off.Entry("kriging", "neighbours", 1)
    others = {DECODE: bake_off.Replay(tuple(VARIANTS[:4]), 0.0)}
    found = bake_off.search(RECORDING, CHUNK, entry, 0, 5, others)
    assert found.measured[0] == bake_off.best(bake_off.times_ms(TRUTH, VARIANTS[:4]))[0]
    alone = bake_off.search(RECORDING, CHUNK, bake_off.Entry("kriging", "none", 1), 0, 5, {})
    assert alone.measured != found.measured


def test_all_of_it_and_only_what_its_file_does_not_hold(
    bake_off: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    RECORDING.save(tmp_path / "small.json.gz")
    out = tmp_path / "out.json"

    def run(*samplers: str) -> list[str]:
        command = ["bake_off.py", "--recording", str(tmp_path / "small.json.gz"), "--out", str(out), "--seeds", "2",
                   "--trials", "30", "--processes", "1", "--samplers", *samplers]  # fmt: skip
        monkeypatch.setattr(sys, "argv", command)
        bake_off.main(bake_off.options().parse_args())
        return [line for line in capsys.readouterr().out.splitlines() if re.match(r"\| `\w+` \|", line)]

    assert [line.split("|")[1].strip(" `") for line in run("random")] == ["random", "random"]
    before = out.read_text()
    document = json.loads(before)
    document["entries"][0]["final_mean"], document["entries"][1]["key"] = 7.0, "another"
    out.write_text(json.dumps(document))
    lines = run("random")
    # What other sources found is found again, and what the present ones found is kept.
    assert [line.split("|")[5].strip() for line in sorted(lines, key=len)].count("7.0000") == 1
    assert json.loads(out.read_text())["entries"][1] | {"cpu_ms_a_measurement": 0} == (
        json.loads(before)["entries"][1] | {"cpu_ms_a_measurement": 0})
    lines = run("random", "kriging")
    assert len(lines) == 2 + 5
    for row in ("structured", "none"):
        assert any(line.startswith(f"| `random` | {row} | 8 | 4 |") for line in lines)
    assert before != out.read_text()
