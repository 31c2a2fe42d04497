from __future__ import annotations

import re
from dataclasses import replace

import pytest
from recording_samples import CHUNK, DECODE, small_recording

from attention_tuner.tuner.recording_report import print_recording


def test_the_table_says_what_was_recorded_of_each_task(capsys: pytest.CaptureFixture[str]) -> None:
    recording = small_recording()
    only_wrong = {v: r for v, r in recording.trials[DECODE].items() if type(r.outcome).__name__ == "Wrong"}
    print_recording(replace(recording, trials={**recording.trials, replace(CHUNK, page_size=32): only_wrong}))
    lines = [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert ["by hand on sm_90, regime graph-cold-burst"] in lines
    assert ["16x1@4095", "16", "54", "50", "1", "2", "1", "1 ms", "1"] in lines
    assert ["1x512@4096", "16", "54", "54", "0", "0", "0", "2 ms", "1"] in lines
    assert ["1x512@4096", "32", "1", "0", "1", "0", "0", "none", "0"] in lines
