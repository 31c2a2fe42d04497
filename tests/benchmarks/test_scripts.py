"""The benchmarks start, are listed, and compute the right figures; their measurements are not tested."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import edges
import pytest

from attention_tuner.db.store import Store
from attention_tuner.kernel_templates.batch import Batch, BatchBucket
from attention_tuner.kernel_templates.gpu import INTERPRETER, TARGETS
from attention_tuner.kernel_templates.heuristic import candidates
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.task import Task
from attention_tuner.kernel_templates.triton_family.launchers import TritonLauncher
from attention_tuner.tuner.measure.race import Interval

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(request: pytest.FixtureRequest) -> ModuleType:
    """The script that the test's parameter names."""
    return importlib.import_module(request.param)


def using(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("script", [name], indirect=True)


@using("record")
def test_a_record_holds_versions_and_host(script: ModuleType, tmp_path: Path) -> None:
    script.write(tmp_path / "new" / "out.json", {"numbers": [1.5]})
    document = json.loads((tmp_path / "new" / "out.json").read_text())
    assert document["numbers"] == [1.5]
    assert document["record"]["versions"]["python"] == sys.version.split()[0]
    assert document["record"]["machine"]["cores"] >= 1
    assert list((tmp_path / "new").iterdir()) == [tmp_path / "new" / "out.json"]


@using("stopwatch")
def test_kernels_are_grouped_by_launch(script: ModuleType) -> None:
    first, second = [(0.0, 4.0), (5.0, 6.0)], [(20.0, 28.0), (29.0, 31.0)]
    assert script.per_launch([*second, *first], 2) == (2, 7.5, 8.5)
    assert script.per_launch([(0.0, 4.0)], 1) == (1, 4.0, 4.0)
    assert script.per_launch([], 3) is None
    assert script.per_launch(first, 3) is None


@using("stopwatch")
@pytest.mark.parametrize(("cold", "warm", "eager", "single", "why"), [
    (100, 90, 110, 102, "agree"),
    (5, 4, 6, 8, "its two events and an eager launch"),
    (50, 40, 50, 70, "its two events, an eager launch, and L2 full of what it cleared"),
    (5000, 5000, 5000, 4500, "it pauses, which keeps the GPU cooler"),
    (50, 30, 50, 40, "its L2 or TLB is less cold"),
    (4971, 5350, 5238, 5176, "power: two windows of the stopwatch differ as much"),
    (777, 777, 504, 506, "captured, a plain copy is a node that the driver runs in another way than the kernel"),
])
def test_why_do_bench_differs(
    script: ModuleType, cold: float, warm: float, eager: float, single: float, why: str
) -> None:
    figures = script.Figures("x", 1, 0.9 * cold, cold, warm, cold, warm, eager, single)
    assert figures.why(empty=2.5) == why
    assert figures.gap == pytest.approx(0.1 * cold)
    assert len(script.row(figures, 2.5)) == 11


@using("regimes")
def test_both_variants_of_both_batches_can_run(script: ModuleType) -> None:
    tasks = script.tasks(interpreter=False)
    assert [task.spec.num_q_heads for task in tasks.values()] == [8, 32]
    for task in tasks.values():
        assert [variant.template for variant in script.variants(task, TARGETS["sm_90"]).values()] == [
            "unified", "fused"]


@using("tuner_overhead")
def test_overhead_is_measured_with_stored_trials(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A batch of decode alone has a tenth of the variants.
    monkeypatch.setattr(script, "TASK", Task(AttentionSpec(32, 8, 128), Batch.parse("4x1@32768"), 16))
    with Store.open(tmp_path / "tuner.db") as store:
        script.fill(store, 10, seed=0)
        found = script.measure(store, 10, 5, "random")
        assert store.trial_counts() == {"timed": 15}
    assert (found["stored"], found["trials"]) == (10, 5)
    assert found["mean_ms"]["ask"] > 0
    assert sum(found["mean_ms"].values()) == pytest.approx(2 * found["mean_ms"]["total"])


@using("plan_cost")
def test_plans_of_every_template_are_measured(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["plan_cost.py", "--out", str(tmp_path / "out.json"), "--sequences", "1", "3", "--repeats", "20",
               "--templates", "unified", "fused", "two_launch", "persistent"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    script.main()
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert len(rows) == len(script.BATCHES) * 2 * 4
    assert all(0 < row["quartiles_us"][0] <= row["median_us"] <= row["quartiles_us"][1] for row in rows)
    assert all(0 < row[f"{part}_us"] < row["quartiles_us"][1] for row in rows for part in ("lengths", "list", "upload"))
    columns, lines = script.table(rows, ["fused", "none"])
    assert columns == ["batch", "sequences", "fused", "none"]
    assert [line[:2] for line in lines[:2]] == [["decode", "1"], ["decode", "3"]]
    assert {line[3] for line in lines} == {"-"}


@using("reproducibility")
def test_the_table_shows_a_race_and_a_batch_without_one(script: ModuleType) -> None:
    assert len(script.tasks(interpreter=False)) == 6
    interval = script.record.fractions(Interval(math.log(1.01), -math.inf, math.log(1.02)))
    assert interval == {"median": pytest.approx(0.01), "low": None, "high": pytest.approx(0.02)}
    run = {"gpu_share": 0.8, "pool_share": 0.9, "outcomes": {"timed": 7}, "wall_seconds": 40.2}
    standing = {"same": False, "second_over_first": interval, "slower_than_default": True,
                "winner_over_default": [script.record.fractions(None), interval]}  # fmt: skip
    assert script.rows({"a": {"standing": standing, "runs": [run, run]}, "b": {"standing": {}, "runs": [run]}}) == [
        ["a", "-/+1.00%/+2.00%", "+0.0% +1.0%", "SLOWER", "80% 80%", "90% 90%", "7 7", "40 40"],
        ["b", "no race", "", "", "80%", "90%", "7", "40"]]


@using("reduction")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_each_way_of_merging_is_timed(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edges, "ROUNDS", 1)
    database = tmp_path / "tuner.db"
    Store.open(database).close()
    script.main(argparse.Namespace(out=tmp_path / "out.json", interpreter=True, page_size=16, db=str(database)))
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert set(row["ms"]) == {*script.WAYS, script.LAST}
    assert all(ms > 0 for ms in row["ms"].values())
    assert len(script.asked(interpreter=False)) == len(script.BATCHES) + len(script.BATCHES_TP8)
    # The ways replace attributes that the launcher has.
    replaced = {name for way in script.WAYS.values() for name in way}
    assert replaced == {name for name in replaced if hasattr(TritonLauncher, name)}


@using("reduction")
def test_a_variant_whose_last_program_merges_is_also_timed_with_a_separate_launch(script: ModuleType) -> None:
    spec, batch, gpu = AttentionSpec(32, 8, 128), Batch.parse("1x1@9000"), TARGETS["sm_90"]
    likely = candidates(spec, BatchBucket.of(batch), 16, gpu)
    merging = next(v for v in likely if v.template == "fused").replace(reduction="last_program")
    ways = script.ways_of(merging, Task(spec, batch, 16), gpu)
    assert ways.pop(script.LAST) == (merging, "as it is")
    assert {variant for variant, _ in ways.values()} == {merging.replace(reduction="kernel")}


@using("item_cost")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_cost_of_an_item_is_the_slope_of_a_line(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = script.fitted([1.0, 2.0, 4.0], [1.1, 1.2, 1.4], 1000.0)
    assert line.us_per_item == pytest.approx(100.0)
    assert line.ns_per_key == pytest.approx(1000.0)
    assert line.item_in_keys == pytest.approx(100.0)
    assert line.worst_residual == pytest.approx(0.0)
    monkeypatch.setattr(edges, "ROUNDS", 1)
    monkeypatch.setattr(script, "WAVES", (1, 2))
    script.main(argparse.Namespace(out=tmp_path / "out.json", interpreter=True, page_size=16))
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["kind"] for row in rows] == ["short", "long"]
    assert all(len(row["items_per_sm"]) == len(script.WAVES) for row in rows)


@using("one_launch")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_one_variant_is_launched_for_a_profiler(script: ModuleType) -> None:
    (batch, *_), variant = script.workloads(interpreter=True), "fused"
    spec, bucket = batch.spec, BatchBucket.of(batch.batch)
    key = next(v.key() for v in candidates(spec, bucket, 16, INTERPRETER) if v.template == variant)
    script.main(argparse.Namespace(batch=batch.name, variant=key, interpreter=True))
    with pytest.raises(SystemExit, match="unknown batch 'x'"):
        script.main(argparse.Namespace(batch="x", variant=key, interpreter=True))


@using("sampler_cost")
@pytest.mark.parametrize("sampler", ["kriging", "random"])
def test_the_cost_of_a_sampler_is_measured(script: ModuleType, sampler: str) -> None:
    found = script.measure(300, sampler, 12)
    assert found["variants"] == 300
    assert 0 < found["ask_mean_ms"] <= found["ask_most_ms"]
    assert found["made_s"] > 0
    assert len(set(script.space(85_000))) == 85_000
