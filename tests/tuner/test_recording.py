from __future__ import annotations

import gzip
import json
import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from recording_samples import CHUNK, DECODE, FASTEST, small_recording, unified

from attention_tuner.kernel_templates.errors import InputError, ModelError, StoreError
from attention_tuner.kernel_templates.outcome import Timed, Wrong
from attention_tuner.kernel_templates.sources import kernel_hash
from attention_tuner.tuner.recording import Recording


@pytest.mark.parametrize("name", ["small.json", "small.json.gz"])
def test_a_saved_recording_is_read_back(tmp_path: Path, name: str) -> None:
    recording = small_recording()
    recording.save(tmp_path / name)
    read = Recording.load(tmp_path / name)
    wrong = next(v for v in recording.variants(DECODE) if isinstance(recording.outcome(DECODE, v), Wrong))
    found = read.outcome(DECODE, wrong)
    # NaN is not equal to itself.
    assert isinstance(found, Wrong)
    assert math.isnan(found.check.worst_ratio)
    assert found.check.detail == "row 3: its error is nan"
    kept = {task: {v: r for v, r in trials.items() if v != wrong} for task, trials in recording.trials.items()}
    assert {task: {v: r for v, r in trials.items() if v != wrong} for task, trials in read.trials.items()} == kept
    assert (read.gpu, read.regime, read.environments) == (recording.gpu, recording.regime, recording.environments)
    assert (read.grid, read.recorded_at) == (recording.grid, recording.recorded_at)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_the_same_recording_makes_the_same_bytes(tmp_path: Path) -> None:
    small_recording().save(tmp_path / "a.json.gz")
    Recording.load(tmp_path / "a.json.gz").save(tmp_path / "b.json.gz")
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


def test_a_recording_answers_for_its_tasks_and_variants_only() -> None:
    recording = small_recording()
    assert recording.tasks == (DECODE, CHUNK)
    assert len(recording.variants(DECODE)) == len(recording.variants(CHUNK)) == 54
    kinds = Counter(type(recording.outcome(DECODE, v)).__name__ for v in recording.variants(DECODE))
    assert kinds == {"Timed": 50, "Failed": 2, "Wrong": 1, "Skipped": 1}
    best = recording.optimum(DECODE)
    assert best is not None
    assert best.variant == unified(**FASTEST)
    assert isinstance(recording.outcome(CHUNK, unified()), Timed)
    assert recording.outcome(CHUNK, unified(block_m=128)) is None
    elsewhere = CHUNK.__class__(CHUNK.spec, CHUNK.batch, 128)
    assert recording.variants(elsewhere) == ()
    assert recording.optimum(elsewhere) is None


def test_a_file_that_is_no_recording_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "small.json.gz"
    small_recording().save(path)
    document = json.loads(gzip.decompress(path.read_bytes()))
    spoilt = {
        "empty": b"",
        "cut": path.read_bytes()[:100],
        "list": b"[]",
        "version": json.dumps({**document, "schema_version": 2}).encode(),
        "column": json.dumps({**document, "tasks": [{**document["tasks"][0], "seconds": [1.0]}]}).encode(),
        "missing": json.dumps({n: v for n, v in document.items() if n != "gpu"}).encode(),
        "cost": json.dumps({**document, "tasks": [{**document["tasks"][0], "seconds": [0.0] * 54}]}).encode(),
        "text": json.dumps({**document, "texts": ["timed"]}).encode(),
    }
    for name, data in spoilt.items():
        bad = tmp_path / f"{name}.json"
        bad.write_bytes(data)
        with pytest.raises(StoreError, match=f"{name}.json' cannot be read as a recording"):
            Recording.load(bad)
    with pytest.raises(ModelError, match="no recording and no file is called 'nowhere'"):
        Recording.load("nowhere")


def test_reading_a_recording_loads_no_torch(tmp_path: Path) -> None:
    small_recording().save(tmp_path / "small.json.gz")
    script = ("import sys; from attention_tuner.tuner.recording import Recording; Recording.load(sys.argv[1]); "
              "sys.exit(bool({'torch', 'triton', 'optuna'} & sys.modules.keys()))")  # fmt: skip
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "small.json.gz")], check=True)


@pytest.mark.parametrize(("changes", "says"), [
    ({"seconds": 0.0}, "seconds of variant 'unified:.*' is 0"),
    ({"compile_s": 0.0}, "compile_s of variant 'unified:.*' is 0"),
    ({"seconds": -1.0}, "seconds of variant .* is -1"),
    ({"compile_s": math.nan}, "compile_s of variant .* is nan"),
])
def test_a_cost_that_is_no_time_is_refused(changes: dict[str, float], says: str) -> None:
    with pytest.raises(InputError, match=says):
        replace(small_recording().trials[CHUNK][unified()], **changes)


def test_changed_templates_are_named() -> None:
    recording = small_recording()
    environment = replace(recording.environments["unified"], kernel_hash=kernel_hash("unified"))
    assert recording.changed_templates() == ["unified"]
    assert replace(recording, environments={"unified": environment}).changed_templates() == []
    assert replace(recording, environments={"gone": environment}).changed_templates() == ["gone"]


def test_twins_with_the_same_code_and_samples_count_as_one_measurement() -> None:
    recording = small_recording()
    one, twin, other = (unified(num_segments=segments) for segments in (1, 8, 16))
    first = recording.trials[CHUNK][one]
    assert isinstance(first.outcome, Timed)
    assert first.facts is not None
    same = replace(first, outcome=replace(first.outcome, variant=twin))
    held = {one: first, twin: same}
    assert replace(recording, trials={CHUNK: held}).measurements(CHUNK) == 1
    otherwise = replace(same, facts=replace(first.facts, code_hash="another"))
    assert replace(recording, trials={CHUNK: {**held, other: otherwise}}).measurements(CHUNK) == 2
    assert recording.measurements(replace(CHUNK, page_size=128)) == 0
