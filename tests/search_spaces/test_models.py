"""The layers of the presets against the published numbers, and configs of other architectures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attention_tuner.kernel_templates.errors import ModelError, SpecError
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.search_spaces import models
from attention_tuner.search_spaces.models import load_config, model_specs, preset_names

# Query heads, KV heads, head size, layers: from each model's card or report.
PUBLISHED = {
    "llama-3-8b": (32, 8, 128, 32),
    "llama-3-70b": (64, 8, 128, 80),
    "llama-3.1-405b": (128, 8, 128, 126),
    "qwen2.5-7b": (28, 4, 128, 28),
    "qwen2.5-72b": (64, 8, 128, 80),
    "qwen3-8b": (32, 8, 128, 36),
    "qwen3-32b": (64, 8, 128, 64),
    "qwen3-30b-a3b": (32, 4, 128, 48),
    "mistral-7b": (32, 8, 128, 32),
    "mixtral-8x7b": (32, 8, 128, 32),
    "phi-3-mini": (32, 32, 96, 32),
    "gemma-2-9b": (16, 8, 256, 42),
    "gemma-3-27b": (32, 16, 128, 62),
    "gpt-oss-20b": (64, 8, 64, 24),
    "gpt-oss-120b": (64, 8, 64, 36),
}

REFUSED = {
    "phi-3-mini": "a head size of 96",
    "gemma-2-9b": "a sliding window (of 4096)",
    "gemma-3-27b": "a sliding window (of 1024)",
    "gpt-oss-20b": "a sliding window (of 128)",
    "gpt-oss-120b": "a sliding window (of 128)",
}

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a config.json of a small model with these fields changed, and gives its path; None removes a field."""

    def write_config(**changes: Any) -> str:
        base = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 6}
        fields = {name: value for name, value in (base | changes).items() if value is not None}
        path = tmp_path / "config.json"
        path.write_text(json.dumps(fields))
        return str(path)

    return write_config


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Collects the fields of each layer instead of building specs, which refuse what the templates cannot do."""
    built: list[dict[str, Any]] = []

    def collect(q: int, kv: int, head_dim: int, **fields: Any) -> int:
        built.append({"heads": (q, kv, head_dim)} | fields)
        return len(built)

    monkeypatch.setattr(models, "AttentionSpec", collect)
    return built


def test_the_presets_are_those_published() -> None:
    assert preset_names() == tuple(sorted(PUBLISHED))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_numbers(name: str, seen: list[dict[str, Any]]) -> None:
    model_specs(name)
    *heads, layers = PUBLISHED[name]
    assert {layer["heads"] for layer in seen} == {tuple(heads)}
    assert load_config(name)["num_hidden_layers"] == layers
    assert {layer["dtype"] for layer in seen} == {"bfloat16"}


@pytest.mark.parametrize("name", sorted(PUBLISHED.keys() - REFUSED.keys()))
def test_a_supported_preset_has_one_kind_of_layer(name: str) -> None:
    assert model_specs(name) == (AttentionSpec(*PUBLISHED[name][:3]),)


@pytest.mark.parametrize("name", REFUSED)
def test_a_preset_that_needs_more_is_refused_by_name(name: str) -> None:
    with pytest.raises(SpecError) as caught:
        model_specs(name)
    assert str(caught.value).startswith(f"model {name!r}: not supported yet: {REFUSED[name]}")


def test_a_model_without_attention_is_refused(write: Write) -> None:
    with pytest.raises(ModelError, match="has no attention layer"):
        model_specs(write(layer_types=["mamba", "linear_attention"]))


def test_the_features_of_gemma_and_gpt_oss(seen: list[dict[str, Any]]) -> None:
    for name in ("gemma-2-9b", "gemma-3-27b", "gpt-oss-20b"):
        model_specs(name)
    features = [(s["sliding_window"], s["logits_soft_cap"], s["has_sinks"], s["scale"]) for s in seen]
    assert features == [
        (4096, 50.0, False, None),
        (None, 50.0, False, None),
        (1024, None, False, pytest.approx(168**-0.5)),
        (None, None, False, pytest.approx(168**-0.5)),
        (128, None, True, None),
        (None, None, True, None),
    ]


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
    (spec,) = model_specs(name, tp=tp)
    assert (spec.num_q_heads, spec.num_kv_heads) == heads


@pytest.mark.parametrize("tp", [0, -1, 3, 7, 8, 56])
def test_heads_that_cannot_be_divided(tp: int) -> None:
    with pytest.raises(SpecError) as caught:
        model_specs("qwen2.5-7b", tp=tp)
    assert str(caught.value) == (
        f"model 'qwen2.5-7b': 28 query and 4 KV heads cannot be divided among {tp} GPUs; possible are 1, 2, 4, 28"
    )


def test_dtype_of_the_caller_before_that_of_the_config(write: Write) -> None:
    assert model_specs(write(torch_dtype="float16"))[0].dtype == "float16"
    assert model_specs(write(torch_dtype="float16"), dtype="bfloat16")[0].dtype == "bfloat16"
    assert model_specs(write())[0].dtype == "bfloat16"
    with pytest.raises(SpecError, match="dtype 'float32'"):
        model_specs(write(dtype="float32"))


def test_an_unknown_model_lists_the_presets() -> None:
    with pytest.raises(ModelError, match=r"'llama3-8b' \(did you mean 'llama-3-8b'\?\); known are gemma-2-9b, .*"):
        model_specs("llama3-8b")


def test_a_folder_stands_for_its_config(write: Write, tmp_path: Path) -> None:
    assert model_specs(str(tmp_path / write())) == model_specs(str(tmp_path)) == (AttentionSpec(8, 2, 64),)
    (tmp_path / "absent").mkdir()
    with pytest.raises(ModelError, match=r"no file is called '.*absent/config\.json'"):
        model_specs(str(tmp_path / "absent"))


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
    ],
)
def test_heads_of_other_architectures(write: Write, changes: dict[str, Any], heads: tuple[int, int, int]) -> None:
    assert model_specs(write(**changes)) == (AttentionSpec(*heads),)


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
        ({"sliding_window": 32, "model_type": "gemma2"}, [32, None]),
        ({"sliding_window": 32, "layer_types": ["full_attention", "linear_attention", "full_attention"]}, [None]),
        ({"sliding_window": 32, "layer_types": ["full_attention", "sliding_attention"]}, [None, 32]),
    ],
)
def test_which_layers_slide(
    write: Write, seen: list[dict[str, Any]], changes: dict[str, Any], windows: list[int | None]
) -> None:
    model_specs(write(**changes))
    assert [layer["sliding_window"] for layer in seen] == windows


@pytest.mark.parametrize(
    ("changes", "scale"),
    [({"attention_multiplier": 0.0078125}, 0.0078125), ({"query_pre_attn_scalar": 64}, None), ({}, None)],
)
def test_softmax_scale(write: Write, changes: dict[str, Any], scale: float | None) -> None:
    assert model_specs(write(**changes))[0].scale == scale


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"kv_lora_rank": 512}, r"multi-head latent attention \(kv_lora_rank is set in its config\)"),
        ({"attention_chunk_size": 8192}, "chunked attention"),
        ({"is_encoder_decoder": True}, "cross attention"),
        ({"block_configs": [{}]}, "layers that differ in their number of heads"),
        ({"v_head_dim": 128}, "values of size 128 beside keys of size 64"),
        ({"layer_types": ["chunked_attention"]}, "layers of type 'chunked_attention'"),
        ({"alibi": True}, "ALiBi"),
        ({"position_embedding_type": "alibi"}, "ALiBi"),
        ({"model_type": "bloom"}, "ALiBi"),
        ({"model_type": "gpt_oss"}, "attention sinks"),
        ({"attn_logit_softcapping": 30.0}, "a logits soft cap"),
        ({"sliding_window": 4096}, "a sliding window"),
    ],
)
def test_a_feature_that_is_missing_is_named_with_the_model(write: Write, changes: dict[str, Any], feature: str) -> None:
    with pytest.raises(SpecError, match=rf"model '.*config\.json': not supported yet: {feature}"):
        model_specs(write(**changes))


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
        ({"sliding_window": 8, "sliding_window_pattern": "LLLG"}, "must be an integer of at least 0, not 'LLLG'"),
    ],
)
def test_a_config_without_what_is_needed(write: Write, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=rf"model '.*config\.json': .*{complaint}"):
        model_specs(write(**changes))


def test_heads_that_cannot_exist(write: Write) -> None:
    with pytest.raises(SpecError, match="8 query heads are not divisible by 3 KV heads"):
        model_specs(write(num_key_value_heads=3))
