"""Best configs as a JSON file that can be shipped, and read back exactly. `export_schema.json` describes it."""

from __future__ import annotations

import itertools
import json
import os
import reprlib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, asdict, astuple, dataclass, field, fields
from typing import Any, NamedTuple, TextIO, cast

from ...kernel_templates.batch import BatchBucket, Shape
from ...kernel_templates.errors import StoreError
from ...kernel_templates.gpu import Gpu
from ...kernel_templates.outcome import BestConfig, Environment, Regime, Timing, Verdict
from ...kernel_templates.spec import AttentionSpec
from ...kernel_templates.variant import Variant
from ..answer import Origin, Source
from ..losses import Loss
from ..rows import Row, Rows, Slot, row_of
from .fields import Field
from .text_files import read_text, replace_file

SCHEMA_VERSION = 1
"""The version of the format that is written and read."""

_EXPECTED = f"expected a file that `attention-tuner export` wrote, of schema version {SCHEMA_VERSION}"

# From a picosecond to some eleven days: a ratio of two such times is a number as well.
_TIMES_MS = (1e-9, 1e9)

_BUCKET = tuple(field.name for field in fields(BatchBucket))

_CONFIG = ("spec", "bucket", "batch", "page_size", "variant", "time", "default_time", "speedup", "verdict",
           "full_check", "measured_at")  # fmt: skip

_SPEC: dict[str, Callable[[Field], object]] = {
    "num_q_heads": lambda field: field.whole(least=1),
    "num_kv_heads": lambda field: field.whole(least=1),
    "head_dim": lambda field: field.whole(least=1),
    "dtype": Field.text,
    "kv_dtype": Field.text,
    "sliding_window": lambda field: field.optional(Field.whole),
    "logits_soft_cap": lambda field: field.optional(Field.number),
    "has_sinks": Field.flag,
    "has_alibi": Field.flag,
    "scale": lambda field: field.optional(Field.number),
    "v_head_dim": lambda field: field.optional(Field.whole),
    "has_tree_mask": Field.flag,
    "q_dtype": Field.text,
}


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export holds: configs, and what lookups on their GPUs were seen to lose."""

    configs: list[BestConfig]
    losses: list[Loss] = field(default_factory=list[Loss])


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
                parts = entry.config.members(_CONFIG)
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
    document = _load(path)
    version = document.get("schema_version")
    if version is None:
        raise StoreError(f"{name!r} is no export of tuned configs; {_EXPECTED}")
    if type(version) is not int or version != SCHEMA_VERSION:
        raise StoreError(f"{name!r} has schema version {reprlib.repr(version)}; {_EXPECTED}")
    try:
        members = Field(document, "").members(("schema_version", "groups"), ("losses",))
        losses = [_loss_from_json(entry) for entry in members["losses"].items()] if "losses" in members else []
        yield itertools.chain.from_iterable(map(_group_from_json, members["groups"].items())), losses
    except StoreError as error:
        raise StoreError(f"{name!r} cannot be imported: {error}") from error


def _load(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        document: object = json.loads(read_text(path, _EXPECTED))
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


def _group_from_json(group: Field) -> list[Entry]:
    members = group.members(("gpu", "environment", "configs"))
    gpu = gpu_from_json(members["gpu"])
    environment = environment_from_json(members["environment"])
    return [Entry(config, gpu, environment) for config in members["configs"].items()]


def environment_from_json(entry: Field) -> Environment:
    """The environment that `asdict` wrote; like the others here, raises `StoreError`."""
    texts = entry.members(field.name for field in fields(Environment))
    return Environment(**{name: text.text() for name, text in texts.items()})


def _loss_from_json(entry: Field) -> Loss:
    parts = entry.members(field.name for field in fields(Loss))
    name, source = parts["gpu_name"].text(), parts["source"].text()
    upto, shapes, loss = parts["upto"].number(), parts["shapes"].whole(), parts["loss"].number(least=-1)
    # The record refuses a source that is none.
    return entry.made(lambda: Loss(name, cast(Source, source), upto, shapes, loss))


def gpu_from_json(entry: Field) -> Gpu:
    """The GPU that `asdict` wrote."""
    parts = entry.members(field.name for field in fields(Gpu))
    capability = parts["capability"].items()
    if len(capability) != 2:
        parts["capability"].refuse("a list of two numbers, such as [9, 0]")
    major, minor = (part.whole() for part in capability)
    sizes = {name: parts[name].whole() for name in ("num_sms", "shared_memory_bytes", "l2_bytes")}
    name, driver = parts["name"].text(), parts["driver"].text()
    return entry.made(lambda: Gpu(name, (major, minor), **sizes, driver=driver))


def config_from_json(entry: Field, gpu: Gpu, environment: Environment) -> BestConfig:
    """The config that `config_to_json` wrote."""
    parts = entry.members(_CONFIG)
    bucket = {name: size.whole() for name, size in parts["bucket"].members(_BUCKET).items()}
    verdicts = {verdict.value: verdict for verdict in Verdict}
    # What is derived from the rest is for people, but it is a number.
    parts["speedup"].number()
    config: dict[str, Any] = {
        "gpu": gpu,
        "environment": environment,
        "shape": Shape(spec_from_json(parts["spec"]), BatchBucket(**bucket)),
        "variant": _variant_from_json(parts["variant"], parts["page_size"].whole(least=1)),
        "timing": _timing_from_json(parts["time"]),
        "default_timing": _timing_from_json(parts["default_time"]),
        "verdict": verdicts.get(parts["verdict"].text()) or parts["verdict"].refuse(f"one of {', '.join(verdicts)}"),
        "full_check": parts["full_check"].flag(),
        "batch": parts["batch"].text(),
        "measured_at": parts["measured_at"].moment(),
    }
    return parts["batch"].made(lambda: BestConfig(**config))


def spec_from_json(entry: Field) -> AttentionSpec:
    """The layer that `asdict` wrote."""
    required = [field.name for field in fields(AttentionSpec) if field.default is MISSING]
    parts = entry.members(required, _SPEC)
    values: dict[str, Any] = {name: _SPEC[name](part) for name, part in parts.items()}
    return entry.made(lambda: AttentionSpec(**values))


def _variant_from_json(entry: Field, page_size: int) -> Variant:
    parts = entry.members(("key", "template", "values"))
    template, key = parts["template"].text(), parts["key"].text()
    values = {name: value.text() if isinstance(value.value, str) else value.whole()
              for name, value in parts["values"].mapping().items()}
    variant = entry.made(lambda: Variant.of(template, page_size, values))
    if parts["key"].made(lambda: Variant.parse(key)) != variant:
        raise StoreError(f"{entry.place!r} cannot be used: the values and page size beside the key {key!r} are not "
                         "those of the key")
    return variant


def _timing_from_json(entry: Field) -> Timing:
    """The timing, from its samples: the median beside them is for people."""
    parts = entry.members(("median_ms", "samples_ms", "plan_ms", "regime"))
    parts["median_ms"].number()
    samples = tuple(parts["samples_ms"].numbers(*_TIMES_MS))
    plan = parts["plan_ms"].number(most=_TIMES_MS[1])
    names = {name: text.text() for name, text in parts["regime"].members(("capture", "l2", "load")).items()}
    regime = parts["regime"].made(lambda: Regime(**names))
    return parts["samples_ms"].made(lambda: Timing(samples, regime, plan))
