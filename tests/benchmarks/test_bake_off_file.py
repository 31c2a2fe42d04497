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


def test_leads_tell_rows_apart(module: ModuleType) -> None:
    assert module.source_hash(["one"]) == module.source_hash(["one"]) != module.source_hash([])


def test_a_file_of_something_else_is_refused(module: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    assert module.held_rows(file, {"recording": "two"}) == []
    row: dict[str, Any] = {"sampler": "kriging", "leads": "none", "runs": 4}
    file.write_text(json.dumps({"recording": "one", "entries": [row]}))
    assert module.held_rows(file, {"recording": "one"}) == [row]
    with pytest.raises(SystemExit, match="is of recording 'one' and not 'two'; accepted is another file"):
        module.held_rows(file, {"recording": "two"})
    module.refuse_other_runs(file, row, 4)
    with pytest.raises(SystemExit, match="holds 4 runs of 'kriging' with leads 'none' and not 6"):
        module.refuse_other_runs(file, row, 6)
