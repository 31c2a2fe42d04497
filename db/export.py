"""Best configs as a JSON file that can be shipped, and read back exactly. `export_schema.json` describes it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO, TypeVar, cast

from ..kernel_templates.batch import BatchBucket, Shape
from ..kernel_templates.errors import StoreError, TunerError
from ..kernel_templates.gpu import Gpu
from ..kernel_templates.outcome import BestConfig, Environment, Regime, Timing, Verdict
from ..kernel_templates.spec import AttentionSpec
from ..kernel_templates.variant import Variant

T = TypeVar("T")

SCHEMA_VERSION = 1
"""The version of the format that is written and read."""

_EXPECTED = f"expected a file that `attention-tuner export` wrote, of schema version {SCHEMA_VERSION}"


def export_json(configs: Iterable[BestConfig], target: str | os.PathLike[str] | TextIO) -> None:
    """Write `configs` to `target`, a path or an open text file.

    A file is replaced as a whole or, when a `StoreError` is raised, left as it was.
    """
    groups: dict[tuple[Gpu, Environment], list[dict[str, Any]]] = {}
    for config in configs:
        groups.setdefault((config.gpu, config.environment), []).append(config_to_json(config))
    document = {
        "schema_version": SCHEMA_VERSION,
        "groups": [
            {"gpu": asdict(gpu), "environment": asdict(environment), "configs": members}
            for (gpu, environment), members in groups.items()
        ],
    }
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    if isinstance(target, (str, os.PathLike)):
        _replace(Path(target).expanduser().resolve(), text)
    else:
        target.write(text)


def import_json(path: str | os.PathLike[str]) -> list[BestConfig]:
    """The configs in the file that `export_json` wrote. Raises `StoreError` for any other file."""
    name = str(path)
    document = _load(path)
    version = document.get("schema_version")
    if version is None:
        raise StoreError(f"{name!r} is no export of tuned configs; {_EXPECTED}")
    if version != SCHEMA_VERSION:
        raise StoreError(f"{name!r} has schema version {version!r}; {_EXPECTED}")
    try:
        return [config for group in document["groups"] for config in _group_from_json(group)]
    except (KeyError, TypeError, ValueError, AttributeError, TunerError) as error:
        detail = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else error
        raise StoreError(f"{name!r} holds a config that cannot be read: {detail}; {_EXPECTED}") from error


def _load(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        document: object = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise StoreError(f"{str(path)!r} cannot be read: {error.strerror}; {_EXPECTED}") from error
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{str(path)!r} is no complete JSON file: {error}; {_EXPECTED}") from error
    return cast(dict[str, Any], document) if isinstance(document, dict) else {}


def config_to_json(config: BestConfig) -> dict[str, Any]:
    """`config` as an export holds it, without its GPU and environment."""
    variant = config.variant
    return {
        "spec": asdict(config.shape.spec),
        "bucket": asdict(config.shape.bucket),
        "batch": config.batch,
        "page_size": variant.page_size,
        "variant": {"key": variant.key(), "template": variant.template, "values": variant.as_dict()},
        "time": _timing_to_json(config.timing),
        "default_time": _timing_to_json(config.default_timing),
        "speedup": config.speedup,
        "verdict": config.verdict.value,
        "full_check": config.full_check,
        "measured_at": config.measured_at,
    }


def _timing_to_json(timing: Timing) -> dict[str, Any]:
    return {
        "median_ms": timing.median_ms,
        "samples_ms": timing.samples_ms,
        "plan_ms": timing.plan_ms,
        "regime": asdict(timing.regime),
    }


def _group_from_json(group: dict[str, Any]) -> list[BestConfig]:
    gpu = Gpu(**group["gpu"] | {"capability": tuple(_typed(part, int) for part in group["gpu"]["capability"])})
    environment = Environment(**{name: _typed(text, str) for name, text in group["environment"].items()})
    return [_config_from_json(entry, gpu, environment) for entry in group["configs"]]


def _config_from_json(entry: dict[str, Any], gpu: Gpu, environment: Environment) -> BestConfig:
    # Through the keys, which tell 32 from 32.0 and "32".
    spec = AttentionSpec.parse(AttentionSpec(**entry["spec"]).key())
    bucket = BatchBucket.parse(BatchBucket(**entry["bucket"]).key())
    variant = Variant.parse(entry["variant"]["key"])
    if variant != Variant.of(entry["variant"]["template"], entry["page_size"], entry["variant"]["values"]):
        raise ValueError(f"the values beside the key {variant.key()!r} are not those of the key")
    return BestConfig(
        shape=Shape(spec, bucket),
        gpu=gpu,
        variant=variant,
        timing=_timing_from_json(entry["time"]),
        default_timing=_timing_from_json(entry["default_time"]),
        verdict=Verdict(entry["verdict"]),
        full_check=_typed(entry["full_check"], bool),
        environment=environment,
        batch=_typed(entry["batch"], str),
        measured_at=_typed(entry["measured_at"], str),
    )


def _timing_from_json(entry: dict[str, Any]) -> Timing:
    """The timing, from its samples: the median beside them is for people."""
    return Timing(tuple(map(float, entry["samples_ms"])), Regime(**entry["regime"]), float(entry["plan_ms"]))


def _typed(value: object, kind: type[T]) -> T:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _replace(path: Path, text: str) -> None:
    """Writes the file `path` as a whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if path.exists() and not path.is_file():
            raise StoreError(f"{str(path)!r} is no regular file; expected the path of a file to write")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise StoreError(f"{str(path)!r} cannot be written: {error.strerror}; expected the path of a file in a folder "
                         "that exists and can be written") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
