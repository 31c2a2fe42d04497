from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_samples import SPEC, Lines
from recording_samples import small_recording

from attention_tuner.kernel_templates.gpu import INTERPRETER
from attention_tuner.kernel_templates.outcome import Timed
from attention_tuner.tuner.recording import Recording


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Lines:
    return Lines(capsys)


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    suite = tmp_path / "suite.json"
    suite.write_text(json.dumps({"name": "suite", "batches": {"small": "2x1@40"}}))
    part: dict[str, Any] = {"page_size": 16, "suite": str(suite), "batches": ["small"],
                            "templates": {"unified": {"block_m": [16], "block_n": [32], "num_segments": [1, 2]}}}
    path = tmp_path / "grid.json"
    path.write_text(json.dumps({"name": "two", "spec": SPEC.key(), "parts": [part]}))
    return path


def test_a_grid_is_recorded_and_gone_on_with(lines: Lines, grid: Path, tmp_path: Path) -> None:
    file, db = tmp_path / "two.json.gz", str(tmp_path / "tuner.db")
    # So little time that no trial could end.
    assert lines.run("record", str(grid), str(file), "--db", db, "--seconds", "0.01", "--gpu", "interpreter") == 2
    assert "'2x1@40' is too large for Triton's interpreter" in lines.err
    assert not file.exists()
    assert lines.run("record", str(grid), str(file), "--db", db, "--gpu", "interpreter") == 0
    assert "two on Triton interpreter" in lines.out
    assert f"written to {file}\n" in lines.out
    assert "2 trials made (2 timed), 0 missing" in lines.err
    recording = Recording.load(file)
    (task,) = recording.tasks
    assert recording.gpu == INTERPRETER
    assert all(isinstance(recording.outcome(task, v), Timed) for v in recording.variants(task))
    assert lines.run("record", str(grid), str(file), "--db", db, "--gpu", "interpreter", "--json") == 0
    document = json.loads(lines.out)
    assert (document["missing"], document["tasks"][0]["outcomes"]) == (0, {"timed": 2})
    assert Recording.load(file) == recording


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nosuch", "a.json"), "no grid and no file is called 'nosuch'"),
        (("hopper_llama_3_8b", "{folder}/a.json", "--gpu", "interpreter"), "is too large for Triton's interpreter"),
        (("hopper_llama_3_8b", "{folder}/a.json", "--db", "{folder}"), "is a folder"),
        (("hopper_llama_3_8b", "{folder}/nosuch/a.json"), "there is no folder"),
        (("hopper_llama_3_8b", "{folder}/a.json", "--gpu", "sm_90"), "'sm_90' is not present"),
        (("hopper_llama_3_8b", "{folder}/a.json", "--seconds", "-1"), "'-1' cannot be used"),
    ],
)
def test_what_cannot_be_recorded_is_refused_and_nothing_written(
    arguments: tuple[str, ...], says: str, lines: Lines, tmp_path: Path
) -> None:
    given = [argument.format(folder=tmp_path) for argument in arguments]
    assert lines.run("record", "--db", str(tmp_path / "tuner.db"), *given) == 2
    assert says in lines.err
    assert len(lines.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_recording_is_shown_and_written_for_other_tools(lines: Lines, tmp_path: Path) -> None:
    small_recording().save(tmp_path / "small.json.gz")
    assert lines.run("recording", str(tmp_path / "small.json.gz")) == 0
    assert "by hand on sm_90" in lines.out
    assert "killed by SIGSEGV" in lines.out
    assert [path.name for path in tmp_path.iterdir()] == ["small.json.gz"]
    folder = tmp_path / "t4"
    assert lines.run("recording", str(tmp_path / "small.json.gz"), "--t4", str(folder), "--json") == 0
    document = json.loads(lines.out)
    assert (document["grid"], len(document["tasks"])) == ("by hand", 2)
    assert sorted(document["t4_files"]) == sorted(map(str, folder.iterdir()))


def test_a_file_is_no_folder_for_other_tools(lines: Lines, tmp_path: Path) -> None:
    small_recording().save(tmp_path / "small.json.gz")
    taken = str(tmp_path / "small.json.gz")
    for folder in (taken, str(tmp_path / "nosuch" / "t4")):
        assert lines.run("recording", taken, "--t4", folder) == 2
        assert len(lines.err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["small.json.gz"]
