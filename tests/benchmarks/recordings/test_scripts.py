from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import make_recording
import pytest
import show_recording
from recording_samples import SPEC, small_recording

from attention_tuner.kernel_templates.errors import InputError
from attention_tuner.kernel_templates.gpu import INTERPRETER
from attention_tuner.kernel_templates.outcome import Timed
from attention_tuner.tuner.recording import Recording


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    suite = tmp_path / "suite.json"
    suite.write_text(json.dumps({"name": "suite", "batches": {"small": "2x1@40"}}))
    part: dict[str, Any] = {"page_size": 16, "suite": str(suite), "batches": ["small"],
                            "templates": {"unified": {"block_m": [16], "block_n": [32], "num_segments": [1, 2]}}}
    path = tmp_path / "grid.json"
    path.write_text(json.dumps({"name": "two", "spec": SPEC.key(), "parts": [part]}))
    return path


def make(*arguments: str) -> None:
    make_recording.main(make_recording.options().parse_args(arguments))


def test_a_grid_is_recorded(grid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "two.json.gz"
    make(str(grid), str(file), "--db", str(tmp_path / "tuner.db"), "--interpreter")
    written = capsys.readouterr()
    assert "two on Triton interpreter" in written.out
    assert f"written to {file}\n" in written.out
    assert "2 trials made (2 timed), 0 missing" in written.err
    recording = Recording.load(file)
    (task,) = recording.tasks
    assert recording.gpu == INTERPRETER
    assert len(recording.variants(task)) == 2
    assert all(isinstance(recording.outcome(task, v), Timed) for v in recording.variants(task))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nosuch", "a.json"), "cannot read 'nosuch'"),
        (("hopper_llama_3_8b", "{folder}/a.json", "--interpreter", "--seconds", "9"), "too large for Triton's interp"),
        (("hopper_llama_3_8b", "{folder}/nosuch/a.json"), "there is no folder"),
    ],
)
def test_a_grid_that_cannot_be_recorded_is_refused(arguments: tuple[str, ...], says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=says):
        make("--db", str(tmp_path / "tuner.db"), *(argument.format(folder=tmp_path) for argument in arguments))
    assert list(tmp_path.iterdir()) == []


def test_a_recording_is_shown_and_written_for_other_tools(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "small.json.gz", tmp_path / "t4"
    small_recording().save(file)
    show_recording.main(show_recording.options().parse_args([str(file), "--t4", str(folder)]))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["16x1@4095", "16", "54", "50", "1", "2", "1", "50", "1", "ms", "1", "(1.9%)"] in lines
    assert ["1", "failed", "compile", "RuntimeError:", "PassManager::run", "failed"] in lines
    assert len(list(folder.iterdir())) == 2
