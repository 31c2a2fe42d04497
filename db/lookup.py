"""The question an engine asks, answered from the user's database and the configs that ship."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..kernel_templates.batch import Batch, BatchBucket
from ..kernel_templates.errors import StoreError
from ..kernel_templates.gpu import Gpu
from ..kernel_templates.outcome import BestConfig, Environment
from ..kernel_templates.spec import AttentionSpec
from .answer import Answer, Chain
from .engine import sqlite_path
from .export import import_json
from .full_checks import StoredChecks
from .rows import Rows, made
from .store import PATH_VARIABLE, Store, default_path
from .table import ConfigTable

SHIPPED = Path(__file__).parent / "configs"
"""The folder of the exports that ship: one file for each GPU model, called by its `Gpu.slug`."""


def lookup(spec: AttentionSpec, asked: Batch | BatchBucket, page_size: int, gpu: Gpu) -> Answer:
    """The variant to run for a batch, or a bucket of batches, of layer `spec` on `gpu`, and where it comes from.

    The database is `default_path()`; it and what ships for `gpu` are read on the first call that asks about `gpu`, and
    `ConfigTable.lookup` says which of their configs comes first. A missing database is not made, and is no error; a
    database or shipped file that cannot be read is set aside with a warning.
    """
    return _table(os.environ.get(PATH_VARIABLE), gpu).lookup(spec, asked, page_size, gpu)


def load_table(where: str | None = None, gpu: Gpu | None = None, *, files: Sequence[str | os.PathLike[str]] = (),
               chain: Chain | None = None) -> ConfigTable:
    """A fresh snapshot of the database `where` (default: `default_path()`), then of `files`, in their order, then of
    what ships for `gpu`, or for any: of configs that are alike the earlier answers.

    `files` are exports in any format that `read_configs` reads. A missing database is not an error. Raises `StoreError`
    when `where` is given, is there and cannot be read; the default database is then set aside with a warning, as is a
    file.
    """
    best, checks = _checked(where)
    own = [best] if best is not None else []
    named = [made(_of_file(path, "exported configs"), "file", checks.judge) for path in files]
    return ConfigTable([*own, *named, made(shipped_configs(gpu), "shipped", checks.judge)], _environment, chain)


def shipped_configs(gpu: Gpu | None = None) -> list[BestConfig]:
    """The configs that ship with the package, for the model of `gpu` or for all.

    A file that cannot be read is set aside with a warning; what it holds about another GPU than its name says is never
    served.
    """
    found: list[BestConfig] = []
    for path in sorted(SHIPPED.glob("*.json")):
        if gpu is None or path.stem == gpu.slug:
            found += (config for config in _of_file(path, "shipped configs") if config.gpu.slug == path.stem)
    return found


def _of_file(path: str | os.PathLike[str], what: str) -> list[BestConfig]:
    try:
        return import_json(path)
    except StoreError as error:
        warnings.warn(f"a file of {what} is set aside: {error}", stacklevel=4)
        return []


def _checked(where: str | None) -> tuple[Rows[Any] | None, StoredChecks]:
    """The configs of the database, where there is one, and its full checks."""
    try:
        return _read(where or default_path())
    except (StoreError, OSError) as error:
        # An engine must not end because of a file that its user has perhaps never heard of.
        if where:
            raise
        warnings.warn(f"the user's database is set aside: {error}", stacklevel=3)
        return None, StoredChecks()


def _read(where: str) -> tuple[Rows[Any] | None, StoredChecks]:
    path = sqlite_path(where)
    if path is not None and not path.exists():
        return None, StoredChecks()
    with Store.open(where, create=False) as store:
        snapshot = store.snapshot()
    checks = StoredChecks(snapshot.checks, snapshot.name)
    return snapshot.rows(checks), checks


@functools.lru_cache(maxsize=8)
def _table(_variable: str | None, gpu: Gpu) -> ConfigTable:
    """The table for `gpu`, kept for as long as the variable that names the database has this value."""
    return load_table(gpu=gpu)


def _environment(template: str, gpu: Gpu) -> Environment:
    from ..kernel_templates.sources import environment

    return environment(template, gpu)
