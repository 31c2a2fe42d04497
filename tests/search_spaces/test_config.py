"""Fields of a config: names, nested parts, defaults of the architecture, and the dtype of the KV cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attention_tuner.kernel_templates.errors import ModelError, SpecError
from attention_tuner.search_spaces.config import cache_dtype, integer, items, load_config, number, present

FP8 = "float8_e4m3fn"
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
Write = Callable[..., str]


def test_an_unknown_model_lists_the_presets() -> None:
    with pytest.raises(ModelError, match=r"'llama3-8b' \(did you mean 'llama-3-8b'\?\); known are .*gemma-2-9b, .*"):
        load_config("llama3-8b")


def test_a_folder_stands_for_its_config(write: Write, tmp_path: Path) -> None:
    assert load_config(write()) == load_config(str(tmp_path))
    (tmp_path / "absent").mkdir()
    with pytest.raises(ModelError, match=r"no file is called '.*absent/config\.json'"):
        load_config(str(tmp_path / "absent"))


@pytest.mark.parametrize("part", ["text_config", "llm_config", "language_config", "attn_config"])
def test_a_nested_part_lies_over_the_rest(write: Write, part: str) -> None:
    config = load_config(write(**{part: {"head_dim": 128, "alibi": True}}))
    assert (config["head_dim"], config["num_attention_heads"], config["alibi"]) == (128, 8, True)


def test_empty_fields_of_an_attn_config_replace_nothing(write: Write) -> None:
    config = load_config(write(model_type="mpt", torch_dtype="float16",
                               attn_config={"model_type": "", "torch_dtype": None, "alibi": False}))
    assert (config["model_type"], config["torch_dtype"], config["alibi"]) == ("mpt", "float16", False)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model_type": "gemma3", "text_config": {"sliding_window": 1024}},
         {"num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 1024, "sliding_window_pattern": 6}),
        ({"model_type": "gemma2"}, {"attn_logit_softcapping": 50.0, "head_dim": 256, "sliding_window": 4096}),
        ({"model_type": "gemma2", "attn_logit_softcapping": None}, {"attn_logit_softcapping": None}),
        ({"model_type": "gpt_oss", "head_dim": 128}, {"has_sinks": True, "sliding_window": 128, "head_dim": 128}),
        ({"model_type": "bloom"}, {"alibi": True}),
    ],
)
def test_an_architecture_has_its_defaults(tmp_path: Path, fields: dict[str, Any], expected: dict[str, Any]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    config = load_config(str(path))
    assert {name: config[name] for name in expected} == expected


def test_a_field_has_several_names_and_the_first_that_is_set_counts() -> None:
    assert integer({"n_heads": 12}, "num_attention_heads") == 12
    assert integer({"num_attention_heads": None, "n_head": 3, "n_heads": 4}, "num_attention_heads") == 3
    assert present({"_sliding_window_pattern": 6}, "sliding_window_pattern")
    assert not present({"sliding_window": None}, "sliding_window")


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (None, "its config has no head_dim"),
        (True, "an integer of at least 1, not True"),
        (0, "an integer of at least 1, not 0"),
        ("64", "an integer of at least 1, not '64'"),
        (64.0, r"an integer of at least 1, not 64\.0"),
    ],
)
def test_an_integer_is_one(value: object, complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        integer({"head_dim": value}, "head_dim")


def test_an_integer_may_be_left_out_or_zero_where_that_is_allowed() -> None:
    assert integer({}, "max_window_layers", default=28) == 28
    assert integer({"max_window_layers": 0}, "max_window_layers", default=28, minimum=0) == 0


def test_a_number_is_positive_or_not_there() -> None:
    assert number({}, "softmax_scale") is None
    assert number({"softmax_scale": 2}, "softmax_scale") == 2.0
    for value in (-1, 0, True, "2", float("inf")):
        with pytest.raises(ModelError, match="softmax_scale in its config must be a positive number, not"):
            number({"softmax_scale": value}, "softmax_scale")


def test_a_list_is_one_or_not_there() -> None:
    assert items({"layer_types": None}, "layer_types") == []
    assert items({"layer_types": [1]}, "layer_types") == [1]
    with pytest.raises(ModelError, match="layer_types in its config must be a list, not 3"):
        items({"layer_types": 3}, "layer_types")


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        (None, "auto"),
        ({"quant_method": "fp8"}, "auto"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, "auto"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME}, FP8),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME | {"strategy": "attn_head"}}, FP8),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": SCHEME}, FP8),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, FP8),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "fp8"}, FP8),
        ({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}, "auto"),
        ({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}, FP8),
    ],
)
def test_the_dtype_of_a_quantized_cache_is_read(quantization: dict[str, Any] | None, expected: str) -> None:
    assert cache_dtype({"quantization_config": quantization}) == expected


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"kv_cache_quant_algo": "NVFP4"}, "NVFP4"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "8 bits of type int"),
    ],
)
def test_another_cache_is_refused_by_name(quantization: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecError, match=f"not supported: a KV cache in {named} "):
        cache_dtype({"quantization_config": quantization})


def test_model_opt_may_describe_the_cache_in_a_file_of_its_own(write: Write, tmp_path: Path) -> None:
    path = write()
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    assert cache_dtype(load_config(path)) == FP8
    assert cache_dtype(load_config(str(tmp_path))) == FP8
    assert cache_dtype(load_config(write(quantization_config={"quant_method": "fp8"}))) == "auto"
