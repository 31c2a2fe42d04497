from __future__ import annotations

import re
from dataclasses import replace

import pytest
from recording_samples import DECODE, small_recording, unified

from attention_tuner.tuner.console.recording_report import print_changed, print_replayed, replayed_document
from attention_tuner.tuner.replay import Replayed
from attention_tuner.tuner.settings import TaskResult


def test_templates_that_have_changed_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    print_changed(small_recording())
    assert capsys.readouterr().out == "recorded with other kernel sources than the present ones: unified\n"
    print_changed(replace(small_recording(), environments={}))
    assert capsys.readouterr().out == ""


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
