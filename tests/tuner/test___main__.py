from __future__ import annotations

import subprocess
import sys


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "attention_tuner.tuner", "generate", "--model", "nope"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("attention-tuner: no model and no file is called 'nope'")
    assert done.stderr.count("\n") == 1
