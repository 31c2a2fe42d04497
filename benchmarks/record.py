"""Helpers of all benchmarks: options, tables, and the record of command, host, GPUs, versions and date."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attention_tuner.kernel_templates.gpu import INTERPRETER, Gpu
from attention_tuner.kernel_templates.launch.device import present_gpu
from attention_tuner.tuner.measure.race import Interval

PACKAGES = ("torch", "triton", "optuna", "sqlalchemy", "numpy", "scipy")
GPU_FIELDS = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit",
              "temperature.gpu", "persistence_mode", "compute_mode")  # fmt: skip


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--out", type=Path, required=True, metavar="FILE", help="where to write the JSON")
    return made


def add_interpreter(made: argparse.ArgumentParser) -> None:
    """Add the option `--interpreter`."""
    made.add_argument("--interpreter", action="store_true", help="tiny batches through Triton's interpreter "
                      "(TRITON_INTERPRET=1), to try the script out")  # fmt: skip


def required_gpu(interpreter: bool) -> Gpu:
    """The interpreter or the present GPU; exits the script if there is none."""
    gpu = INTERPRETER if interpreter else present_gpu()
    if gpu is None:
        sys.exit("this needs an NVIDIA GPU, or --interpreter")
    return gpu


def record() -> dict[str, Any]:
    """The command, host, GPUs, versions and time of this process."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"system": f"{platform.system()} {platform.release()} {platform.machine()}", "cpu": _cpu(),
                    "cores": len(os.sched_getaffinity(0)), "load_average": list(os.getloadavg())},
        "gpus": _gpus(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
    }


def write(out: Path, results: Mapping[str, Any]) -> None:
    """Write `results` with the record of this process to `out`, atomically."""
    out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"record": record(), **results}, indent=1, allow_nan=False) + "\n"
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(out)


def fractions(interval: Interval | None) -> dict[str, float | None]:
    """An interval of log-ratios as fractions: None for an unknown bound, 0 without an interval."""
    if interval is None:
        return {"low": 0.0, "median": 0.0, "high": 0.0}
    bounds = {name: getattr(interval, name) for name in ("low", "median", "high")}
    return {name: math.expm1(value) if math.isfinite(value) else None for name, value in bounds.items()}


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a compact table, with all columns but the first aligned to the right."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join([first.strip().ljust(widths[0]), *rest]))


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _gpus() -> list[dict[str, str]]:
    """The fields that `nvidia-smi` reports for each GPU; empty without that tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return [dict(zip(GPU_FIELDS, map(str.strip, line.split(",")), strict=False)) for line in lines]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
