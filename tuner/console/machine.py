"""The command about this computer: doctor."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...kernel_templates.gpu import Gpu
from . import options, output

if TYPE_CHECKING:
    from ..measure.rates import Rates

PACKAGES = ("torch", "triton", "optuna", "sqlalchemy", "numpy")
_MISSING = "missing"


@options.command
def doctor(
    measure: Annotated[bool, typer.Option(
        "--measure", help="Measure the GPU's read bandwidth and matmul rate.")] = False,
    db: options.Database = None,
    json: options.Json = False,
) -> None:
    """Show what tuning will use here: GPU, packages, kernel cache and database.

    \b
    Example:
      attention-tuner doctor --measure
    """
    from ...db import default_path
    from ..measure.rates import RatesJob
    from ..processes.compile import triton_cache
    from ..processes.worker import Worker
    from ..settings import Budget

    machine = examine(default_path() if db is None else db, triton_cache())
    rates = None
    if measure and machine.gpu is None:
        output.note("nothing is measured: there is no GPU")
    elif measure and machine.gpu is not None:
        with Worker.on(machine.gpu) as worker:
            rates = worker.run(RatesJob(), Budget.rates_limit_s)
    if json:
        output.print_json({**output.encode(machine), "gpu": machine.gpu and asdict(machine.gpu), "rates": rates,
                           "consequences": list(consequences(machine))})
    else:
        print_machine(machine, rates)


@dataclass(frozen=True, slots=True)
class Place:
    """A file or folder."""

    name: str
    exists: bool
    # True too where it does not exist and can be made.
    writable: bool

    @classmethod
    def of_path(cls, path: Path) -> Place:
        """Examine the file or folder at `path`."""
        nearest = next(place for place in (path, *path.absolute().parents) if place.exists())
        makeable = nearest == path or nearest.is_dir()
        return cls(str(path), path.exists(), makeable and os.access(nearest, os.W_OK))

    def __str__(self) -> str:
        state = "can be written" if self.writable else "cannot be written"
        return f"{self.name} ({state if self.exists else f'not there yet, {state}'})"


@dataclass(frozen=True, slots=True)
class Machine:
    """The parts of this computer that tuning uses."""

    python: str
    system: str
    # Cores that this process may use.
    cores: int
    # By package, "missing" for one that is not installed.
    versions: dict[str, str]
    gpu: Gpu | None
    cache: Place
    database_name: str
    # None for a database that is no file.
    database: Place | None


def examine(database: str, cache: Path) -> Machine:
    """Examine this computer, with its database at `database` and compiled kernels in `cache`; create nothing.

    Imports torch. Raises `StoreError` when `database` is no path or URL.
    """
    from ...db.engine import shown_name, sqlite_path
    from ...kernel_templates.launch.device import present_gpu

    path = sqlite_path(database)
    place = None if path is None else Place.of_path(path)
    return Machine(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        cores=len(os.sched_getaffinity(0)),
        versions={package: _version(package) for package in PACKAGES},
        gpu=present_gpu(),
        cache=Place.of_path(cache),
        database_name=shown_name(database),
        database=place and replace(place, writable=place.writable and not os.path.isdir(place.name)),
    )


def consequences(machine: Machine) -> Iterator[str]:
    """Yield sentences about the behaviour of the commands on `machine`."""
    missing = [package for package, version in machine.versions.items() if version == _MISSING]
    if missing:
        yield f"Nothing can run before {', '.join(missing)} is installed."
    if machine.gpu is None:
        yield ("tune runs variants through Triton's interpreter on small batches: this checks that they are right, but "
               "its times (regime interpreter) say nothing about a GPU and are never served for one.")
        yield "generate and tune --dry-run work for any target, such as --gpu sm_90."
    else:
        yield (f"tune measures on {machine.gpu.name} with CUDA graphs over buffers larger than its "
               f"{machine.gpu.l2_bytes >> 20} MiB of L2, while {machine.cores} cores compile.")
    if machine.database is not None and not machine.database.writable:
        yield f"Nothing can be stored in {machine.database.name}: name another database with --db."
    if not machine.cache.writable:
        yield f"Compiled kernels cannot be kept in {machine.cache.name}: every run compiles again."


def print_machine(machine: Machine, rates: Rates | None) -> None:
    """Write what was found, the measured rates, and the consequences."""
    gpu = machine.gpu
    rows = {
        "python": f"{machine.python} on {machine.system}, {machine.cores} cores",
        **machine.versions,
        "GPU": "none that torch can use" if gpu is None else (
            f"{gpu.name}, sm_{gpu.arch}, {gpu.num_sms} SMs, {gpu.shared_memory_bytes >> 10} KiB of shared memory, "
            f"{gpu.l2_bytes >> 20} MiB of L2, driver {gpu.driver or 'unknown'}"),
        "kernel cache": str(machine.cache),
        "database": str(machine.database or machine.database_name),
    }
    if rates is not None:
        rows["measured"] = f"reads {rates.read_tb_per_s:.2f} TB/s, bf16 matmul {rates.matmul_tflops:.0f} TFLOP/s"
    width = max(map(len, rows))
    for name, value in rows.items():
        output.say(f"{name:<{width}}  {value}")
    for sentence in consequences(machine):
        output.say(sentence)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return _MISSING
