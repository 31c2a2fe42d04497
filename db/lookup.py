"""The question an engine asks, answered from the user's database and the configs that ship."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from ..kernel_templates.batch import Batch, BatchBucket
from ..kernel_templates.gpu import Gpu
from ..kernel_templates.outcome import BestConfig, Environment
from ..kernel_templates.spec import AttentionSpec
from .engine import sqlite_path
from .export import import_json
from .store import PATH_VARIABLE, Store, default_path
from .table import Answer, ConfigTable

SHIPPED = Path(__file__).parent / "configs"


def lookup(spec: AttentionSpec, asked: Batch | BatchBucket, page_size: int, gpu: Gpu) -> Answer:
    """The variant to run for a batch, or a bucket of batches, of layer `spec` on `gpu`, and where it comes from.

    The database is `default_path()`, read on the first call; a missing one is not an error. Raises `StoreError` when it
    is there and cannot be read.
    """
    return _table(os.environ.get(PATH_VARIABLE)).lookup(spec, asked, page_size, gpu)


def load_table(where: str | None = None) -> ConfigTable:
    """A fresh snapshot of the database `where` (default: `default_path()`) and of the configs that ship.

    A missing file is not an error. Raises `StoreError` when it is there and cannot be read.
    """
    where = where or default_path()
    path = sqlite_path(where)
    stored: list[BestConfig] = []
    if path is None or path.exists():
        with Store.open(where, create=False) as store:
            stored = store.best_configs()
    return ConfigTable.of((*stored, *shipped_configs()), _environment)


def shipped_configs() -> list[BestConfig]:
    """The configs that ship with the package."""
    return [config for path in sorted(SHIPPED.glob("*.json")) for config in import_json(path)]


_table = functools.lru_cache(maxsize=8)(load_table)


def _environment(template: str, gpu: Gpu) -> Environment:
    from ..kernel_templates.sources import environment

    return environment(template, gpu)
