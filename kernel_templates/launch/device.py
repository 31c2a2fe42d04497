"""The GPU that is present."""

# pyright: basic
from __future__ import annotations

import shutil
import subprocess

from ..gpu import Gpu


def present_gpu() -> Gpu | None:
    """The current CUDA device, or None where torch can use none. Imports torch."""
    import torch

    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
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
    import torch

    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def present_memory_bytes() -> int | None:
    """The memory of the current CUDA device in bytes, None where torch can use none. Imports torch."""
    import torch

    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def _driver_version() -> str:
    """The driver's version as `nvidia-smi` says it; empty where there is no such tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    return lines[0].strip() if lines else ""
