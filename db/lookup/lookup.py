"""Entry points of the lookup, which reads the user's database and the shipped configs."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

from ...kernel_templates.batch import Batch, BatchBucket
from ...kernel_templates.errors import InputError, StoreError
from ...kernel_templates.gpu import Gpu
from ...kernel_templates.outcome import BestConfig, Environment
from ...kernel_templates.spec import AttentionSpec
from ..answer import Answer, Chain
from ..engine import PATH_VARIABLE, default_path, is_database, sqlite_path
from ..losses import Losses
from ..records import warn_unusable
from ..store import Contents, Store
from .export import read_configs, read_json
from .table import ConfigTable, Place

SHIPPED = Path(__file__).parents[1] / "configs"
"""The folder of shipped configs: one exported file per GPU model, named by its `Gpu.slug`."""

_PATH = (str, os.PathLike)


def lookup(spec: AttentionSpec, asked: Batch | BatchBucket, page_size: int, gpu: Gpu) -> Answer:
    """The variant to run for a batch or bucket of layer `spec` on `gpu`, and its source.

    The first call for a `gpu` reads the database `default_path()` and the configs shipped for `gpu`.
    `ConfigTable.lookup` states which config answers. A missing database is no error and is not created. An unreadable
    database or shipped file is skipped with a warning.
    """
    return default_table(gpu).lookup(spec, asked, page_size, gpu)


def default_table(gpu: Gpu) -> ConfigTable:
    """The table that `lookup` uses for `gpu`."""
    _require_gpu(gpu)
    return _table(os.environ.get(PATH_VARIABLE), gpu)


def load_table(where: str | None = None, gpu: Gpu | None = None, *, files: Sequence[str | os.PathLike[str]] = (),
               chain: Chain | None = None, warned: set[str] | None = None) -> ConfigTable:
    """A fresh snapshot of the database `where` (default: `default_path()`), `files` and the shipped configs.

    Of equally good configs, the one of the earlier place answers: the database, then `files` in order, then the shipped
    configs. Shipped configs are those for `gpu` and for the GPUs in the chain's `like`; for all GPUs if `gpu` is None.
    `files` are exports in either format or other databases. A missing database is no error; an unreadable default
    database or file is skipped with a warning. Loads that share `warned` repeat no warning.

    Raises `StoreError` if `where` is given and unreadable, and `InputError` for a `gpu` or `files` of the wrong type.
    """
    warned = set() if warned is None else warned
    if gpu is not None:
        _require_gpu(gpu)
    paths = listed(files)
    own = _database(where)
    unusable = list(own.unusable)
    places = [Place("database", own.configs)]
    losses = list(own.losses)
    for path in paths:
        with _set_aside("exported configs", warned):
            held = _file(path)
            unusable += held.unusable
            places.append(Place("file", own.checks.served(held.configs, unusable)))
            losses += held.losses
            if gpu is not None:
                _warn_of_others(path, held.configs, {gpu.name, *(chain.like if chain else ())}, warned)
    for path in _shipped(gpu, chain.like if chain else ()):
        with _set_aside("shipped configs", warned):
            exported = read_json(path, unusable)
            configs = [config for config in exported.configs if _is_of(path, config.gpu)]
            places.append(Place("shipped", own.checks.served(configs, unusable)))
            losses += exported.losses
    warn_unusable([each for each in unusable if each not in warned])
    warned.update(unusable)
    return ConfigTable(places, _environment, chain, Losses(losses))


def shipped_configs(gpu: Gpu | None = None) -> list[BestConfig]:
    """The configs shipped with the package, for the model of `gpu` or for all.

    An unreadable file is skipped with a warning. A config whose GPU does not match the file's name is left out.
    """
    configs: list[BestConfig] = []
    for path in _shipped(gpu):
        with _set_aside("shipped configs", set()):
            configs += (config for config in read_json(path).configs if _is_of(path, config.gpu))
    return configs


def listed(files: object) -> tuple[str | os.PathLike[str], ...]:
    """`files` as a tuple of paths. Raises `InputError` for anything else, such as a single path."""
    is_many = isinstance(files, Iterable) and not isinstance(files, _PATH)
    paths: list[object] = [*cast("Iterable[object]", files)] if is_many else [None]
    if not all(isinstance(path, _PATH) for path in paths):
        raise InputError(f"`files` cannot be {files!r}; expected a list of paths")
    return cast("tuple[str | os.PathLike[str], ...]", tuple(paths))


def _database(where: str | None) -> Contents:
    """The contents of the user's database; empty if it is missing."""
    try:
        path = sqlite_path(where or default_path())
        return Contents() if path is not None and not path.exists() else _contents(where or default_path())
    except (StoreError, OSError) as error:
        # An engine must not end because of a database that its user did not ask for.
        if where:
            raise
        warnings.warn(f"the user's database is set aside: {error}", stacklevel=3)
        return Contents()


def _file(path: str | os.PathLike[str]) -> Contents:
    """The contents of an export or of another database."""
    if is_database(str(path)):
        return _contents(path)
    exported = read_configs(path)
    return Contents(exported.configs, losses=exported.losses)


def _contents(where: str | os.PathLike[str]) -> Contents:
    with Store.open(where, create=False) as store:
        return store.contents()


def _warn_of_others(path: str | os.PathLike[str], configs: Iterable[BestConfig], asked: Collection[str],
                    warned: set[str]) -> None:
    """Warn once of a file with configs of other GPUs only than those asked about."""
    held = {config.gpu.name for config in configs}
    if held and held.isdisjoint(asked):
        _warn_once(f"{os.fspath(path)!r} holds configs of {', '.join(sorted(held))} only, which do not answer for "
                   f"{', '.join(sorted(asked))}", warned, stacklevel=4)


def _require_gpu(gpu: object) -> None:
    if not isinstance(gpu, Gpu):
        raise InputError(f"cannot look up the GPU {gpu!r}, of type {type(gpu).__name__}; expected a Gpu")


def _shipped(gpu: Gpu | None, like: Sequence[str] = ()) -> list[Path]:
    """The shipped files for the models of `gpu` and of the GPUs in `like`; all if `gpu` is None."""
    slugs = {gpu.slug, *(replace(gpu, name=name).slug for name in like)} if gpu is not None else None
    return [path for path in sorted(SHIPPED.glob("*.json")) if slugs is None or path.stem in slugs]


def _is_of(path: Path, gpu: Gpu) -> bool:
    """True if the name of a shipped file is that of the model of `gpu`."""
    return gpu.slug == path.stem


@contextmanager
def _set_aside(kind: str, warned: set[str]) -> Generator[None]:
    """Turn the error of an unreadable file into a warning, once for each text in `warned`."""
    try:
        yield
    except StoreError as error:
        _warn_once(f"a file of {kind} is set aside: {error}", warned, stacklevel=6)


def _warn_once(message: str, warned: set[str], stacklevel: int) -> None:
    """Warn and add the message to `warned`, unless it is in there already."""
    if message not in warned:
        warned.add(message)
        warnings.warn(message, stacklevel=stacklevel)


@functools.lru_cache(maxsize=8)
def _table(_variable: str | None, gpu: Gpu) -> ConfigTable:
    """The table for `gpu`, cached for each value of the variable with the database's path."""
    return load_table(gpu=gpu)


def _environment(template: str, gpu: Gpu) -> Environment:
    from ...kernel_templates.sources import environment

    return environment(template, gpu)
