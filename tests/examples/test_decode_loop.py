import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "decode_loop.py"


def run(environment: dict[str, str]) -> str:
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path), **environment}
    done = subprocess.run([sys.executable, str(EXAMPLE)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_token_is_that_of_eager_attention(tmp_path: Path):
    out = run({"ATTENTION_TUNER_DB": str(tmp_path / "none.db"), "CUDA_VISIBLE_DEVICES": ""})
    steps = re.search(r"4 requests, \d+ prompt tokens and 24 new ones in .*; steps: (\d+) hybrid, (\d+) decode", out)
    assert steps is not None, out
    assert min(map(int, steps.groups())) > 0
    assert "24 of 24 tokens equal those of eager attention" in out


@pytest.mark.gpu
def test_on_a_gpu_steps_that_only_decode_are_replayed():
    out = run({})
    steps = re.search(r"(\d+) hybrid, (\d+) decode, (\d+) replayed", out)
    assert steps is not None, out
    hybrid, decode, replayed = map(int, steps.groups())
    assert decode == replayed > 0
    assert hybrid > 0
