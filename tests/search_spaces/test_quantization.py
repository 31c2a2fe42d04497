"""The dtype of the KV cache in configs of compressed-tensors and of ModelOpt."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attention_tuner.kernel_templates.errors import SpecError
from attention_tuner.search_spaces.config import load_config
from attention_tuner.search_spaces.quantization import cache_dtype

FP8 = "float8_e4m3fn"
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
Write = Callable[..., str]


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
def test_what_a_cache_holds(quantization: dict[str, Any] | None, expected: str) -> None:
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


def test_model_opt_may_say_it_in_a_file_of_its_own(write: Write, tmp_path: Path) -> None:
    path = write()
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    assert cache_dtype(load_config(path)) == FP8
    assert cache_dtype(load_config(str(tmp_path))) == FP8
    assert cache_dtype(load_config(write(quantization_config={"quant_method": "fp8"}))) == "auto"
