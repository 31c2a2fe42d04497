"""What this machine has for tuning, and what will therefore happen."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ...db.engine import shown_name, sqlite_path
from ...kernel_templates.gpu import Gpu
from ...kernel_templates.launch.device import present_gpu

PACKAGES = ("torch", "triton", "optuna", "sqlalchemy", "numpy")


@dataclass(frozen=True, slots=True)
class Place:
    """A file or folder, or the URL of a database, and what can be done with it."""

    name: str
    exists: bool
    writable: bool

    @classmethod
    def of_path(cls, path: Path) -> Place:
        """The file or folder at `path`, writable too when it could be made in the nearest folder that exists."""
        nearest = next(place for place in (path, *path.absolute().parents) if place.exists())
        makeable = nearest == path or nearest.is_dir()
        return cls(str(path), path.exists(), makeable and os.access(nearest, os.W_OK))

    def __str__(self) -> str:
        state = "can be written" if self.writable else "cannot be written"
        return f"{self.name} ({state if self.exists else f'not there yet, {state}'})"


@dataclass(frozen=True, slots=True)
class Machine:
    """What one machine has: `versions` by package ("missing" for one that is not installed), `cores` for this process.

    `database` is None for one that is no file, which only opening can judge.
    """

    python: str
    system: str
    cores: int
    versions: dict[str, str]
    gpu: Gpu | None
    cache: Place
    database_name: str
    database: Place | None


def examine(database: str, cache: Path) -> Machine:
    """This machine, with the database at `database` and compiled kernels kept in `cache`. Opens and makes nothing.

    Raises `StoreError` when `database` is no path or URL. Imports torch.
    """
    path = sqlite_path(database)
    return Machine(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        cores=len(os.sched_getaffinity(0)),
        versions={package: _version(package) for package in PACKAGES},
        gpu=present_gpu(),
        cache=Place.of_path(cache),
        database_name=shown_name(database),
        database=None if path is None else _database(path),
    )


def consequences(machine: Machine) -> Iterator[str]:
    """What will happen on `machine`, a sentence each."""
    missing = [package for package, version in machine.versions.items() if version == _MISSING]
    if missing:
        yield f"Nothing can run before {', '.join(missing)} is installed."
    if machine.gpu is None:
        yield ("tune runs every variant through Triton's interpreter, on small batches: it shows that they are right, "
               "and its times (regime interpreter) are no GPU's and are never served as one's.")
        yield "generate and tune --dry-run work for any target, such as --gpu sm_90."
    else:
        yield (f"tune measures on {machine.gpu.name} with CUDA graphs over buffers that exceed its "
               f"{machine.gpu.l2_bytes >> 20} MiB of L2, while {machine.cores} cores compile ahead.")
    if machine.database is not None and not machine.database.writable:
        yield f"Nothing can be stored in {machine.database.name}: name another database with --db."
    if not machine.cache.writable:
        yield f"Compiled kernels cannot be kept in {machine.cache.name}: every run compiles again."


_MISSING = "missing"


def _database(path: Path) -> Place:
    place = Place.of_path(path)
    return replace(place, writable=place.writable and not path.is_dir())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return _MISSING
