"""The question an engine asks, answered from the user's database and the configs that ship."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from ...kernel_templates.batch import Batch, BatchBucket
from ...kernel_templates.errors import InputError, StoreError
from ...kernel_templates.gpu import Gpu
from ...kernel_templates.outcome import BestConfig, Environment
from ...kernel_templates.spec import AttentionSpec
from ..answer import Answer, Chain
from ..checks import StoredChecks
from ..engine import PATH_VARIABLE, default_path, is_database, sqlite_path
from ..losses import Loss, Losses
from ..rows import Rows, made
from ..store import Store
from .export import Exported, json_rows, read_configs, read_json
from .table import ConfigTable

SHIPPED = Path(__file__).parents[1] / "configs"
"""The folder of the exports that ship: one file for each GPU model, called by its `Gpu.slug`."""

_PATH = (str, os.PathLike)


class _Stored(NamedTuple):
    """The best configs of a database, its full checks and the losses that were measured there."""

    rows: Rows[Any] | None
    checks: StoredChecks
    losses: list[Loss]


def lookup(spec: AttentionSpec, asked: Batch | BatchBucket, page_size: int, gpu: Gpu) -> Answer:
    """The variant to run for a batch, or a bucket of batches, of layer `spec` on `gpu`, and where it comes from.

    The database is `default_path()`; it and what ships for `gpu` are read on the first call that asks about `gpu`, and
    `ConfigTable.lookup` says which of their configs comes first. A missing database is not made, and is no error; a
    database or shipped file that cannot be read is set aside with a warning.
    """
    return default_table(gpu).lookup(spec, asked, page_size, gpu)


def default_table(gpu: Gpu) -> ConfigTable:
    """The table that `lookup` asks about `gpu`, for its id and coverage, or to be asked directly."""
    _require_gpu(gpu)
    return _table(os.environ.get(PATH_VARIABLE), gpu)


def load_table(where: str | None = None, gpu: Gpu | None = None, *, files: Sequence[str | os.PathLike[str]] = (),
               chain: Chain | None = None, named: set[str] | None = None) -> ConfigTable:
    """A fresh snapshot of the database `where` (default: `default_path()`), then of `files`, in their order, then of
    what ships for `gpu` and those that the chain lets lend, or for any: of configs that are alike the earlier answers.

    `files` are exports in any format that `read_configs` reads, or other databases. Where the database is missing, that
    is no error. Raises `StoreError` when `where` is given, is there and cannot be read; the default database is then
    set aside with a warning, as is a file, once for all loads with the same `named`. Raises `InputError` for a `gpu` or
    `files` of another type.
    """
    named = set() if named is None else named
    if gpu is not None:
        _require_gpu(gpu)
    paths = listed(files)
    own, checks, losses = _checked(where)
    places = [own] if own is not None else []
    for path in paths:
        with _set_aside("exported configs", named):
            rows, exported = _rows_of(path, checks.judge)
            places.append(rows)
            if gpu is not None:
                _warn_of_others(path, rows, {gpu.name, *(chain.like if chain else ())}, named)
            losses = [*losses, *exported.losses]
    for path in _shipped(gpu, chain.like if chain else ()):
        with _set_aside("shipped configs", named):
            rows, lost = json_rows(path, "shipped", _is_of(path), checks.judge)
            places.append(rows)
            losses = [*losses, *lost]
    return ConfigTable(places, _environment, chain, Losses(losses))


def shipped_configs(gpu: Gpu | None = None) -> list[BestConfig]:
    """The configs that ship with the package, for the model of `gpu` or for all.

    A file that cannot be read is set aside with a warning; what it holds about another GPU than its name says is never
    served.
    """
    configs: list[BestConfig] = []
    for path in _shipped(gpu):
        with _set_aside("shipped configs", set()):
            configs += (config for config in read_json(path).configs if _is_of(path)(config.gpu))
    return configs


def listed(files: object) -> tuple[str | os.PathLike[str], ...]:
    """`files` as paths. Raises `InputError` for what is no list of them, such as one path alone."""
    is_many = isinstance(files, Iterable) and not isinstance(files, _PATH)
    paths: list[object] = [*cast("Iterable[object]", files)] if is_many else [None]
    if not all(isinstance(path, _PATH) for path in paths):
        raise InputError(f"`files` cannot be {files!r}; expected a list of paths")
    return cast("tuple[str | os.PathLike[str], ...]", tuple(paths))


def _warn_of_others(path: str | os.PathLike[str], rows: Rows[Any], asked: Collection[str], named: set[str]) -> None:
    """Warn of a file that was named although it holds nothing of the GPUs asked about, unless that is in `named`."""
    held = {slot.gpu_name for slot in rows.slots}
    message = (f"{os.fspath(path)!r} holds configs of {', '.join(sorted(held))} only, which do not answer for "
               f"{', '.join(sorted(asked))}")
    if held and held.isdisjoint(asked):
        _warn_once(message, named, stacklevel=4)


def _require_gpu(gpu: object) -> None:
    if not isinstance(gpu, Gpu):
        raise InputError(f"cannot look up the GPU {gpu!r}, of type {type(gpu).__name__}; expected a Gpu")


def _shipped(gpu: Gpu | None, like: Sequence[str] = ()) -> list[Path]:
    """The files that ship for the model of `gpu` and those called as in `like`, or for all."""
    slugs = {gpu.slug, *(replace(gpu, name=name).slug for name in like)} if gpu is not None else None
    return [path for path in sorted(SHIPPED.glob("*.json")) if slugs is None or path.stem in slugs]


def _is_of(path: Path) -> Callable[[Gpu], bool]:
    """Whether a GPU is of the model that a shipped file is called by."""
    return lambda gpu: gpu.slug == path.stem


def _rows_of(path: str | os.PathLike[str],
             judge: Callable[[BestConfig], BestConfig | None]) -> tuple[Rows[Any], Exported]:
    """The rows of an export or of a database, for a `ConfigTable`, and the rest of it."""
    if is_database(str(path)):
        with Store.open(path, create=False) as store:
            snapshot = store.snapshot()
        own = StoredChecks(snapshot.checks, snapshot.name)
        rows = snapshot.rows(lambda config: (passed := own.judge(config)) and judge(passed), "file")
        return rows, Exported([], snapshot.losses())
    exported = read_configs(path)
    return made(exported.configs, "file", judge), exported


@contextmanager
def _set_aside(what: str, named: set[str]) -> Generator[None]:
    """Turns a file that cannot be read into a warning, unless that is in `named`, to which it is added."""
    try:
        yield
    except StoreError as error:
        _warn_once(f"a file of {what} is set aside: {error}", named, stacklevel=6)


def _warn_once(message: str, named: set[str], stacklevel: int) -> None:
    """Warn, unless the message is in `named`, to which it is added."""
    if message not in named:
        named.add(message)
        warnings.warn(message, stacklevel=stacklevel)


def _checked(where: str | None) -> _Stored:
    """What the database holds, nothing where there is none."""
    try:
        return _read(where or default_path())
    except (StoreError, OSError) as error:
        # An engine must not end because of a file that its user has perhaps never heard of.
        if where:
            raise
        warnings.warn(f"the user's database is set aside: {error}", stacklevel=3)
        return _Stored(None, StoredChecks(), [])


def _read(where: str) -> _Stored:
    path = sqlite_path(where)
    if path is not None and not path.exists():
        return _Stored(None, StoredChecks(), [])
    with Store.open(where, create=False) as store:
        snapshot = store.snapshot()
    checks = StoredChecks(snapshot.checks, snapshot.name)
    return _Stored(snapshot.rows(checks.judge), checks, snapshot.losses())


@functools.lru_cache(maxsize=8)
def _table(_variable: str | None, gpu: Gpu) -> ConfigTable:
    """The table for `gpu`, kept for as long as the variable that names the database has this value."""
    return load_table(gpu=gpu)


def _environment(template: str, gpu: Gpu) -> Environment:
    from ...kernel_templates.sources import environment

    return environment(template, gpu)
