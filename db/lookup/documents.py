"""Lossless conversion between records and JSON objects, which `export_schema.json` describes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, asdict, fields
from typing import Any, cast

from ...kernel_templates.batch import BatchBucket, Shape
from ...kernel_templates.errors import StoreError
from ...kernel_templates.gpu import Gpu
from ...kernel_templates.outcome import BestConfig, Environment, Regime, Timing, Verdict
from ...kernel_templates.spec import AttentionSpec
from ...kernel_templates.variant import Variant
from ..answer import Source
from ..losses import Loss
from .fields import Field

Document = dict[str, Any]
"""An object that `json.dumps` can write."""

# Accepted times in milliseconds: a picosecond to eleven days. The ratio of two such times is a finite number.
_TIMES_MS = (1e-9, 1e9)

_BUCKET = tuple(field.name for field in fields(BatchBucket))

CONFIG = ("spec", "bucket", "batch", "page_size", "variant", "time", "default_time", "speedup", "verdict",
           "full_check", "measured_at")  # fmt: skip
"""The members of a config in an export."""

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


def config_to_json(config: BestConfig) -> Document:
    """`config` as JSON, without GPU and environment, which an export states once for many configs."""
    variant = config.variant
    return {
        "spec": asdict(config.shape.spec),
        "bucket": asdict(config.shape.bucket),
        "batch": config.batch,
        "page_size": variant.page_size,
        "variant": {"key": variant.key(), "template": variant.template, "values": variant.as_dict()},
        "time": timing_to_json(config.timing),
        "default_time": timing_to_json(config.default_timing),
        "speedup": config.speedup,
        "verdict": config.verdict.value,
        "full_check": config.full_check,
        "measured_at": config.measured_at,
    }


def timing_to_json(timing: Timing) -> Document:
    """`timing` as JSON, with its median in milliseconds."""
    return {
        "median_ms": timing.median_ms,
        "samples_ms": timing.samples_ms,
        "plan_ms": timing.plan_ms,
        "regime": asdict(timing.regime),
    }


def config_from_json(entry: Field, gpu: Gpu, environment: Environment) -> BestConfig:
    """The config that `config_to_json` wrote. Raises `StoreError`, as all readers here do."""
    parts = entry.members(CONFIG)
    bucket = {name: size.whole() for name, size in parts["bucket"].members(_BUCKET).items()}
    verdicts = {verdict.value: verdict for verdict in Verdict}
    # The speedup is written for people and follows from the times, so only its type is checked.
    parts["speedup"].number()
    config: Document = {
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


def environment_from_json(entry: Field) -> Environment:
    """The environment that `asdict` wrote."""
    texts = entry.members(field.name for field in fields(Environment))
    return Environment(**{name: text.text() for name, text in texts.items()})


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


def loss_from_json(entry: Field) -> Loss:
    """The loss that `asdict` wrote."""
    parts = entry.members(field.name for field in fields(Loss))
    name, source = parts["gpu_name"].text(), parts["source"].text()
    upto, shapes, loss = parts["upto"].number(), parts["shapes"].whole(), parts["loss"].number(least=-1)
    # The record raises for a text that is no source.
    return entry.made(lambda: Loss(name, cast(Source, source), upto, shapes, loss))


def spec_from_json(entry: Field) -> AttentionSpec:
    """The layer that `asdict` wrote."""
    required = [field.name for field in fields(AttentionSpec) if field.default is MISSING]
    parts = entry.members(required, _SPEC)
    values: Document = {name: _SPEC[name](part) for name, part in parts.items()}
    return entry.made(lambda: AttentionSpec(**values))


def _variant_from_json(entry: Field, page_size: int) -> Variant:
    parts = entry.members(("key", "template", "values"))
    template, key = parts["template"].text(), parts["key"].text()
    values = {name: value.text() if isinstance(value.value, str) else value.whole()
              for name, value in parts["values"].mapping().items()}
    variant = entry.made(lambda: Variant.of(template, page_size, values))
    if parts["key"].made(lambda: Variant.parse(key)) != variant:
        raise StoreError(f"{entry.place!r} cannot be used: its values or page size differ from its key {key!r}")
    return variant


def _timing_from_json(entry: Field) -> Timing:
    """The timing from its samples. The median is written for people, so only its type is checked."""
    parts = entry.members(("median_ms", "samples_ms", "plan_ms", "regime"))
    parts["median_ms"].number()
    samples = tuple(parts["samples_ms"].numbers(*_TIMES_MS))
    plan = parts["plan_ms"].number(most=_TIMES_MS[1])
    names = {name: text.text() for name, text in parts["regime"].members(("capture", "l2", "load")).items()}
    regime = parts["regime"].made(lambda: Regime(**names))
    return parts["samples_ms"].made(lambda: Timing(samples, regime, plan))
