from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from recording_samples import CHUNK, DECODE, FASTEST, small_recording, unified
from t4 import invalidity, t4_document, write_t4

from attention_tuner.kernel_templates.outcome import Failed, Outcome, Timed
from attention_tuner.tuner.processes.process import EXCEEDED
from attention_tuner.tuner.recording import Recorded

RECORDING = small_recording()
# From https://github.com/odgaard/TuningSchema, branch T4, results-schema.json.
NUMBER, TEXT, LIST, OBJECT = ({"type": name} for name in ("number", "string", "array", "object"))
MEASUREMENT = {"type": "object",
               "properties": {"name": TEXT, "value": {"type": ["number", "string", "array"]}, "unit": TEXT}}
RESULT: dict[str, Any] = {
    "type": "object",
    "required": ["configuration", "times", "invalidity", "correctness"],
    "properties": {
        "timestamp": TEXT,
        "configuration": OBJECT,
        "objectives": LIST,
        "times": {"type": "object", "properties": {
            "compilation_time": NUMBER, "runtimes": LIST, "framework": NUMBER, "search_algorithm": NUMBER,
            "validation": NUMBER}},
        "invalidity": {"enum": ["timeout", "compile", "runtime", "correctness", "constraints", "correct"]},
        "correctness": NUMBER,
        "measurements": {"type": "array", "items": MEASUREMENT},
    },
}  # fmt: skip
SCHEMA = {
    "type": "object",
    "required": ["schema_version", "results"],
    "properties": {"schema_version": {"type": "string", "pattern": r"^[0-9]+\.[0-9]+\.[0-9]+$"},
                   "results": {"type": "array", "items": RESULT}},
}  # fmt: skip


def test_every_task_is_a_file_that_the_schema_accepts(tmp_path: Path) -> None:
    paths = write_t4(RECORDING, tmp_path / "t4")
    assert [path.name for path in paths] == ["01_page=16,batch=16x1@4095.json", "02_page=16,batch=1x512@4096.json"]
    assert sorted(paths) == sorted((tmp_path / "t4").iterdir())
    for path, task in zip(paths, (DECODE, CHUNK), strict=True):
        document = json.loads(path.read_text())
        jsonschema.validate(document, SCHEMA)
        assert document == t4_document(RECORDING, task)
        assert document["schema_version"] == "1.0.0"


def test_a_result_has_the_samples_the_configuration_and_what_it_cost() -> None:
    results = t4_document(RECORDING, DECODE)["results"]
    assert len(results) == 54
    (best,) = (r for r in results if r["configuration"] == {"template": "unified", "page_size": 16, **FASTEST})
    outcome = RECORDING.outcome(DECODE, unified(**FASTEST))
    assert isinstance(outcome, Timed)
    assert best["times"] == {"compilation_time": 3500.0, "runtimes": list(outcome.timing.samples_ms),
                             "validation": pytest.approx(31.25 - sum(outcome.timing.samples_ms))}  # fmt: skip
    assert (best["invalidity"], best["correctness"], best["objectives"]) == ("correct", 1.0, ["time"])
    assert {"name": "time", "value": 1.0, "unit": "ms"} in best["measurements"]
    assert {"name": "registers", "value": 64, "unit": ""} in best["measurements"]


def test_reasons_without_a_time_are_named_in_the_words_of_t4() -> None:
    results = t4_document(RECORDING, DECODE)["results"]
    kinds = Counter((r["invalidity"], r["correctness"]) for r in results)
    assert kinds == {("correct", 1.0): 50, ("correctness", 0.0): 1, ("compile", 0.0): 1, ("runtime", 0.0): 1,
                     ("constraints", 0.0): 1}
    assert all(not r["times"]["runtimes"] for r in results if r["invalidity"] != "correct")
    hung: Outcome = Failed(unified(), "check", f"{EXCEEDED} 3 s")
    assert invalidity(hung) == "timeout"


def test_facts_that_are_not_known_are_left_out() -> None:
    variant = unified()
    outcome = RECORDING.outcome(DECODE, variant)
    assert outcome is not None
    document = t4_document(
        RECORDING.__class__(RECORDING.grid, RECORDING.gpu, RECORDING.regime, RECORDING.environments,
                            RECORDING.recorded_at, {DECODE: {variant: Recorded(outcome, seconds=0.01)}}), DECODE)
    jsonschema.validate(document, SCHEMA)
    assert [m["name"] for m in document["results"][0]["measurements"]] == ["time", "plan_time", "worst_ratio"]
