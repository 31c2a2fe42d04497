"""Reading of fields from a Hugging Face `config.json` or a preset, under the most common names."""

from __future__ import annotations

import math
from pathlib import Path
from typing import cast

from ..kernel_templates.errors import ModelError, SpecError
from .files import JsonObject, find, read_object, shipped

# Parts of a config that describe the language model or its attention.
_NESTED = ("text_config", "llm_config", "language_config", "attn_config")

# All names of a field; the first name with a value counts.
_ALIASES = {
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "kv_n_heads"),
    "hidden_size": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "head_dim": ("head_dim", "kv_channels"),
    "sliding_window": ("sliding_window", "sliding_window_size"),
    "sliding_window_pattern": ("sliding_window_pattern", "_sliding_window_pattern"),
}

# Defaults of the classes in transformers, for fields that a config omits (Gemma 3's smaller models omit the heads).
_DEFAULTS: dict[str, JsonObject] = {
    "bloom": {"alibi": True},
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "exaone4": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "gemma2": {"head_dim": 256, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
               "sliding_window": 4096, "sliding_window_pattern": 2},
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256,
                    "num_hidden_layers": 26, "sliding_window": 4096, "sliding_window_pattern": 6},
    "gemma4_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512,
                    "num_hidden_layers": 30, "sliding_window": 512, "sliding_window_pattern": 6,
                    "attention_k_eq_v": False, "attention_multiplier": 1.0},
    "gpt_oss": {"head_dim": 64, "has_sinks": True, "sliding_window": 128, "sliding_window_pattern": 2},
    "mpt": {"alibi": True},
}


# Dtype of a KV cache by the name of its quantization.
_QUANTIZED_DTYPES = {"FP8": "float8_e4m3fn"}


def preset_names() -> tuple[str, ...]:
    """Names of the shipped models, sorted."""
    return tuple(shipped("presets"))


def load_config(name_or_path: str) -> JsonObject:
    """Read the config of a preset, a `config.json` or a folder with one.

    Fields of nested parts that describe the attention replace those of the config. Missing fields come from the
    architecture's defaults and from an `hf_quant_config.json` in the same folder. Raises `ModelError` if there is no
    such preset or file, or the file holds no JSON object.
    """
    folder = Path(name_or_path).expanduser()
    if name_or_path not in preset_names() and folder.is_dir():
        name_or_path = str(folder / "config.json")
    path = find(name_or_path, "presets", "model")
    config = read_object(path)
    # Older releases of ModelOpt describe the quantization only in a separate file.
    beside = path.with_name("hf_quant_config.json")
    if not config.get("quantization_config") and beside.is_file():
        config["quantization_config"] = read_object(beside)
    for part in _NESTED:
        if isinstance(inner := config.get(part), dict):
            fields = cast(JsonObject, inner)
            # An attn_config may repeat all fields of a config without values.
            kept = {name: value for name, value in fields.items() if part != "attn_config" or value not in (None, "")}
            config = config | kept
    architecture = str(config.get("model_type"))
    # A nested text_config may omit its own type.
    defaults = _DEFAULTS.get(architecture, _DEFAULTS.get(f"{architecture}_text", {}))
    return {field: value for field, value in defaults.items() if not config.keys() & set(_names(field))} | config


def present(config: JsonObject, field: str) -> bool:
    """True if the config has a value for the field under any of its names."""
    return _value(config, field) is not None


def integer(config: JsonObject, field: str, default: int | None = None, minimum: int = 1) -> int:
    """Read an integer under any of the field's names. Raises `ModelError` if there is none."""
    value = _value(config, field)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"its config has no {field}")
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ModelError(f"the {field} in its config must be an integer of at least {minimum}, not {value!r}")
    return value


def number(config: JsonObject, field: str) -> float | None:
    """Read a positive number; None if the field is missing. Raises `ModelError` for anything else."""
    value = config.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"the {field} in its config must be a positive number, not {value!r}")
    return float(value)


def items(config: JsonObject, field: str) -> list[object]:
    """Read a list; empty if the field is missing. Raises `ModelError` for anything else."""
    value: object = config.get(field) or []
    if not isinstance(value, list):
        raise ModelError(f"the {field} in its config must be a list, not {value!r}")
    return cast(list[object], value)


def cache_dtype(config: JsonObject) -> str:
    """Dtype of the KV cache by the checkpoint's quantization; "auto" if its config names none.

    Compressed-tensors has a `kv_cache_scheme`; ModelOpt has a `kv_cache_quant_algo` or that scheme. Raises `SpecError`
    for any dtype but fp8.
    """
    quantization = _section(config, "quantization_config")
    # ModelOpt may nest it one level deeper, as in its own file.
    quantization = quantization | _section(quantization, "quantization")
    algorithm = quantization.get("kv_cache_quant_algo")
    scheme = _section(quantization, "kv_cache_scheme")
    if not algorithm and scheme:
        bits, kind = scheme.get("num_bits"), scheme.get("type")
        algorithm = "FP8" if (bits, kind) == (8, "float") else f"{bits} bits of type {kind}"
    if not algorithm:
        return "auto"
    dtype = _QUANTIZED_DTYPES.get(str(algorithm).upper())
    if dtype is None:
        raise SpecError(f"not supported: a KV cache in {algorithm} (from the quantization_config in its config); give "
                        "another dtype for the KV cache to replace it")
    return dtype


def _value(config: JsonObject, field: str) -> object:
    return next((config[name] for name in _names(field) if config.get(name) is not None), None)


def _names(field: str) -> tuple[str, ...]:
    return _ALIASES.get(field, (field,))


def _section(config: JsonObject, name: str) -> JsonObject:
    section = config.get(name)
    return cast(JsonObject, section) if isinstance(section, dict) else {}
