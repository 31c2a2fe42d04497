"""A later run of the bake-off goes on only with what it would find again."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("bake_off_file")


def test_rows_of_other_sources_are_made_anew(module: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    assert module.held_rows(file, {"trials": 5}) == []
    row: dict[str, Any] = {"sampler": "kriging", "leads": "none", "runs": 4}
    rows = [{**row, "sources": module.source_hash("kriging", False)}, {**row, "sources": "another"}]
    file.write_text(json.dumps({"trials": 5, "entries": rows}))
    assert module.held_rows(file, {"trials": 5}) == rows[:1]


def test_what_leads_there_are_and_which_sampler_it_is_tell_sources_apart(module: ModuleType) -> None:
    hashes = [module.source_hash(*each) for each in (("kriging", False), ("kriging", True), ("forest", False))]
    assert len(set(hashes)) == 3
    assert module.source_hash("tpe", False) == module.source_hash("random", False)


def test_a_file_of_something_else_is_refused(module: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    file.write_text(json.dumps({"recording": "one", "entries": []}))
    with pytest.raises(SystemExit, match="is of recording 'one' and not 'two'; accepted is another file"):
        module.held_rows(file, {"recording": "two"})
    row = {"sampler": "kriging", "leads": "none", "runs": 4}
    module.refuse_other_runs(file, row, 4)
    with pytest.raises(SystemExit, match="holds 4 runs of 'kriging' with leads 'none' and not 6"):
        module.refuse_other_runs(file, row, 6)
