"""The summary of a results file: ratios, the best peer, geometric means, tables and the picture."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(FOLDER))

from peerbench import table  # noqa: E402
from peerbench.plot import plot  # noqa: E402
from peerbench.race import Entry  # noqa: E402
from peerbench.results import Cell, Results  # noqa: E402


def timed(name: str, ms: float, run: int = 1, **more: Any) -> Entry:
    return Entry(name, "timed", run, samples_ms=(ms, 0.5 * ms, 3 * ms), regime="graph-cold-burst", **more)


def cell(workload: str = "a", kind: str = "hybrid", page_size: int = 16, floor_ms: float = 0.5) -> Cell:
    return Cell(workload, kind, page_size, "spec", "1x1@1", floor_ms, 10, 20.0)


def filled() -> Cell:
    made = cell()
    made.add([timed("ours:gluon_hopper", 1.0), timed("ours:fused", 2.0, is_plain=True), timed("x", 1.5),
              timed("vllm_triton", 6.0), Entry("y", "failed", 1, "no")])  # fmt: skip
    return made


@pytest.fixture
def results(tmp_path: Path) -> Results:
    made = Results(tmp_path / "out.json")
    made.begin({"date": "today"})
    made.cell(filled())
    other = made.cell(cell("b"))
    other.add([timed("ours:gluon_hopper", 1.0), timed("x", 6.0)])
    return made


def test_the_standing_of_a_cell_compares_ours_with_its_peers() -> None:
    assert filled().standing() == {
        "ours": "ours:gluon_hopper", "ours_ms": 1.0, "share_of_floor": 0.5, "plain_ms": 2.0, "best_peer": "x",
        "best_peer_ms": 1.5, "best_peer_over_ours": 1.5, "vllm_triton_over_ours": 6.0, "vllm_triton_over_plain": 3.0,
    }  # fmt: skip


def test_ratios_are_taken_within_one_run() -> None:
    made = filled()
    # In the second run everything was twice as slow: the new peer is not behind by it.
    made.add([timed("ours:gluon_hopper", 2.0, run=2), timed("z", 2.8, run=2)])
    standing = made.standing()
    assert (standing["best_peer"], standing["best_peer_over_ours"], standing["ours_ms"]) == ("z", 1.4, 2.0)
    assert standing["plain_ms"] is None
    assert standing["vllm_triton_over_ours"] == 6.0


def test_the_last_entry_of_a_peer_counts() -> None:
    made = filled()
    made.add([timed("ours:fused", 2.0, run=2, is_plain=True), timed("x", 5.0, run=2)])
    assert [(entry.name, entry.run) for entry in made.peers()] == [("vllm_triton", 1), ("y", 1), ("x", 2)]
    assert made.missing(["x", "new"]) == ["new"]


def test_geometric_means_are_taken_by_kind(results: Results) -> None:
    summary = {(row["page_size"], row["kind"]): row for row in results.summary()}
    best = summary[16, "hybrid"]["best_peer_over_ours"]
    assert (best["cells"], best["least"]) == (2, 1.5)
    assert best["geometric_mean"] == pytest.approx(math.sqrt(1.5 * 6.0))
    assert summary[16, "decode"]["best_peer_over_ours"] == {"cells": 0, "geometric_mean": None, "least": None}
    assert summary[16, "all"]["vllm_triton_over_ours"]["cells"] == 1


def test_small_pages_are_compared_with_large_ones(results: Results) -> None:
    results.cell(cell("a", page_size=128)).add([timed("ours:fused", 0.8)])
    results.cell(cell("b", page_size=128)).add([timed("x", 0.8)])
    assert results.pages() == {"a": 1.25}
    assert "geometric mean 1.250, farthest from 1 1.250 (a)" in table.notes(results)[-1]


def test_a_file_is_read_back_as_it_was_written(results: Results, tmp_path: Path) -> None:
    results.write()
    again = Results(results.out)
    assert again.cells == results.cells
    assert again.run == 1
    again.write()
    assert list(tmp_path.iterdir()) == [results.out]


def test_the_tables_name_every_contender(results: Results) -> None:
    results.document["peers"] = {"gone": {"missing": "not here"}, "x": {"missing": None}}
    results.cells["a page 16"].add([Entry("s", "slow", 1, first_ms=33.0), Entry("e", "timed", 1, samples_ms=(4.0,),
                                                                              regime="eager-cold-burst")])  # fmt: skip
    console = Console(width=200, record=True)
    console.print(table.standing_table(results, 16), table.times_table(results, 16))
    text = console.export_text()
    row = next(line for line in text.splitlines() if line.startswith("│ a "))
    assert [part.strip() for part in row.split("│")[1:-1]] == [
        "a", "0.5000", "1.000", "50%", "2.000", "x", "1.500", "1.500", "6.000", "3.000"]
    rows = [line.split("│") for line in text.splitlines() if line.startswith("│ a ")][1]
    assert [part.strip() for part in rows[1:-1]] == [
        "a", "1.000", "2.000", "1.500", "6.000", "failed", "~33.000", "4.000 e", "missing"]
    assert "3.000 (least 1.500)" in text
    assert table.notes(results) == [
        "missing: gone: not here", "failed: y on a page 16: no",
        "timed in eager launches, because they could not be captured: e"]


def test_the_picture_is_drawn(results: Results, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(results, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
