"""Exports: best configs as one JSON file, which `export_schema.json` describes, or as a folder of JSON files."""

from __future__ import annotations

import itertools
import json
import os
import reprlib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO, cast

from ...kernel_templates.errors import InputError, StoreError
from ...kernel_templates.gpu import Gpu
from ...kernel_templates.outcome import BestConfig, Environment
from ..answer import Origin
from ..losses import Loss
from ..rows import Row, Rows, Slot, row_of
from .documents import (
    CONFIG,
    config_from_json,
    config_to_json,
    environment_from_json,
    gpu_from_json,
    loss_from_json,
    spec_from_json,
)
from .fields import Field, read_document, replace_file
from .folder import read_folder, write_folder

SCHEMA_VERSION = 1
"""The version of the format that is written and read."""

FORMATS = ("json", "folder")
"""The formats of an export: one JSON file, or a folder of JSON files as vLLM has them."""

_EXPECTED = f"expected a file that `attention-tuner export` wrote, of schema version {SCHEMA_VERSION}"


@dataclass(frozen=True, slots=True)
class Exported:
    """The content of an export."""

    configs: list[BestConfig]
    # Measured losses of lookups on the GPUs of the configs; a folder keeps none.
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
    """Write `configs` to `target`, a path or an open text file: the same text for the same configs in any order.

    `losses` of their GPUs go with them. Every config is a line, so that comparing two exports shows the configs that
    differ. A file is replaced as a whole or, when a `StoreError` is raised, left as it was.
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
    """Sorts by GPU, environment and question; the last parts only make the order the same for any input."""
    return (astuple(config.gpu), astuple(config.environment), config.shape.spec.key(), config.variant.page_size,
            config.batch, str(config.timing.regime), config.variant.key(), config.measured_at, repr(config))


def _line(document: dict[str, Any]) -> str:
    return json.dumps(document, allow_nan=False)


def import_json(path: str | os.PathLike[str]) -> list[BestConfig]:
    """The configs in the file that `export_json` wrote. Raises as `read_json` does."""
    return read_json(path).configs


def read_json(path: str | os.PathLike[str]) -> Exported:
    """What the file that `export_json` wrote holds.

    Raises `StoreError` for any other file, naming the first value that cannot be used and where it stands.
    """
    with _parts(path) as (entries, losses):
        return Exported([config_from_json(*entry) for entry in entries], losses)


def json_rows(path: str | os.PathLike[str], origin: Origin, is_of: Callable[[Gpu], bool],
              judge: Callable[[BestConfig], BestConfig | None]) -> tuple[Rows[Entry], list[Loss]]:
    """The rows of such GPUs in the file that `export_json` wrote, and the losses there; `judge` says what is served.

    Of a config no more than its slot is read before it is asked for. Raises as `read_json` does, but for what is wrong
    within a config.
    """
    slots: dict[Slot, list[Entry]] = defaultdict(list)
    with _parts(path) as (entries, losses):
        for entry in entries:
            if is_of(entry.gpu):
                parts = entry.config.members(CONFIG)
                slot = Slot.of(spec_from_json(parts["spec"]), parts["page_size"].whole(least=1), entry.gpu)
                slots[slot].append(entry)

    def row(entry: Entry) -> Row:
        return row_of(config_from_json(*entry), judge)

    def content() -> Iterator[str]:
        # Where a config stands says nothing about what is in it.
        return (repr((entry.config.value, *entry[1:])) for entry in itertools.chain(*slots.values()))

    return Rows(origin, dict(slots), lambda entry: f"{entry.config.place!r} in {str(path)!r}", row, content), losses


class Entry(NamedTuple):
    """A config in an export, not read yet, with what its group says of it."""

    config: Field
    gpu: Gpu
    environment: Environment


@contextmanager
def _parts(path: str | os.PathLike[str]) -> Generator[tuple[Iterable[Entry], list[Loss]]]:
    """The configs and losses of an export; what cannot be used of them is said to be in this file."""
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


def _group_from_json(group: Field) -> list[Entry]:
    members = group.members(("gpu", "environment", "configs"))
    gpu = gpu_from_json(members["gpu"])
    environment = environment_from_json(members["environment"])
    return [Entry(config, gpu, environment) for config in members["configs"].items()]
