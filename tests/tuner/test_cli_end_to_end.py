"""The whole loop with real processes: tune, export, import, lookup, verify, and Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attention_tuner.tuner.console.app import main

COMMAND = [sys.executable, "-m", "attention_tuner.tuner"]
LAYER = ("--spec", "num_q_heads=4,num_kv_heads=1,head_dim=64,dtype=float16")
BATCHES = ("1x9@20,1x1@24", "1x2@20")
Run = Callable[..., dict[str, Any]]
TUNE = ("tune", *LAYER, "--gpu", "interpreter", "--sampler", "random")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    # The commands decide for themselves what interprets: the suite's own choice must not leak into them.
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**kept, "ATTENTION_TUNER_DB": str(tmp_path / "tuned.db")}


def started(environment: dict[str, str], *arguments: str) -> dict[str, Any]:
    """The JSON document that a command prints, in a process of its own."""
    command = [*COMMAND, *arguments, "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def run(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process, which saves the import of torch, and returns the JSON document it prints."""
    monkeypatch.setenv("ATTENTION_TUNER_DB", environment["ATTENTION_TUNER_DB"])
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def run(*arguments: str) -> dict[str, Any]:
        capsys.readouterr()
        status = main([*arguments, "--json"])
        out, err = capsys.readouterr()
        assert status == 0, err
        return json.loads(out)

    return run


def test_what_is_tuned_is_looked_up_from_an_import_of_its_export(
    environment: dict[str, str], run: Run, tmp_path: Path
) -> None:
    asked = [word for batch in BATCHES for word in ("--batch", batch)]
    tuned = started(environment, *TUNE, *asked, "--trials", "3")
    assert [result["outcomes"] for result in tuned["results"]] == [{"timed": 3}] * 2
    assert [result["tried"] for result in tuned["results"]] == [3, 3]
    for result in tuned["results"]:
        assert result["best"]["time"]["regime"]["capture"] == "interpreter"

    exported = str(tmp_path / "export.json")
    assert run("export", exported, "--provisional")["configs"] == 2
    elsewhere = ("--db", str(tmp_path / "elsewhere.db"))
    assert run("import", exported, *elsewhere)["configs"] == 2
    here, there = (run("lookup", *LAYER, *asked, "--gpu", "interpreter", *where) for where in ((), elsewhere))
    assert here == there
    for answer, result in zip(there["answers"], tuned["results"], strict=True):
        assert (answer["source"], answer["stale"]) == ("exact", False)
        assert answer["variant"] == result["best"]["variant"]["key"]
    # A time from the interpreter says nothing about a GPU.
    other = run("lookup", *LAYER, *asked, "--gpu", "sm_90", *elsewhere)
    assert {answer["source"] for answer in other["answers"]} == {"heuristic"}

    again = run(*TUNE, *asked, "--trials", "3")
    assert [(result["tried"], result["reused"]) for result in again["results"]] == [(0, 3), (0, 3)]
    assert run("show")["trials"] == {"timed": 6}


def test_ctrl_c_ends_within_seconds_and_keeps_every_finished_trial(environment: dict[str, str], run: Run) -> None:
    arguments = (*TUNE, "--batch", BATCHES[0], "--trials", "500", "--seconds", "200")
    # A suite that was started in the background ignores SIGINT, and its children would too.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        [*COMMAND, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        signal.signal(signal.SIGINT, handler)
        assert process.stderr is not None
        seen = next(line for line in process.stderr if "trial 1 of" in line)
        process.send_signal(signal.SIGINT)
        # The search alone would go on for 200 s.
        out, err = process.communicate(timeout=100)
    assert process.returncode == 130, seen + err
    assert out == ""
    assert "Traceback" not in err
    assert "goes on from there" in err.splitlines()[-1]
    assert run("show")["trials"]["timed"] >= 1


def test_what_was_tuned_with_another_driver_is_verified_and_tuned_anew(run: Run, tmp_path: Path) -> None:
    run(*TUNE, "--batch", BATCHES[1], "--trials", "3", "--cross")
    with contextlib.closing(sqlite3.connect(tmp_path / "tuned.db")) as connection, connection:
        for table in ("trials", "best_configs"):
            connection.execute(f"update {table} set triton = 'before'")
    arguments = ("verify", *LAYER, "--gpu", "interpreter", "--retune", "--trials", "4")
    found = run(*arguments)
    (verified,) = found["verified"]
    assert verified["state"] in ("held", "changed", "beaten")
    assert (verified["retuned"] is None) == (verified["state"] == "held")
    again = run(*arguments)
    assert (again["verified"], again["fresh"]) == ([], 1)
    assert run("report", "portfolio", *LAYER)["groups"][0]["shapes"] == 1


@pytest.mark.gpu
def test_a_suite_is_crossed_and_verified_on_a_gpu(environment: dict[str, str], run: Run) -> None:
    layer = ("--spec", "num_q_heads=32,num_kv_heads=8,head_dim=128")
    batches = ("1x512@4096,7x1@2048", "16x1@4096", "64x1@512", "4x6@8000")
    asked = [word for batch in batches for word in ("--batch", batch)]
    tuned = started(environment, "tune", *layer, *asked, "--page-size", "16,128", "--trials", "10", "--cross")
    assert all(result["best"] is not None for result in tuned["results"])
    assert sum(result["crossed"] for result in tuned["results"]) > 0
    assert sum(result["shared"] for result in tuned["results"]) > 0
    for group in run("report", "portfolio", *layer, "--kernels", "2")["groups"]:
        assert (group["shapes"], group["portfolio"]["shapes"]) == (4, 4)
        assert group["left_out"]["judged"] >= 2
    (pages,) = run("report", "pages", *layer)["comparisons"]
    assert len(pages["batches"]) == 4
    # Nothing has changed, and most winners are still what nothing beats.
    states = run("verify", *layer, "--all", "--retune", "--trials", "10")["states"]
    assert states.get("held", 0) >= 4, states
    assert not states.get("undecided"), states
