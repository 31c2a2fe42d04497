"""Layers of the presets against published numbers, and configs of other architectures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from attention_tuner.kernel_templates.errors import ModelError, SpecError
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.search_spaces.config import load_config, preset_names
from attention_tuner.search_spaces.models import kind_of, model_layers

FULL, SLIDING = "full_attention", "sliding_attention"

# Query heads, KV heads, head size, layers: from each model's page or report.
PUBLISHED = {
    "deepseek-v2-lite-mha": (16, 16, 192, 27),
    "gemma-2-9b": (16, 8, 256, 42),
    "gemma-3-27b": (32, 16, 128, 62),
    "gemma-4-31b": (32, 16, 256, 60),
    "gpt-oss-20b": (64, 8, 64, 24),
    "gpt-oss-120b": (64, 8, 64, 36),
    "llama-3-8b": (32, 8, 128, 32),
    "llama-3-70b": (64, 8, 128, 80),
    "llama-3.1-405b": (128, 8, 128, 126),
    "mimo-v2-flash": (64, 4, 192, 48),
    "mistral-7b": (32, 8, 128, 32),
    "mistral-7b-v0.1": (32, 8, 128, 32),
    "mixtral-8x7b": (32, 8, 128, 32),
    "mpt-7b": (32, 32, 128, 32),
    "mpt-30b": (64, 64, 112, 48),
    "phi-3-mini": (32, 32, 96, 32),
    "qwen2.5-7b": (28, 4, 128, 28),
    "qwen2.5-72b": (64, 8, 128, 80),
    "qwen3-8b": (32, 8, 128, 36),
    "qwen3-32b": (64, 8, 128, 64),
    "qwen3-30b-a3b": (32, 4, 128, 48),
}

# Features of the layers of each kind, in the model's order, for models that have any.
FEATURES: dict[str, dict[str, dict[str, Any]]] = {
    # 192 ** -0.5 times (0.0707 ln 40 + 1) squared.
    "deepseek-v2-lite-mha": {FULL: {"v_head_dim": 128, "scale": pytest.approx(0.114721, rel=1e-5)}},
    "gemma-2-9b": {SLIDING: {"sliding_window": 4096, "logits_soft_cap": 50.0}, FULL: {"logits_soft_cap": 50.0}},
    "gemma-3-27b": {
        SLIDING: {"sliding_window": 1024, "scale": pytest.approx(168**-0.5)},
        FULL: {"scale": pytest.approx(168**-0.5)},
    },
    "gemma-4-31b": {
        SLIDING: {"sliding_window": 1024, "scale": 1.0},
        FULL: {"head_dim": 512, "num_kv_heads": 4, "scale": 1.0},
    },
    "gpt-oss-20b": {SLIDING: {"sliding_window": 128, "has_sinks": True}, FULL: {"has_sinks": True}},
    "gpt-oss-120b": {SLIDING: {"sliding_window": 128, "has_sinks": True}, FULL: {"has_sinks": True}},
    "mimo-v2-flash": {
        FULL: {"v_head_dim": 128},
        SLIDING: {"v_head_dim": 128, "sliding_window": 128, "has_sinks": True, "num_kv_heads": 8},
    },
    "mistral-7b-v0.1": {SLIDING: {"sliding_window": 4096}},
    "mpt-7b": {FULL: {"has_alibi": True}},
    "mpt-30b": {FULL: {"has_alibi": True}},
    "phi-3-mini": {SLIDING: {"sliding_window": 2047}},
}

Write = Callable[..., str]


def the_layer(name_or_path: str, **options: str) -> AttentionSpec:
    (layer,) = model_layers(name_or_path, **options)
    return layer


def test_the_presets_are_those_published() -> None:
    assert preset_names() == tuple(sorted(PUBLISHED))


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_layers_of_a_preset_are_those_published(name: str) -> None:
    *heads, layers = PUBLISHED[name]
    assert load_config(name).get("num_hidden_layers", load_config(name).get("n_layers")) == layers
    plain = dataclasses.asdict(AttentionSpec(*heads))
    expected = {kind: plain | features for kind, features in FEATURES.get(name, {FULL: {}}).items()}
    found = model_layers(name)
    assert [(kind_of(spec), dataclasses.asdict(spec)) for spec in found] == list(expected.items())
    assert sum(found.values()) == layers


def test_the_options_of_a_model_apply_to_each_of_its_layers() -> None:
    specs = model_layers("gemma-2-9b", tp=2, dtype="float16", kv_dtype="float8_e4m3fn")
    assert [(spec.num_q_heads, spec.dtype, spec.kv_dtype, spec.sliding_window) for spec in specs] == [
        (8, "float16", "float8_e4m3fn", 4096), (8, "float16", "float8_e4m3fn", None)]


def test_a_model_without_attention_is_refused(write: Write) -> None:
    with pytest.raises(ModelError, match="has no attention layer"):
        model_layers(write(layer_types=["mamba", "linear_attention"]))


@pytest.mark.parametrize(
    ("name", "tp", "heads"),
    [
        ("llama-3-70b", 8, (8, 1)),
        ("llama-3-70b", 2, (32, 4)),
        ("llama-3-70b", 16, (4, 1)),
        ("qwen2.5-7b", 4, (7, 1)),
        ("qwen2.5-7b", 28, (1, 1)),
    ],
)
def test_heads_are_divided_and_few_kv_heads_replicated(name: str, tp: int, heads: tuple[int, int]) -> None:
    (spec,) = model_layers(name, tp=tp)
    assert (spec.num_q_heads, spec.num_kv_heads) == heads


@pytest.mark.parametrize("tp", [0, -1, 3, 7, 8, 56])
def test_heads_that_cannot_be_divided_are_refused(tp: int) -> None:
    with pytest.raises(SpecError) as caught:
        model_layers("qwen2.5-7b", tp=tp)
    assert str(caught.value) == (
        f"model 'qwen2.5-7b': 28 query and 4 KV heads cannot be divided among {tp} GPUs; possible are 1, 2, 4, 28"
    )


def test_the_dtype_of_the_caller_comes_before_that_of_the_config(write: Write) -> None:
    assert the_layer(write(torch_dtype="float16")).dtype == "float16"
    assert the_layer(write(torch_dtype="float16"), dtype="bfloat16").dtype == "bfloat16"
    assert the_layer(write()).dtype == "bfloat16"
    assert the_layer(write(dtype="float32")).dtype == "float32"
    with pytest.raises(SpecError, match=r"config\.json': not supported: dtype 'int3'"):
        model_layers(write(dtype="int3"))


def test_the_cache_holds_what_the_caller_says(write: Write) -> None:
    assert the_layer(write()).kv_dtype == "auto"
    assert the_layer(write(), kv_dtype="float8_e5m2").kv_dtype == "float8_e5m2"
    assert model_layers(write(), kv_dtype="auto") == model_layers(write())


def test_a_cache_is_in_fp8_where_the_checkpoint_was_quantized_for_it(write: Write) -> None:
    path = write(quantization_config={"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}})
    assert the_layer(path).kv_dtype == "float8_e4m3fn"
    assert the_layer(path, kv_dtype="auto").kv_dtype == "auto"
    assert the_layer(path, kv_dtype="float8_e5m2").kv_dtype == "float8_e5m2"


@pytest.mark.parametrize(
    ("changes", "heads"),
    [
        ({"head_dim": None, "hidden_size": 512}, (8, 2, 64)),
        ({"num_key_value_heads": None}, (8, 8, 64)),
        ({"num_attention_heads": None, "num_key_value_heads": None, "head_dim": None, "n_head": 12, "n_embd": 768},
         (12, 12, 64)),
        # Falcon 7B and 40B.
        ({"num_attention_heads": 71, "num_key_value_heads": None, "num_kv_heads": 71, "multi_query": True},
         (71, 1, 64)),
        ({"num_attention_heads": 128, "num_key_value_heads": None, "num_kv_heads": 8, "multi_query": True,
          "new_decoder_architecture": True}, (128, 8, 64)),
        ({"text_config": {"num_attention_heads": 16, "head_dim": 128}}, (16, 2, 128)),
        ({"attn_config": {"kv_n_heads": 4}, "num_key_value_heads": None}, (8, 4, 64)),
        ({"model_type": "qwen2", "num_attention_heads": 14, "num_key_value_heads": 2}, (14, 2, 64)),
    ],
)
def test_heads_of_other_architectures_are_read(
    write: Write, changes: dict[str, Any], heads: tuple[int, int, int]
) -> None:
    assert tuple(model_layers(write(**changes))) == (AttentionSpec(*heads),)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": None}, [None]),
        ({"sliding_window": 32}, [32]),
        ({"sliding_window": 32, "use_sliding_window": False}, [None]),
        ({"sliding_window": 32, "model_type": "qwen2"}, [None]),
        ({"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 2}, [None, 32]),
        ({"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 6}, [None]),
        ({"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 0}, [32]),
        ({"sliding_window": 32, "sliding_window_pattern": 6}, [32, None]),
        ({"sliding_window": 32, "sliding_window_pattern": 7}, [32]),
        ({"sliding_window": None, "model_type": "gemma2", "text_config": {"sliding_window": None}}, [None]),
        ({"sliding_window": 32, "model_type": "gemma2"}, [32, None]),
        ({"model_type": "gemma3_text"}, [4096, None]),
        ({"model_type": "gemma3_text", "_sliding_window_pattern": 7}, [4096]),
        ({"model_type": "gpt_oss"}, [128, None]),
        ({"model_type": "cohere2"}, [4096, None]),
        ({"sliding_window": 32, "sliding_window_pattern": "LLLG"}, [32, None]),
        ({"sliding_window": 32, "sliding_window_pattern": "L"}, [32, None]),
        ({"sliding_window": 32, "model_type": "qwen3", "use_sliding_window": True}, [None]),
        ({"sliding_window": 32, "model_type": "qwen3", "use_sliding_window": True, "num_hidden_layers": 30},
         [None, 32]),
        ({"sliding_window": 32, "hybrid_layer_pattern": [1, 0, 1]}, [32, None]),
        ({"sliding_window_size": 32, "hybrid_layer_pattern": [0, 1], "attention_chunk_size": 32}, [None, 32]),
        ({"layer_types": ["mamba", "attention"]}, [None]),
        ({"sliding_window": 32, "layer_types": ["full_attention", "linear_attention", "full_attention"]}, [None]),
        ({"sliding_window": 32, "layer_types": ["full_attention", "sliding_attention"]}, [None, 32]),
    ],
)
def test_layers_with_a_sliding_window_are_read(
    write: Write, changes: dict[str, Any], windows: list[int | None]
) -> None:
    assert [layer.sliding_window for layer in model_layers(write(**changes))] == windows


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({}, None),
        ({"attention_multiplier": 0.0078125}, 0.0078125),
        ({"attn_config": {"softmax_scale": 0.5}}, 0.5),
        ({"query_pre_attn_scalar": 64}, None),
        ({"query_pre_attn_scalar": 16}, 0.25),
        # Only DeepSeek's scale depends on its positions.
        ({"rope_scaling": {"type": "yarn", "factor": 40, "mscale_all_dim": 1.0}}, None),
        ({"qk_nope_head_dim": 48, "qk_rope_head_dim": 16}, None),
        ({"qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "rope_parameters": {"rope_type": "default"}}, None),
        ({"qk_nope_head_dim": 48, "qk_rope_head_dim": 16,
          "rope_parameters": {"rope_type": "yarn", "factor": 2.718281828459045, "mscale_all_dim": 1.0}},
         pytest.approx(1.21 / 8)),
    ],
)
def test_the_softmax_scale_is_that_of_the_architecture(
    write: Write, changes: dict[str, Any], scale: float | None
) -> None:
    assert the_layer(write(**changes)).scale == scale


@pytest.mark.parametrize(
    ("changes", "features"),
    [
        ({"alibi": True}, {"has_alibi": True}),
        ({"position_embedding_type": "alibi"}, {"has_alibi": True}),
        ({"model_type": "bloom"}, {"has_alibi": True}),
        ({"model_type": "mpt"}, {"has_alibi": True}),
        ({"model_type": "baichuan", "hidden_size": 5120}, {"has_alibi": True}),
        ({"model_type": "baichuan", "hidden_size": 4096}, {}),
        ({"model_type": "mpt", "attn_config": {"alibi": False}}, {}),
        ({"attn_logit_softcapping": 30.0}, {"logits_soft_cap": 30.0}),
        ({"v_head_dim": 128}, {"v_head_dim": 128}),
        ({"v_head_dim": 64}, {}),
        ({"head_dim": 16, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
         {"head_dim": 192, "v_head_dim": 128}),
        ({"use_bidirectional_attention": "vision"}, {}),
        ({"add_full_attention_sink_bias": True}, {"has_sinks": True}),
        ({"add_swa_attention_sink_bias": True}, {}),
    ],
)
def test_features_are_those_of_the_architecture(
    write: Write, changes: dict[str, Any], features: dict[str, Any]
) -> None:
    (layer,) = model_layers(write(**changes))
    assert layer == dataclasses.replace(AttentionSpec(8, 2, 64), **features)


def test_sliding_layers_can_have_heads_and_sinks_of_their_own(write: Write) -> None:
    own = {"swa_num_attention_heads": 16, "swa_num_key_value_heads": 4, "swa_head_dim": 96, "swa_v_head_dim": 32}
    path = write(hybrid_layer_pattern=[0, 1], sliding_window=32, add_swa_attention_sink_bias=True, **own)
    assert model_layers(path, tp=2) == {
        AttentionSpec(4, 1, 64): 1,
        AttentionSpec(8, 2, 96, sliding_window=32, has_sinks=True, v_head_dim=32): 1,
    }


@pytest.mark.parametrize(("shared", "kv_heads"), [
    ({}, 4), ({"attention_k_eq_v": False}, 4), ({"attention_k_eq_v": True}, 1),
])  # fmt: skip
def test_full_layers_of_gemma_4_have_kv_heads_of_their_own_where_values_are_made_of_keys(
    write: Write, shared: dict[str, bool], kv_heads: int
) -> None:
    path = write(model_type="gemma4_text", num_key_value_heads=4, num_global_key_value_heads=1, head_dim=256,
                 sliding_window=512, num_hidden_layers=12, **shared)
    assert model_layers(path) == {
        AttentionSpec(8, 4, 256, sliding_window=512, scale=1.0): 10,
        AttentionSpec(8, kv_heads, 512, scale=1.0): 2,
    }


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"kv_lora_rank": 512}, r"absorbed multi-head latent attention, .* \(kv_lora_rank is set in its config\)"),
        ({"attention_chunk_size": 8192}, "chunked attention"),
        ({"layer_types": ["chunked_attention"]}, "layers of type 'chunked_attention'"),
        ({"layer_types": [["full_attention"]]}, r"layers of type \['full_attention'\]"),
        ({"is_encoder_decoder": True}, "cross attention"),
        ({"add_cross_attention": True}, "cross attention"),
        ({"text_config": {"cross_attention_layers": [3, 8]}}, "cross attention"),
        ({"relative_attention_num_buckets": 32}, "relative position biases"),
        ({"position_embedding_type": "relative_key_query"}, "relative position biases"),
        ({"use_bidirectional_attention": True}, "attention that is not causal"),
        ({"attn_config": {"prefix_lm": True}}, "attention that is not causal"),
        ({"blocksparse_block_size": 64}, "block-sparse attention"),
        ({"attention_types": [[["global", "local"], 3]]}, "local attention of GPT-Neo's kind"),
        ({"dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192}}, "dual chunk attention"),
        ({"sparse_attention_config": {"use_sparse_attention": True}}, "sparse attention"),
        ({"sparse_config": {"topk": 64}}, "sparse attention"),
        ({"text_config": {"index_topk": 2048}}, r"sparse attention \(index_topk is set in its config\)"),
        ({"block_configs": [{}]}, "layers that differ in their number of heads"),
        ({"global_head_dim": 768}, "a head size of 768"),
        ({"head_dim": 100}, "a head size of 100"),
        ({"v_head_dim": 12}, "a value head size of 12"),
    ],
)
def test_a_feature_that_is_missing_is_named_with_the_model(write: Write, changes: dict[str, Any], feature: str) -> None:
    with pytest.raises(SpecError, match=rf"model '.*config\.json': not supported: {feature}"):
        model_layers(write(**changes))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_attention_heads": None}, "its config has no num_attention_heads"),
        ({"head_dim": None}, "its config has no hidden_size"),
        ({"head_dim": None, "hidden_size": 100}, "hidden_size of 100 is not divisible by 8 heads"),
        ({"num_attention_heads": [8, 16]}, r"num_attention_heads in its config must be .* not \[8, 16\]"),
        ({"num_attention_heads": "8"}, "must be an integer of at least 1, not '8'"),
        ({"num_key_value_heads": 0}, "must be an integer of at least 1, not 0"),
        ({"head_dim": True}, "must be an integer of at least 1, not True"),
        ({"query_pre_attn_scalar": -1}, "must be a positive number, not -1"),
        ({"layer_types": 3}, "layer_types in its config must be a list, not 3"),
        ({"layer_types": ["sliding_attention"]}, "its config has no sliding_window"),
        ({"sliding_window": 8, "sliding_window_pattern": -1}, "must be an integer of at least 0, not -1"),
        ({"sliding_window": 8, "num_hidden_layers": None}, "its config has no num_hidden_layers"),
        ({"v_head_dim": "64"}, "must be an integer of at least 1, not '64'"),
        ({"hybrid_layer_pattern": "LG"}, "hybrid_layer_pattern in its config must be a list, not 'LG'"),
    ],
)
def test_a_config_without_what_is_needed_is_refused(write: Write, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=rf"model '.*config\.json': .*{complaint}"):
        model_layers(write(**changes))


def test_heads_that_cannot_exist_are_refused(write: Write) -> None:
    with pytest.raises(SpecError, match="8 query heads are not divisible by 3 KV heads"):
        model_layers(write(num_key_value_heads=3))


def test_a_config_without_a_number_of_layers_counts_one_of_each_kind(write: Write) -> None:
    assert list(model_layers(write()).values()) == [6]
    assert list(model_layers(write(num_hidden_layers=None)).values()) == [1]
