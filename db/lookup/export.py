"""Exports of best configs: one JSON file (described by `export_schema.json`) or a folder of JSON files."""

from __future__ import annotations

import itertools
import json
import os
import reprlib
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO, cast

from ...kernel_templates.errors import InputError, StoreError
from ...kernel_templates.gpu import Gpu
from ...kernel_templates.outcome import BestConfig, Environment
from ..losses import Loss
from .documents import (
    config_from_json,
    config_to_json,
    environment_from_json,
    gpu_from_json,
    loss_from_json,
)
from .fields import Field, read_document, replace_file
from .folder import read_folder, write_folder

SCHEMA_VERSION = 1
"""The version of the JSON format."""

FORMATS = ("json", "folder")
"""The formats of an export: one JSON file, or a folder of JSON files in vLLM's style."""

_EXPECTED = f"expected a file that `attention-tuner export` wrote, of schema version {SCHEMA_VERSION}"


@dataclass(frozen=True, slots=True)
class Exported:
    """The content of an export."""

    configs: list[BestConfig]
    # Measured losses of lookups on the GPUs of the configs; a folder has none.
    losses: list[Loss] = field(default_factory=list[Loss])


def write_configs(exported: Exported, path: str | os.PathLike[str], form: str = "json") -> None:
    """Write `exported` to `path` in the format `form`, one of `FORMATS`.

    Raises `InputError` for another format, and `StoreError` if the path cannot be written.
    """
    require_format(form)
    if form == "json":
        export_json(exported.configs, path, exported.losses)
    else:
        write_folder(exported.configs, path)


def require_format(form: str) -> None:
    """Raise `InputError` unless `form` is one of `FORMATS`."""
    if form not in FORMATS:
        raise InputError(f"unknown format {form!r}; accepted are {', '.join(FORMATS)}")


def read_configs(path: str | os.PathLike[str]) -> Exported:
    """The content of an export in either format. Raises `StoreError`."""
    return Exported(read_folder(path)) if Path(path).expanduser().is_dir() else read_json(path)


def export_json(configs: Iterable[BestConfig], target: str | os.PathLike[str] | TextIO,
                losses: Iterable[Loss] = ()) -> None:
    """Write `configs` and the `losses` of their GPUs to `target`, a path or an open text file.

    The text does not depend on the order of the configs. Each config is one line, so that a diff of two exports shows
    the configs that differ. If the file cannot be written, it stays unchanged and `StoreError` is raised.
    """
    groups: dict[tuple[Gpu, Environment], list[str]] = {}
    for config in sorted(configs, key=_order):
        groups.setdefault((config.gpu, config.environment), []).append(_line(config_to_json(config)))
    names = {gpu.name for gpu, _ in groups}
    lost = [_line(asdict(loss)) for loss in sorted(losses, key=astuple) if loss.gpu_name in names]
    tail = ',\n "losses": [\n' + ",\n".join(f"  {line}" for line in lost) + "\n ]" if lost else ""
    members = [
        f' {{"gpu": {_line(asdict(gpu))},\n  "environment": {_line(asdict(environment))},\n  "configs": [\n'
        + ",\n".join(f"   {line}" for line in lines) + "\n  ]}"
        for (gpu, environment), lines in groups.items()
    ]
    text = f'{{"schema_version": {SCHEMA_VERSION},\n "groups": [\n' + ",\n".join(members) + f"\n ]{tail}}}\n"
    if isinstance(target, (str, os.PathLike)):
        replace_file(target, text)
    else:
        target.write(text)


def _order(config: BestConfig) -> tuple[object, ...]:
    """A sort key: GPU, environment, question, then all other parts, so that the order is unique."""
    return (astuple(config.gpu), astuple(config.environment), config.shape.spec.key(), config.variant.page_size,
            config.batch, str(config.timing.regime), config.variant.key(), config.measured_at, repr(config))


def _line(document: dict[str, Any]) -> str:
    return json.dumps(document, allow_nan=False)


def import_json(path: str | os.PathLike[str]) -> list[BestConfig]:
    """The configs in a file that `export_json` wrote. Raises as `read_json` does."""
    return read_json(path).configs


def read_json(path: str | os.PathLike[str], unusable: list[str] | None = None) -> Exported:
    """The content of a file that `export_json` wrote.

    Raises `StoreError` for any other file; the message names the first unusable value and its place. If a list
    `unusable` is given, unusable configs are added to it with the reason instead.
    """
    with _parts(path) as (entries, losses):
        configs: list[BestConfig] = []
        for entry in entries:
            try:
                configs.append(config_from_json(*entry))
            except StoreError as error:
                if unusable is None:
                    raise
                unusable.append(f"{entry.config.place!r} in {str(path)!r} cannot be read: {error}")
        return Exported(configs, losses)


class _Entry(NamedTuple):
    """A config of an export, not yet parsed, with the GPU and environment of its group."""

    config: Field
    gpu: Gpu
    environment: Environment


@contextmanager
def _parts(path: str | os.PathLike[str]) -> Generator[tuple[Iterable[_Entry], list[Loss]]]:
    """The configs and losses of an export. A `StoreError` within the context gets the file's name."""
    name = str(path)
    document = read_document(path, _EXPECTED)
    value = document.value
    version = cast(dict[str, object], value).get("schema_version") if isinstance(value, dict) else None
    if version is None:
        raise StoreError(f"{name!r} is no export of tuned configs; {_EXPECTED}")
    if type(version) is not int or version != SCHEMA_VERSION:
        raise StoreError(f"{name!r} has schema version {reprlib.repr(version)}; {_EXPECTED}")
    try:
        members = document.members(("schema_version", "groups"), ("losses",))
        losses = [loss_from_json(entry) for entry in members["losses"].items()] if "losses" in members else []
        yield itertools.chain.from_iterable(map(_group_from_json, members["groups"].items())), losses
    except StoreError as error:
        raise StoreError(f"{name!r} cannot be imported: {error}") from error


def _group_from_json(group: Field) -> list[_Entry]:
    members = group.members(("gpu", "environment", "configs"))
    gpu = gpu_from_json(members["gpu"])
    environment = environment_from_json(members["environment"])
    return [_Entry(config, gpu, environment) for config in members["configs"].items()]
