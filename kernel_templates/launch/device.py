"""The GPU that is present, as torch and the driver describe it."""

# pyright: basic
from __future__ import annotations

import shutil
import subprocess
from typing import Any

from ..gpu import Gpu

# Seconds. `nvidia-smi` takes a fraction of one, but a driver in trouble may never let it answer.
DRIVER_LIMIT_S = 5.0


def present_gpu() -> Gpu | None:
    """The current CUDA device, or None where torch can use none. Imports torch."""
    properties = _properties()
    if properties is None:
        return None
    return Gpu(
        name=properties.name,
        capability=(properties.major, properties.minor),
        num_sms=properties.multi_processor_count,
        shared_memory_bytes=properties.shared_memory_per_block_optin,
        l2_bytes=properties.L2_cache_size,
        driver=_driver_version(),
    )


def present_uuid() -> str | None:
    """The UUID of the current CUDA device as `nvidia-smi` writes it, None where torch can use none. Imports torch."""
    properties = _properties()
    return properties and f"GPU-{properties.uuid}"


def present_memory_bytes() -> int | None:
    """The memory of the current CUDA device in bytes, None where torch can use none. Imports torch."""
    properties = _properties()
    return properties and properties.total_memory


def _properties() -> Any:
    """Torch's properties of the current CUDA device, None where there is none."""
    import torch

    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(torch.cuda.current_device())


def _driver_version() -> str:
    """The driver's version from `nvidia-smi`; empty where there is no such tool, or it does not answer in time."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DRIVER_LIMIT_S)
    except subprocess.TimeoutExpired:
        return ""
    lines = done.stdout.splitlines()
    return lines[0].strip() if lines else ""
