"""Export of best configs as a folder in vLLM's style: one file for each GPU, layer and page size.

A file name states the layer, page size and GPU:

    head_size=128,num_q_heads=32,num_kv_heads=8,page_size=16,device_name=NVIDIA_H200,dtype=bfloat16,kv_dtype=auto.json

A file holds nested objects whose keys are whole numbers, one level for each size of `BatchBucket` in the order of its
fields. The innermost object is the best config of the bucket: template, values and times. Its member `others` holds the
other configs of the bucket. Members of the outermost object whose names are no numbers apply to all configs of the
file.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ...kernel_templates.batch import BatchBucket
from ...kernel_templates.errors import StoreError
from ...kernel_templates.gpu import Gpu
from ...kernel_templates.outcome import BestConfig, Environment
from ...kernel_templates.spec import AttentionSpec
from .documents import config_from_json, config_to_json, environment_from_json, gpu_from_json, spec_from_json
from .fields import Field, read_document, replace_file
from .merge import merit

FOLDER_VERSION = 1

_EXPECTED = f"expected a file that `attention-tuner export --format folder` wrote, of version {FOLDER_VERSION}"
_LEVELS = [field.name for field in fields(BatchBucket)]
# Members of a config that the file states elsewhere: in its head or its levels.
_ELSEWHERE = ("spec", "bucket", "page_size")

Question = tuple[str, AttentionSpec, int]


def file_name(spec: AttentionSpec, page_size: int, gpu: Gpu) -> str:
    """The file name of a layer, page size and GPU. Features that the layer lacks are left out."""
    parts: dict[str, object] = {
        "head_size": spec.head_dim, "num_q_heads": spec.num_q_heads, "num_kv_heads": spec.num_kv_heads,
        "page_size": page_size, "device_name": gpu.slug, "dtype": spec.dtype, "kv_dtype": spec.kv_dtype,
    }  # fmt: skip
    for field in fields(spec):
        value = getattr(spec, field.name)
        if field.name not in (*parts, "head_dim") and value != field.default:
            parts[field.name] = value
    return ",".join(f"{name}={value}" for name, value in parts.items()) + ".json"


def write_folder(configs: Iterable[BestConfig], path: str | os.PathLike[str]) -> list[Path]:
    """Write `configs` into the folder `path`, created if missing, and return the files written.

    Other files there stay. The texts do not depend on the order of the configs. Raises `StoreError` if a file cannot be
    written.
    """
    folder = Path(path).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"the folder {str(path)!r} cannot be made: {error.strerror}") from error
    files: dict[str, list[BestConfig]] = defaultdict(list)
    for config in configs:
        files[file_name(config.shape.spec, config.variant.page_size, config.gpu)].append(config)
    for name, members in files.items():
        replace_file(folder / name, json.dumps(_document(members), indent=1, allow_nan=False) + "\n")
    return [folder / name for name in sorted(files)]


def _document(configs: list[BestConfig]) -> dict[str, Any]:
    """The document of `configs`, all of one layer, page size and GPU model."""
    places = sorted({(repr(c.gpu), repr(c.environment)): (c.gpu, c.environment) for c in configs}.items())
    measured = [place for _, place in places]
    document: dict[str, Any] = {
        "version": FOLDER_VERSION,
        "spec": asdict(configs[0].shape.spec),
        "page_size": configs[0].variant.page_size,
        "levels": _LEVELS,
        "measured_with": [{"gpu": asdict(gpu), "environment": asdict(environment)} for gpu, environment in measured],
    }
    buckets: dict[tuple[int, ...], list[dict[str, Any]]] = defaultdict(list)
    for config in sorted(configs, key=lambda config: (*merit(config), repr(config))):
        entry = {name: value for name, value in config_to_json(config).items() if name not in _ELSEWHERE}
        entry["measured_with"] = measured.index((config.gpu, config.environment))
        buckets[config.shape.bucket.sizes].append(entry)
    for sizes, (first, *others) in sorted(buckets.items()):
        level = document
        for size in sizes[:-1]:
            level = level.setdefault(str(size), {})
        level[str(sizes[-1])] = {**first, "others": others} if others else first
    return document


def read_folder(path: str | os.PathLike[str]) -> list[BestConfig]:
    """The configs in the files of the folder `path`.

    Raises `StoreError` for an empty folder, for a file that `write_folder` did not write (the message names the first
    unusable value), and for a file whose name does not match its content.
    """
    folder = Path(path).expanduser()
    files = sorted(folder.glob("*.json"))
    if not files:
        raise StoreError(f"the folder {str(path)!r} holds no file of tuned configs; {_EXPECTED}")
    return [config for file in files for config in _read_file(file)]


def _read_file(path: Path) -> list[BestConfig]:
    document = read_document(path, _EXPECTED)
    try:
        configs = list(_configs(document))
    except StoreError as error:
        raise StoreError(f"{str(path)!r} cannot be imported: {error}; {_EXPECTED}") from error
    for config in configs:
        name = file_name(config.shape.spec, config.variant.page_size, config.gpu)
        if name != path.name:
            raise StoreError(f"{str(path)!r} holds a config that belongs into {name!r}; expected one GPU, layer and "
                             "page size in a file")
    return configs


def _configs(document: Field) -> Iterator[BestConfig]:
    parts = document.mapping()
    if "version" not in parts or parts["version"].value != FOLDER_VERSION:
        raise StoreError(f"its version is missing or not {FOLDER_VERSION}")
    numbers = {name: part for name, part in parts.items() if name.isdecimal()}
    document.members(("version", "spec", "page_size", "levels", "measured_with"), numbers)
    if parts["levels"].value != _LEVELS:
        parts["levels"].refuse(f"the sizes of a bucket: {', '.join(_LEVELS)}")
    spec, page_size = spec_from_json(parts["spec"]), parts["page_size"].whole(least=1)
    places = [_place(place) for place in parts["measured_with"].items()]
    for sizes, leaf in _leaves(numbers, ()):
        entry = leaf.mapping()
        others = entry.pop("others").items() if "others" in entry else []
        for each in (entry, *(other.mapping() for other in others)):
            known = each.pop("measured_with", Field(None, leaf.within("measured_with"))).whole()
            if known >= len(places):
                raise StoreError(f"{leaf.place!r} names entry {known} of 'measured_with', which has {len(places)}")
            whole = {name: field.value for name, field in each.items()} | {
                "spec": asdict(spec), "bucket": dict(zip(_LEVELS, sizes, strict=True)), "page_size": page_size}
            yield config_from_json(Field(whole, leaf.place), *places[known])


def _place(entry: Field) -> tuple[Gpu, Environment]:
    parts = entry.members(("gpu", "environment"))
    return gpu_from_json(parts["gpu"]), environment_from_json(parts["environment"])


def _leaves(level: dict[str, Field], sizes: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Field]]:
    """The innermost objects, each with the whole numbers that lead to it."""
    for key, entry in level.items():
        if not re.fullmatch("[0-9]{1,19}", key):
            raise StoreError(f"{entry.place!r} is no whole number; expected one as the key of a level")
        found = (*sizes, int(key))
        if len(found) == len(_LEVELS):
            yield found, entry
        else:
            yield from _leaves(entry.mapping(), found)
