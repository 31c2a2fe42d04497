"""Attention layers of a model, read from a preset or from any Hugging Face `config.json`.

Presets have the fields of a `config.json`, so one reader serves both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import cast

from ..kernel_templates.errors import InputError, ModelError, SpecError
from ..kernel_templates.spec import AttentionSpec
from .config import cache_dtype, integer, items, load_config, number, present
from .files import JsonObject

# Kinds of layers, as a config's layer_types names them.
FULL, SLIDING = "full_attention", "sliding_attention"
_KIND_NAMES = {FULL: FULL, SLIDING: SLIDING, "attention": FULL}

# Layers with a state of fixed size instead of a KV cache, which other kernels run.
_STATE_LAYERS = ("linear_attention", "mamba", "conv", "recurrent")

# Fields for one kind of layers only, by the general field that they replace.
_OF_A_KIND = {
    FULL: {
        "num_key_value_heads": "num_global_key_value_heads",
        "head_dim": "global_head_dim",
        "has_sinks": "add_full_attention_sink_bias",
    },
    SLIDING: {
        "num_attention_heads": "swa_num_attention_heads",
        "num_key_value_heads": "swa_num_key_value_heads",
        "head_dim": "swa_head_dim",
        "v_head_dim": "swa_v_head_dim",
        "has_sinks": "add_swa_attention_sink_bias",
    },
}

# Fields that, if set, need attention that the kernels do not support.
_OTHER_KINDS = {
    "kv_lora_rank": "absorbed multi-head latent attention, whose cache holds one latent vector a token; without this "
                    "field its layers are read as plain attention",
    "is_encoder_decoder": "cross attention",
    "add_cross_attention": "cross attention",
    "cross_attention_layers": "cross attention",
    "relative_attention": "relative position biases",
    "relative_attention_num_buckets": "relative position biases",
    "prefix_lm": "attention that is not causal",
    "use_bidirectional_attention": "attention that is not causal",
    "attention_types": "local attention of GPT-Neo's kind",
    "blocksparse_block_size": "block-sparse attention",
    "dual_chunk_attention_config": "dual chunk attention",
    "sparse_attention_config": "sparse attention",
    "sparse_config": "sparse attention",
    "index_topk": "sparse attention",
    "block_configs": "layers that differ in their number of heads",
    "per_layer_config": "layers that differ one by one",
}


def model_layers(
    name_or_path: str, tp: int = 1, dtype: str | None = None, kv_dtype: str | None = None, q_dtype: str | None = None
) -> dict[AttentionSpec, int]:
    """List the distinct attention layers of a model on each of `tp` GPUs, with the number of layers of each.

    Layers are in the order of their first occurrence. `name_or_path` is a preset, a `config.json` or a folder with one.

    - dtype: replaces the model's dtype.
    - q_dtype: dtype of queries; None for the model's.
    - kv_dtype: dtype of the KV cache; "auto" for the model's, None for the checkpoint's quantization.

    Raises `ModelError` for a model that is unknown, lacks a field or has no attention layer. Raises `SpecError` for a
    model that needs an unsupported feature or whose heads cannot be divided among `tp` GPUs.
    """
    config = load_config(name_or_path)
    try:
        _refuse_other_kinds(config)
        counts = Counter(_layer_kinds(config))
        if not counts:
            raise ModelError("it has no attention layer: all its layers have a state of fixed size")
        if counts.total() == 1:
            # All layers are alike, so one was listed. Without a number of layers in the config, count one.
            counts = dict.fromkeys(counts, integer(config, "num_hidden_layers", default=1))
        return {
            _spec(_of_kind(config, kind), kind, tp, dtype, kv_dtype, q_dtype): count for kind, count in counts.items()
        }
    except InputError as error:
        raise type(error)(f"model {name_or_path!r}: {error}") from error


def kind_of(spec: AttentionSpec) -> str:
    """Kind of a layer: "sliding_attention" if it has a sliding window, else "full_attention"."""
    return FULL if spec.sliding_window is None else SLIDING


def _refuse_other_kinds(config: JsonObject) -> None:
    """Raise `SpecError` for any attention but causal softmax attention over the KV of all tokens."""
    for field, feature in _OTHER_KINDS.items():
        # "vision" means bidirectional only between the tokens of an image.
        if (value := config.get(field)) and value != "vision":
            raise SpecError(f"not supported: {feature} ({field} is set in its config)")
    if str(config.get("position_embedding_type")).startswith("relative"):
        raise SpecError("not supported: relative position biases (by the position_embedding_type in its config)")
    # A list of the layers' kinds overrides the chunk size: MiMo sets a chunk size, but its layers have sliding windows.
    if config.get("attention_chunk_size") and not (config.get("layer_types") or config.get("hybrid_layer_pattern")):
        raise SpecError("not supported: chunked attention (attention_chunk_size is set in its config)")


def _layer_kinds(config: JsonObject) -> Iterator[str]:
    """List the kind of each attention layer, from the config's list or by the architecture's rule."""
    kinds = items(config, "layer_types")
    for kind in kinds:
        if kind not in (*_KIND_NAMES, *_STATE_LAYERS):
            raise SpecError(f"not supported: layers of type {kind!r}")
        if kind not in _STATE_LAYERS:
            yield _KIND_NAMES[str(kind)]
    if not kinds:
        slides = items(config, "hybrid_layer_pattern") or _sliding_by_rule(config)
        yield from (SLIDING if each else FULL for each in slides)


def _sliding_by_rule(config: JsonObject) -> Iterable[bool]:
    """True for each layer with a sliding window, by the architecture's rule; one layer if all are alike."""
    is_qwen = str(config.get("model_type")).startswith("qwen")
    if not (config.get("use_sliding_window", not is_qwen) and present(config, "sliding_window")):
        return [False]
    layers = integer(config, "num_hidden_layers")
    if isinstance(pattern := config.get("sliding_window_pattern"), str):
        # EXAONE: the pattern of local and global layers repeats, and the last layer is global.
        return [pattern[layer % len(pattern)] == "L" and layer < layers - 1 for layer in range(layers)]
    if every := integer(config, "sliding_window_pattern", default=0, minimum=0):
        return [bool((layer + 1) % every) for layer in range(layers)]
    # Qwen: the first max_window_layers layers have full attention.
    full_first = integer(config, "max_window_layers", default=28 if is_qwen else 0, minimum=0)
    return [layer >= full_first for layer in range(layers)]


def _of_kind(config: JsonObject, kind: str) -> JsonObject:
    """Replace general fields of the config by those of one kind of layers."""
    names = dict(_OF_A_KIND[kind])
    if kind == FULL and not config.get("attention_k_eq_v", True):
        # Gemma 4: full layers have their own number of KV heads only if their values are computed from keys.
        del names["num_key_value_heads"]
    own = {field: config[name] for field, name in names.items() if config.get(name) is not None}
    return config | own


def _spec(
    config: JsonObject, kind: str, tp: int, dtype: str | None, kv_dtype: str | None, q_dtype: str | None
) -> AttentionSpec:
    heads = integer(config, "num_attention_heads")
    kv_heads = integer(config, "num_key_value_heads", default=heads)
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        # Falcon and StarCoder: this flag overrides the number of KV heads in the config.
        kv_heads = 1
    head_dim = _head_dim(config, heads)
    q_per_gpu, kv_per_gpu = _divide(heads, kv_heads, tp)
    return AttentionSpec(
        q_per_gpu,
        kv_per_gpu,
        head_dim,
        dtype=dtype or str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
        kv_dtype=kv_dtype or cache_dtype(config),
        q_dtype=q_dtype or "auto",
        sliding_window=integer(config, "sliding_window") if kind == SLIDING else None,
        logits_soft_cap=number(config, "attn_logit_softcapping"),
        has_sinks=bool(config.get("has_sinks")),
        has_alibi=_has_alibi(config),
        scale=_scale(config, head_dim),
        v_head_dim=integer(config, "v_head_dim", default=head_dim),
    )


def _head_dim(config: JsonObject, heads: int) -> int:
    """Size of a query and a key; by default the hidden size divided by the heads."""
    if present(config, "qk_nope_head_dim"):
        # DeepSeek: queries and keys have a part without and a part with a position; head_dim may be one of them.
        return integer(config, "qk_nope_head_dim") + integer(config, "qk_rope_head_dim")
    if present(config, "head_dim"):
        return integer(config, "head_dim")
    head_dim, rest = divmod(integer(config, "hidden_size"), heads)
    if rest:
        raise ModelError(f"its hidden_size of {integer(config, 'hidden_size')} is not divisible by {heads} heads")
    return head_dim


def _has_alibi(config: JsonObject) -> bool:
    if config.get("model_type") == "baichuan":
        # No field separates the 13B model (ALiBi) from the 7B model (rotary positions), except its size.
        return config.get("hidden_size") == 5120
    return bool(config.get("alibi")) or config.get("position_embedding_type") == "alibi"


def _scale(config: JsonObject, head_dim: int) -> float | None:
    """Softmax scale of Gemma, Granite, MPT or DeepSeek; None if it is 1 / sqrt(head_dim)."""
    if (scalar := number(config, "query_pre_attn_scalar")) is not None:
        scale = scalar**-0.5
    else:
        factor = number(config, "attention_multiplier") or number(config, "softmax_scale")
        scale = factor or head_dim**-0.5 * _deepseek_stretch(config)
    return None if math.isclose(scale, head_dim**-0.5) else scale


def _deepseek_stretch(config: JsonObject) -> float:
    """Factor on DeepSeek's scores for longer contexts (DeepSeek-V2: DeepSeek-AI 2024, section 3.1.4).

    Other architectures with YaRN scale queries and keys before the kernel instead.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if not (present(config, "qk_nope_head_dim") and isinstance(rope, dict)):
        return 1.0
    rope = cast(JsonObject, rope)
    factor, weight = number(rope, "factor") or 1.0, number(rope, "mscale_all_dim") or 0.0
    return (0.1 * weight * math.log(max(1.0, factor)) + 1.0) ** 2


def _divide(heads: int, kv_heads: int, tp: int) -> tuple[int, int]:
    """Divide heads among GPUs: `(heads / tp, max(1, kv_heads / tp))`; KV heads are replicated if fewer than GPUs.

    Raises `SpecError` if heads cannot be divided evenly; the message lists the possible numbers of GPUs.
    """
    def _fits(gpus: int) -> bool:
        return heads % gpus == 0 and (kv_heads % gpus == 0 or gpus % kv_heads == 0)

    if tp < 1 or not _fits(tp):
        possible = ", ".join(str(gpus) for gpus in range(1, heads + 1) if _fits(gpus))
        raise SpecError(f"{heads} query and {kv_heads} KV heads cannot be divided among {tp} GPUs; "
                        f"possible are {possible}")
    return heads // tp, max(1, kv_heads // tp)
