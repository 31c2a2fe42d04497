"""Exports in both of their formats, one JSON file and a folder of JSON files; a lookup reads databases like them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...kernel_templates.errors import InputError
from ...kernel_templates.outcome import BestConfig
from ..checks import StoredChecks
from ..rows import Rows, made
from ..store import Store
from .export import Exported, export_json, read_json
from .folder import read_folder, write_folder

FORMATS = ("json", "folder")


def write_configs(exported: Exported, path: str | os.PathLike[str], form: str = "json") -> None:
    """Write `exported` to `path` in one of `FORMATS`; losses are kept in JSON alone.

    Raises `InputError` for another format, and `StoreError` where nothing can be written.
    """
    require_format(form)
    if form == "json":
        export_json(exported.configs, path, exported.losses)
    else:
        write_folder(exported.configs, path)


def require_format(form: str) -> None:
    """Raises `InputError` unless `form` is one of `FORMATS`."""
    if form not in FORMATS:
        raise InputError(f"unknown format {form!r}; accepted are {', '.join(FORMATS)}")


def read_configs(path: str | os.PathLike[str]) -> Exported:
    """What an export in any format holds, which is told from what is there. Raises `StoreError`."""
    where = Path(path).expanduser()
    if where.is_dir():
        return Exported(read_folder(path))
    return read_json(path)


def rows_of(path: str | os.PathLike[str],
            judge: Callable[[BestConfig], BestConfig | None]) -> tuple[Rows[Any], Exported]:
    """The rows of an export in any format, or of a database, for a `ConfigTable`, and the rest of it.

    Those of a database are not read yet. `judge` says what is served, and so do a database's own checks.
    """
    if is_database(str(path)):
        with Store.open(path, create=False) as store:
            snapshot = store.snapshot()
        own = StoredChecks(snapshot.checks, snapshot.name)
        rows = snapshot.rows(lambda config: (passed := own.judge(config)) and judge(passed), "file")
        return rows, Exported([], snapshot.losses())
    exported = read_configs(path)
    return made(exported.configs, "file", judge), exported


def is_database(path: str) -> bool:
    """Whether `path` is the URL of a database or an SQLite file."""
    return "://" in path or _begins(Path(path).expanduser(), b"SQLite format 3\0")


def _begins(path: Path, start: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(start)) == start
    except OSError:
        # Reading it says why.
        return False
