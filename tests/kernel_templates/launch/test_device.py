import os
import subprocess
from pathlib import Path

import pytest

from attention_tuner.kernel_templates.launch import device
from attention_tuner.kernel_templates.launch.device import present_gpu, present_memory_bytes, present_uuid


def test_without_a_gpu_there_is_none():
    import torch

    if torch.cuda.is_available():
        pytest.skip("a GPU is present")
    assert present_gpu() is None
    assert present_uuid() is None
    assert present_memory_bytes() is None


@pytest.mark.parametrize(("script", "version"), [
    ("echo 580.1", "580.1"), ("true", ""), ("exec sleep 60", ""),
])
def test_the_driver_is_unknown_where_nvidia_smi_says_nothing_in_time(
    script: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    if not version:
        monkeypatch.setattr(device, "DRIVER_LIMIT_S", 0.2)
    assert device._driver_version() == version


@pytest.mark.gpu
def test_the_present_gpu_has_a_name_a_size_and_a_driver():
    gpu = present_gpu()
    assert gpu is not None
    assert gpu.name.startswith("NVIDIA")
    assert gpu.num_sms > 1
    assert gpu.shared_memory_bytes >= 64 * 1024
    assert gpu.driver
    memory = present_memory_bytes()
    assert memory is not None
    assert memory > 2**30


@pytest.mark.gpu
def test_the_present_gpu_has_the_uuid_that_nvidia_smi_lists():
    command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    assert present_uuid() in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
