"""Which attention layers a model has: from a preset, or from any Hugging Face `config.json`.

Presets hold the same field names as a `config.json`, so that one reader serves both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from ..kernel_templates.errors import InputError, ModelError, SpecError
from ..kernel_templates.spec import AttentionSpec
from .files import JsonObject, find, read_object, shipped

# Older architectures name the same things differently; the first name that is present counts.
_ALIASES = {
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "kv_n_heads"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "head_dim": ("head_dim", "kv_channels"),
}

# One in how many layers has full attention, for the architectures whose config may leave it out.
_FULL_EVERY = {"gemma2": 2, "gpt_oss": 2, "cohere2": 4, "gemma3": 6, "gemma3_text": 6}

# Layers that keep a state of fixed size instead of a paged KV cache: other kernels run them.
_STATE_LAYERS = ("linear_attention", "mamba", "conv", "recurrent")

_OTHER_KINDS = {
    "kv_lora_rank": "multi-head latent attention",
    "attention_chunk_size": "chunked attention",
    "is_encoder_decoder": "cross attention",
    "block_configs": "layers that differ in their number of heads",
}


def preset_names() -> tuple[str, ...]:
    """The models that are known by name, sorted."""
    return tuple(shipped("presets"))


def model_specs(name_or_path: str, tp: int = 1, dtype: str | None = None) -> tuple[AttentionSpec, ...]:
    """The distinct attention layers of a model, on each of `tp` GPUs, in the order in which they first occur.

    `name_or_path` is a preset, a `config.json` or the folder of one; `dtype` replaces the model's own. Raises
    `ModelError` for a model that is unknown, lacks a field or has no attention layer, and `SpecError` for one that
    needs a feature that is not supported or whose heads cannot be divided among `tp` GPUs; both name the model.
    """
    config = load_config(name_or_path)
    try:
        _refuse_other_kinds(config)
        sliding = dict.fromkeys(_sliding_layers(config))
        if not sliding:
            raise ModelError("it has no attention layer: all its layers keep a state of fixed size")
        return tuple(dict.fromkeys(_spec(config, slides, tp, dtype) for slides in sliding))
    except InputError as error:
        raise type(error)(f"model {name_or_path!r}: {error}") from error


def load_config(name_or_path: str) -> JsonObject:
    """The fields of a model's config, those of a nested `text_config` or `attn_config` laid over its own.

    Raises `ModelError` when there is no such preset or file, or when it holds no JSON object.
    """
    folder = Path(name_or_path).expanduser()
    if name_or_path not in preset_names() and folder.is_dir():
        name_or_path = str(folder / "config.json")
    config = read_object(find(name_or_path, "presets", "model"))
    for nested in ("text_config", "attn_config"):
        if isinstance(inner := config.get(nested), dict):
            config = config | cast(JsonObject, inner)
    return config


def _refuse_other_kinds(config: JsonObject) -> None:
    """Raises `SpecError` for what is not causal softmax attention over the keys and values of all tokens."""
    for field, feature in _OTHER_KINDS.items():
        if config.get(field):
            raise SpecError(f"not supported yet: {feature} ({field} is set in its config)")


def _sliding_layers(config: JsonObject) -> Iterator[bool]:
    """Whether each attention layer has a sliding window: from `layer_types`, or by its architecture's rule."""
    listed: object = config.get("layer_types") or []
    if not isinstance(listed, list):
        raise ModelError(f"the layer_types in its config must be a list, not {listed!r}")
    kinds = cast(list[object], listed)
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention", *_STATE_LAYERS):
            raise SpecError(f"not supported yet: layers of type {kind!r}")
        if kind not in _STATE_LAYERS:
            yield kind == "sliding_attention"
    if not kinds:
        yield from _sliding_by_rule(config)


def _sliding_by_rule(config: JsonObject) -> Iterator[bool]:
    """Whether each layer has a sliding window when its config does not list them."""
    architecture = str(config.get("model_type"))
    wanted = config.get("use_sliding_window", not architecture.startswith("qwen"))
    if not (wanted and config.get("sliding_window")):
        yield False
        return
    every = _integer(config, "sliding_window_pattern", default=_FULL_EVERY.get(architecture, 0), minimum=0)
    # Qwen's rule: so many layers at the beginning have full attention.
    full_first = _integer(config, "max_window_layers", default=0, minimum=0)
    for layer in range(_integer(config, "num_hidden_layers")):
        yield bool((layer + 1) % every) if every else layer >= full_first


def _spec(config: JsonObject, slides: bool, tp: int, dtype: str | None) -> AttentionSpec:
    heads = _integer(config, "num_attention_heads")
    kv_heads = _integer(config, "num_key_value_heads", default=heads)
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        kv_heads = 1  # Falcon's and StarCoder's flag overrides whatever count stands beside it
    head_dim = _head_dim(config, heads)
    q_per_gpu, kv_per_gpu = _divide(heads, kv_heads, tp)
    return AttentionSpec(
        q_per_gpu,
        kv_per_gpu,
        head_dim,
        dtype=dtype or str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
        sliding_window=_integer(config, "sliding_window") if slides else None,
        logits_soft_cap=_number(config, "attn_logit_softcapping"),
        has_sinks=config.get("model_type") == "gpt_oss",
        has_alibi=_has_alibi(config),
        scale=_scale(config, head_dim),
    )


def _head_dim(config: JsonObject, heads: int) -> int:
    """The head size; without one in the config, the hidden size is divided among the heads."""
    if any(config.get(name) is not None for name in _ALIASES["head_dim"]):
        head_dim = _integer(config, "head_dim")
    else:
        head_dim, rest = divmod(_integer(config, "hidden_size"), heads)
        if rest:
            raise ModelError(f"its hidden_size of {config['hidden_size']} is not divisible by {heads} heads")
    if (config.get("v_head_dim") or head_dim) != head_dim:
        raise SpecError(f"not supported yet: values of size {config['v_head_dim']} beside keys of size {head_dim}")
    return head_dim


def _scale(config: JsonObject, head_dim: int) -> float | None:
    """The softmax scale when it is not 1 / sqrt(head_dim): Gemma's scalar, or Granite's multiplier."""
    scalar = _number(config, "query_pre_attn_scalar")
    scale = _number(config, "attention_multiplier") if scalar is None else scalar**-0.5
    return None if scale is None or math.isclose(scale, head_dim**-0.5) else scale


def _has_alibi(config: JsonObject) -> bool:
    by_field = config.get("alibi") or config.get("position_embedding_type") == "alibi"
    return bool(by_field) or config.get("model_type") == "bloom"


def _divide(heads: int, kv_heads: int, tp: int) -> tuple[int, int]:
    """Query and KV heads per GPU: `(heads / tp, max(1, kv_heads / tp))`; fewer KV heads than GPUs are replicated.

    Raises `SpecError`, listing what is possible, when heads would have to be cut.
    """
    def fits(gpus: int) -> bool:
        return heads % gpus == 0 and (kv_heads % gpus == 0 or gpus % kv_heads == 0)

    if tp < 1 or not fits(tp):
        possible = ", ".join(str(gpus) for gpus in range(1, heads + 1) if fits(gpus))
        raise SpecError(f"{heads} query and {kv_heads} KV heads cannot be divided among {tp} GPUs; "
                        f"possible are {possible}")
    return heads // tp, max(1, kv_heads // tp)


def _integer(config: JsonObject, field: str, default: int | None = None, minimum: int = 1) -> int:
    """An integer of the config under any of the field's names. Raises `ModelError` when there is none."""
    names = _ALIASES.get(field, (field,))
    value = next((config[name] for name in names if config.get(name) is not None), default)
    if value is None:
        raise ModelError(f"its config has no {field}")
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ModelError(f"the {field} in its config must be an integer of at least {minimum}, not {value!r}")
    return value


def _number(config: JsonObject, field: str) -> float | None:
    """A positive number of the config, or None when it has none. Raises `ModelError` for anything else."""
    value = config.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"the {field} in its config must be a positive number, not {value!r}")
    return float(value)
