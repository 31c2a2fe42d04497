"""The question an engine asks, answered from the user's database and the configs that ship."""

from __future__ import annotations

import functools
import os
import warnings
from pathlib import Path

from ..kernel_templates.batch import Batch, BatchBucket
from ..kernel_templates.errors import StoreError
from ..kernel_templates.gpu import Gpu
from ..kernel_templates.outcome import BestConfig, Environment
from ..kernel_templates.spec import AttentionSpec
from .engine import sqlite_path
from .export import import_json
from .store import PATH_VARIABLE, Store, default_path
from .table import Answer, ConfigTable

SHIPPED = Path(__file__).parent / "configs"
"""The folder of the exports that ship: one file for each GPU model, called by its `Gpu.slug`."""


def lookup(spec: AttentionSpec, asked: Batch | BatchBucket, page_size: int, gpu: Gpu) -> Answer:
    """The variant to run for a batch, or a bucket of batches, of layer `spec` on `gpu`, and where it comes from.

    The database is `default_path()`; it and what ships for `gpu` are read on the first call that asks about `gpu`, and
    `ConfigTable.lookup` says which of their configs comes first. A missing database is not made, and is no error; a
    database or shipped file that cannot be read is set aside with a warning.
    """
    return _table(os.environ.get(PATH_VARIABLE), gpu).lookup(spec, asked, page_size, gpu)


def load_table(where: str | None = None, gpu: Gpu | None = None) -> ConfigTable:
    """A fresh snapshot of the database `where` (default: `default_path()`) and of what ships for `gpu`, or for any.

    A missing file is not an error. Raises `StoreError` when `where` is given, is there and cannot be read; the default
    database is then set aside with a warning, as is a shipped file.
    """
    shipped = shipped_configs(gpu)
    stored, shipped = _checked(where, shipped)
    return ConfigTable.of(stored, _environment, shipped)


def shipped_configs(gpu: Gpu | None = None) -> list[BestConfig]:
    """The configs that ship with the package, for the model of `gpu` or for all.

    A file that cannot be read is set aside with a warning; what it holds about another GPU than its name says is never
    served.
    """
    found: list[BestConfig] = []
    for path in sorted(SHIPPED.glob("*.json")):
        if gpu is not None and path.stem != gpu.slug:
            continue
        try:
            found += (config for config in import_json(path) if config.gpu.slug == path.stem)
        except StoreError as error:
            warnings.warn(f"a file of shipped configs is set aside: {error}", stacklevel=2)
    return found


def _checked(where: str | None, shipped: list[BestConfig]) -> tuple[list[BestConfig], list[BestConfig]]:
    """The configs of the database, and `shipped` without those that failed a full check here."""
    try:
        return _read(where or default_path(), shipped)
    except (StoreError, OSError) as error:
        # An engine must not end because of a file that its user has perhaps never heard of.
        if where:
            raise
        warnings.warn(f"the user's database is set aside: {error}", stacklevel=3)
        return [], shipped


def _read(where: str, shipped: list[BestConfig]) -> tuple[list[BestConfig], list[BestConfig]]:
    path = sqlite_path(where)
    if path is not None and not path.exists():
        return [], shipped
    with Store.open(where, create=False) as store:
        return store.best_configs(), store.checked(shipped)


@functools.lru_cache(maxsize=8)
def _table(_variable: str | None, gpu: Gpu) -> ConfigTable:
    """The table for `gpu`, kept for as long as the variable that names the database has this value."""
    return load_table(gpu=gpu)


def _environment(template: str, gpu: Gpu) -> Environment:
    from ..kernel_templates.sources import environment

    return environment(template, gpu)
