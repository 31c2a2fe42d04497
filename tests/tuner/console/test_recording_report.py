from __future__ import annotations

import re
from dataclasses import replace

import pytest
from recording_samples import CHUNK, DECODE, small_recording, unified

from attention_tuner.kernel_templates.sources import kernel_hash
from attention_tuner.tuner.console.recording_report import (
    changed_templates,
    print_changed,
    print_details,
    print_recording,
    print_replayed,
    recording_document,
    replayed_document,
)
from attention_tuner.tuner.replay import Replayed
from attention_tuner.tuner.settings import TaskResult


def test_the_table_says_what_was_recorded_of_each_task(capsys: pytest.CaptureFixture[str]) -> None:
    recording = small_recording()
    only_wrong = {v: r for v, r in recording.trials[DECODE].items() if type(r.outcome).__name__ == "Wrong"}
    print_recording(replace(recording, trials={**recording.trials, replace(CHUNK, page_size=32): only_wrong}))
    lines = [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert ["by hand on sm_90, regime graph-cold-burst"] in lines
    # The samples that are made up are a distance from the fastest, and each code is of all numbers of segments.
    measured = {task: str(recording.measurements(task)) for task in recording.tasks}
    assert ["16x1@4095", "16", "54", "50", "1", "2", "1", measured[DECODE], "1 ms", "1 (1.9%)"] in lines
    assert ["1x512@4096", "16", "54", "54", "0", "0", "0", measured[CHUNK], "2 ms", "1 (1.9%)"] in lines
    assert ["1x512@4096", "32", "1", "0", "1", "0", "0", "0", "none", "0"] in lines


def test_the_details_name_the_optima_and_why_variants_have_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    print_details(small_recording())
    out = capsys.readouterr().out
    lines = [re.split(r"  +", line.strip()) for line in out.splitlines()]
    fastest = "unified block_m=16 block_n=64 num_segments=8 num_stages=3 num_warps=2"
    assert ["16x1@4095", "16", fastest] in lines
    assert ["1", "failed", "compile", "RuntimeError: PassManager::run failed"] in lines
    assert "recorded from 2026-11-30T02:00:00+00:00 to" in out
    assert "with Triton 3.6.0, torch 2.11.0, driver 580.1" in out
    assert "recorded with other kernel sources than the present ones: unified\n" in out


def test_kernels_that_are_those_recorded_are_not_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    recording = small_recording()
    environment = replace(recording.environments["unified"], kernel_hash=kernel_hash("unified"))
    assert changed_templates(replace(recording, environments={"unified": environment})) == []
    assert changed_templates(replace(recording, environments={"unified": environment, "gone": environment})) == ["gone"]
    print_changed(replace(recording, environments={"unified": environment}))
    assert capsys.readouterr().out == ""


def test_the_document_counts_what_is_as_good_as_the_optimum() -> None:
    document = recording_document(small_recording())
    first = document["tasks"][0]
    assert first["outcomes"] == {"timed": 50, "wrong": 1, "failed": 2, "skipped": 1}
    assert first["optimum"]["median_ms"] == 1.0
    assert first["within_2_percent"] == 1


def test_a_replay_is_held_against_the_optimum(capsys: pytest.CaptureFixture[str]) -> None:
    recording = small_recording()
    optimum = recording.optimum(DECODE)
    assert optimum is not None
    slow = recording.outcome(DECODE, unified(num_warps=1))
    assert slow is not None
    each = Replayed(recording, TaskResult(DECODE), (slow, optimum))
    print_replayed(recording, [each])
    lines = [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert ["16x1@4095", "16", "nothing", "1 ms", "2", "2 trials", "1.9%"] in lines
    document = replayed_document(each)
    assert document == {"optimum": {"variant": optimum.variant.key(), "median_ms": 1.0}, "loss": None, "trials": 2,
                        "trials_to_2_percent": 2}
