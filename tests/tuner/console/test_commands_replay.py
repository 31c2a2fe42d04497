from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from cli_samples import Lines
from recording_samples import CHUNK, DECODE, SPEC, small_recording

from attention_tuner.kernel_templates.errors import InputError
from attention_tuner.kernel_templates.outcome import Wrong
from attention_tuner.tuner.console.commands_replay import Wanted

RECORDING = small_recording()
PAGE_128 = replace(DECODE, page_size=128)
TWO_PAGES = replace(RECORDING, trials={**RECORDING.trials, PAGE_128: RECORDING.trials[DECODE]})


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lines:
    monkeypatch.setenv("ATTENTION_TUNER_DB", str(tmp_path / "tuner.db"))
    return Lines(capsys)


@pytest.fixture
def file(tmp_path: Path) -> str:
    RECORDING.save(tmp_path / "small.json.gz")
    return str(tmp_path / "small.json.gz")


def test_a_replay_says_how_far_it_is_from_the_optimum_and_stores_nothing(
    lines: Lines, file: str, tmp_path: Path
) -> None:
    assert lines.run("tune", "--replay", file, "--trials", "54", "--sampler", "random") == 0
    rows = [re.split(r"  +", line.strip()) for line in lines.out.splitlines()]
    against = next(row for row in rows if row[0] == "1x512@4096" and row[2:4] == ["2 ms", "2 ms"])
    assert against[4] == "0.0%"
    assert re.fullmatch(r"\d+ trials", against[6])
    assert "Nothing is stored" in lines.out
    assert "replaying recording by hand of sm_90, 2026-11-30: no GPU is used" in lines.err
    assert [path.name for path in tmp_path.iterdir()] == ["small.json.gz"]


def test_the_document_is_the_same_for_the_same_seed(lines: Lines, file: str) -> None:
    command = ("tune", "--replay", file, "--batch", str(CHUNK.batch), "--sampler", "random", "--seed", "5", "--json")
    assert lines.run(*command) == 0
    document = json.loads(lines.out)
    (result,) = document["results"]
    assert result["batch"] == str(CHUNK.batch)
    assert result["loss"] >= 0
    assert result["trials"] == 30
    assert (document["database"], document["settings"]["seed"], document["settings"]["regime"]) == (
        None, 5, "graph-cold-burst")  # fmt: skip
    assert lines.run(*command) == 0
    assert json.loads(lines.out) == document


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--batch", "1x1@3"), "does not hold batch '1x1@3'"),
        (("--page-size", "16,128"), "does not hold page size 128"),
        (("--suite", "hopper13"), "does not hold any batch of suite 'hopper13'"),
        (("--model", "llama-3-8b"), "does not hold layer 'num_q_heads=32"),
        (("--gpu", "sm_90"), "--gpu does not go with --replay"),
        (("--warm",), "--warm does not go with --replay"),
        (("--dry-run",), "--dry-run does not go with --replay"),
        (("--cross",), "--cross does not go with --replay"),
    ],
)
def test_what_is_not_recorded_is_refused_in_one_sentence(
    arguments: tuple[str, ...], says: str, lines: Lines, file: str, tmp_path: Path
) -> None:
    assert lines.run("tune", "--replay", file, *arguments) == 2
    assert says in lines.err
    assert len(lines.err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["small.json.gz"]


def test_where_nothing_was_timed_the_status_is_1(lines: Lines, tmp_path: Path) -> None:
    wrong = {v: r for v, r in RECORDING.trials[DECODE].items() if isinstance(r.outcome, Wrong)}
    replace(RECORDING, trials={DECODE: wrong}).save(tmp_path / "wrong.json")
    assert lines.run("tune", "--replay", str(tmp_path / "wrong.json"), "--sampler", "random") == 1
    assert "no variant was timed" in lines.err.splitlines()[-1]


def test_what_is_wanted_narrows_what_is_recorded(tmp_path: Path) -> None:
    assert Wanted().tasks(TWO_PAGES) == (DECODE, CHUNK, PAGE_128)
    assert Wanted(page_sizes=["128"]).tasks(TWO_PAGES) == (PAGE_128,)
    assert Wanted((SPEC,), [str(DECODE.batch)]).tasks(TWO_PAGES) == (DECODE, PAGE_128)
    # Of a suite what is recorded, while each batch that is named has to be.
    suite = tmp_path / "suite.json"
    suite.write_text(json.dumps({"name": "suite", "batches": {"chunk": str(CHUNK.batch), "other": "1x1@1"}}))
    assert Wanted(suite=str(suite)).tasks(TWO_PAGES) == (CHUNK,)
    with pytest.raises(InputError, match="page size 128"):
        Wanted(batches=[str(CHUNK.batch)], page_sizes=["16,128"]).tasks(TWO_PAGES)
