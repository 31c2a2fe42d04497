"""What the README says is done, is done: its commands exist, its Python runs, its figures are those recorded."""

from __future__ import annotations

import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from typer.main import get_command

from attention_tuner.db import shipped_configs
from attention_tuner.search_spaces.suites import named_batches
from attention_tuner.tuner.console.app import PROGRAM, app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
NUMBERS = ("none", "one", "two", "three", "four", "five", "six", "seven")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    lines = [line.removeprefix("$ ") for text in blocks("sh") + blocks("console") for line in text.splitlines()]
    parts = [part.strip() for line in lines for part in line.split("&&")]
    return [part for part in parts if part.startswith(f"{PROGRAM} ")]


def test_the_second_command_is_what_ci_runs():
    assert blocks("sh")[1].strip() in (ROOT / ".ci" / "run").read_text().splitlines()


@pytest.mark.parametrize("command", commands())
def test_every_command_is_accepted(command: str):
    name, *arguments = shlex.split(command)[1:]
    found = get_command(app).commands[name]  # pyright: ignore
    # Reads the arguments, and runs nothing.
    found.make_context(name, arguments)


def test_every_command_of_the_program_is_mentioned():
    for name in get_command(app).commands:  # pyright: ignore
        assert re.search(rf"\b{name}\b", README), name


LOOKUP, CALL, GRAPH = blocks("python")


def output_of(example: str, folder: Path, **more: str) -> str:
    environment = {"PATH": "", **more, "PYTHONPATH": ":".join(sys.path), "ATTENTION_TUNER_DB": str(folder / "none.db")}
    done = subprocess.run([sys.executable, "-c", example], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_lookup_runs(tmp_path: Path):
    assert re.match(r"(heuristic|exact|bucket|neighbour) \w+:page_size=16,", output_of(LOOKUP, tmp_path))


def test_the_call_runs(tmp_path: Path):
    found = output_of(CALL, tmp_path, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert re.match(r"\w+:page_size=16,.* torch.Size\(\[7, 32, 128\]\)", found)


@pytest.mark.gpu
def test_the_graph_is_captured_and_replayed(tmp_path: Path):
    # A compiler is needed, which the path names.
    assert "torch.Size([7, 32, 128])" in output_of(CALL + GRAPH, tmp_path, **os.environ)


def test_the_table_holds_what_was_recorded():
    cells = json.loads((ROOT / "benchmarks/results/h200_peers/peers.json").read_text())["cells"].values()
    times = {
        (cell["workload"], cell["page_size"]): {
            entry["name"]: statistics.median(entry["samples_ms"])
            for entry in cell["entries"] if entry["state"] == "timed"
        }
        for cell in cells
    }  # fmt: skip
    number = r"([\d.]+)"
    columns = rf"{number} \| {number} [^|]+\| {number}"
    rows = re.findall(rf"^\| (\w[\w@]+) \| {columns} \| {number} \| {columns} \|$", README, re.MULTILINE)
    assert [row[0] for row in rows] == list(dict.fromkeys(cell["workload"] for cell in cells))
    for workload, *texts in rows:
        found: list[float] = []
        for page_size in (16, 128):
            ms = times[workload, page_size]
            ours = min(value for name, value in ms.items() if name.startswith("ours:"))
            peer = min(value for name, value in ms.items() if not name.startswith("ours:"))
            found += [round(ours, 4), round(peer, 4), round(peer / ours, 2)]
            found += [round(ms["vllm_triton"] / ours, 2)] if page_size == 16 else []
        assert [float(text) for text in texts] == found


def test_the_configs_that_ship_are_counted_rightly():
    configs = shipped_configs()
    counts = Counter((f"{c.shape.spec.num_q_heads}/{c.shape.spec.num_kv_heads}", c.variant.page_size) for c in configs)
    rows = re.findall(r"^\| (\d+/\d+) \| (\d+) \| (\d+) \|$", README, re.MULTILINE)
    assert {(heads, size): int(n) for heads, *ns in rows for size, n in zip((16, 128), ns, strict=True)} == counts
    assert f"has {len(configs)} configs of layers with heads\nof 128 in bfloat16" in README
    assert {(c.shape.spec.head_dim, c.shape.spec.dtype) for c in configs} == {(128, "bfloat16")}
    suites = [named_batches(name) for name in ("hopper13", "serving")]
    assert {c.batch for c in configs} == {str(batch) for suite in suites for batch in suite.values()}
    assert f"{sum(c.full_check for c in configs)} of these have passed the full check" in " ".join(README.split())


def test_what_was_lost_where_nothing_was_tuned_is_told_in_full():
    def lost(name: str) -> tuple[int, int, str, str, int]:
        found = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
        row = next(row for row in found["by_reach"] if row["reach"] == found["reach"])
        median, worst = (f"{100 * row[key]:.1f} %" for key in ("median", "worst"))
        return row["shapes"], row["sources"]["heuristic"], median, worst, row["above_10_percent"]

    text = " ".join(README.split())
    shapes, heuristic, median, worst, above = lost("leave_one_out_h200")
    assert (f"of {shapes} shapes left out in turn {heuristic} were answered by the heuristic: {median} were lost in "
            f"the median of all, {worst} at worst, and more than 10 % on {NUMBERS[above]}") in text
    shapes, heuristic, median, worst, above = lost("leave_one_out_recording_h200")
    assert (f"on the {NUMBERS[shapes]} of which every variant of a grid is recorded, {NUMBERS[heuristic]} of "
            f"them answered by it, {median} are lost in the median and {worst} at worst") in text
    assert above == 0


def test_the_losses_that_ship_are_those_recorded():
    results = [f"benchmarks/results/{name}_h200.json" for name in ("buckets", "leave_one_out")]
    recorded = [loss for path in results for loss in json.loads((ROOT / path).read_text())["losses"]]
    assert json.loads((ROOT / "db/configs/NVIDIA_H200.json").read_text())["losses"] == recorded
