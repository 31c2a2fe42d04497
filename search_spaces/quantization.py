"""What the KV cache of a quantized checkpoint holds, by the `quantization_config` of its config."""

from __future__ import annotations

from typing import cast

from ..kernel_templates.errors import SpecError
from .files import JsonObject

_DTYPES = {"FP8": "float8_e4m3fn"}


def cache_dtype(config: JsonObject) -> str:
    """The dtype that a checkpoint was calibrated to have its KV cache in, "auto" where it says none.

    Compressed-tensors has a `kv_cache_scheme`, ModelOpt a `kv_cache_quant_algo` or the same scheme. Raises `SpecError`
    for a cache in anything but fp8.
    """
    quantization = _section(config, "quantization_config")
    # ModelOpt has a level more, as in its own file.
    quantization = quantization | _section(quantization, "quantization")
    algorithm = quantization.get("kv_cache_quant_algo")
    scheme = _section(quantization, "kv_cache_scheme")
    if not algorithm and scheme:
        bits, kind = scheme.get("num_bits"), scheme.get("type")
        algorithm = "FP8" if (bits, kind) == (8, "float") else f"{bits} bits of type {kind}"
    if not algorithm:
        return "auto"
    dtype = _DTYPES.get(str(algorithm).upper())
    if dtype is None:
        raise SpecError(f"not supported: a KV cache in {algorithm} (by the quantization_config in its config, which "
                        "another dtype for the cache replaces)")
    return dtype


def _section(config: JsonObject, name: str) -> JsonObject:
    section = config.get(name)
    return cast(JsonObject, section) if isinstance(section, dict) else {}
