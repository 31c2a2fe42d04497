"""The record of an attention layer: all properties fixed when a model is deployed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from .errors import SpecError

DTYPES = ("bfloat16", "float16", "float32")
# Dtypes of K, V and q that the kernel converts to a 16-bit `dtype` for the products.
FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")
HALF_DTYPES = ("bfloat16", "float16")
HEAD_DIMS = tuple(range(32, 513, 8))
# Accepted softmax scales. Models use 1/512 to 1; outside these limits, float16 queries cannot tell keys apart.
MIN_SCALE, MAX_SCALE = 1e-6, 1e3
# Accepted soft caps. Models use 20 to 50. The kernels compute tanh as a difference whose error in float32 grows with
# the cap. With a larger cap this error exceeds the rounding error of the dtype.
MIN_SOFT_CAP, MAX_SOFT_CAP, MAX_FLOAT32_SOFT_CAP = 1e-3, 1e3, 50.0
_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention layer on one GPU, after tensor parallelism. Dtypes are torch's names.

    With key j, query i at absolute position p and query head h, a score is

        s = scale * q_i . k_j                 `scale` None means 1 / sqrt(head_dim)
        s = cap * tanh(s / cap)               `logits_soft_cap` (Gemma 2: Riviere et al. 2024, section 2)
        s = s + slope_h * (j - p)             `has_alibi` (Press et al. 2022, equation in section 3)
        s = -inf unless p - window < j <= p   `sliding_window`

    A value equal to the meaning of a default is replaced by the default, so that equal layers compare equal. Raises
    `SpecError` for a layer that cannot exist or needs an unsupported feature, which the message names.
    """

    num_q_heads: int
    num_kv_heads: int
    # Elements in one query and one key.
    head_dim: int
    # Dtype of the output, and of q, K and V if their own dtype is "auto".
    dtype: str = "bfloat16"
    # Dtype of K and V. One of `FP8_DTYPES` comes with a scale for each KV head.
    kv_dtype: str = "auto"
    # The most keys that a query sees, its own included.
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    # True if the softmax of each query head h has one more column, with score sink_h and no value (gpt-oss).
    has_sinks: bool = False
    has_alibi: bool = False
    scale: float | None = None
    # Elements in one value; None means `head_dim`.
    v_head_dim: int | None = None
    # True if a mask says which query tokens of a sequence see each other (Miao et al. 2024, SpecInfer).
    has_tree_mask: bool = False
    # Dtype of q. One of `FP8_DTYPES` needs a cache in one of them, and comes with a scale for each KV head.
    q_dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.kv_dtype == self.dtype:
            object.__setattr__(self, "kv_dtype", "auto")
        if self.q_dtype == self.dtype:
            object.__setattr__(self, "q_dtype", "auto")
        if self.v_head_dim == self.head_dim:
            object.__setattr__(self, "v_head_dim", None)
        if self.num_q_heads < 1 or self.num_kv_heads < 1:
            raise SpecError(f"head counts must be at least 1, not {self.num_q_heads} and {self.num_kv_heads}")
        if self.num_q_heads % self.num_kv_heads:
            raise SpecError(f"{self.num_q_heads} query heads are not divisible by {self.num_kv_heads} KV heads")
        if self.scale is not None and not MIN_SCALE <= self.scale <= MAX_SCALE:
            raise SpecError(f"the softmax scale must be from {MIN_SCALE:g} to {MAX_SCALE:g}, not {self.scale}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise SpecError(f"a sliding window must be at least 1, not {self.sliding_window}")
        most = MAX_FLOAT32_SOFT_CAP if self.dtype == "float32" else MAX_SOFT_CAP
        if self.logits_soft_cap is not None and not MIN_SOFT_CAP <= self.logits_soft_cap <= most:
            raise SpecError(f"the logits soft cap must be from {MIN_SOFT_CAP:g} to {most:g} for {self.dtype}, "
                            f"not {self.logits_soft_cap}")
        missing = self._missing_feature()
        if missing:
            raise SpecError(f"not supported: {missing}")

    def _missing_feature(self) -> str:
        sizes = f"(supported: multiples of 8 from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]})"
        if self.head_dim not in HEAD_DIMS:
            return f"a head size of {self.head_dim} {sizes}"
        if self.value_dim not in HEAD_DIMS:
            return f"a value head size of {self.value_dim} {sizes}"
        if self.dtype not in DTYPES:
            return f"dtype {self.dtype!r} (supported: {', '.join(DTYPES)})"
        accepted = ("auto", *FP8_DTYPES) if self.dtype in HALF_DTYPES else ("auto",)
        if self.kv_dtype not in accepted:
            return f"a KV cache in {self.kv_dtype!r} beside {self.dtype!r} queries (supported: {', '.join(accepted)})"
        accepted = ("auto", *FP8_DTYPES) if self.has_fp8_cache else ("auto",)
        if self.q_dtype not in accepted:
            return (f"queries in {self.q_dtype!r} beside a cache in {self.cache_dtype!r} "
                    f"(supported: {', '.join(accepted)})")
        return ""

    @property
    def value_dim(self) -> int:
        """Elements in one value and in one row of the output."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def cache_dtype(self) -> str:
        """The dtype of K and V in the cache."""
        return self.dtype if self.kv_dtype == "auto" else self.kv_dtype

    @property
    def query_dtype(self) -> str:
        """The dtype of q."""
        return self.dtype if self.q_dtype == "auto" else self.q_dtype

    @property
    def has_fp8_queries(self) -> bool:
        """True if q is in 8 bits, with scales."""
        return self.q_dtype in FP8_DTYPES

    @property
    def has_fp8_cache(self) -> bool:
        """True if K and V are in 8 bits, with scales."""
        return self.kv_dtype in FP8_DTYPES

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def softmax_scale(self) -> float:
        """The factor on the products of queries and keys."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of the output and of the operands of products."""
        return _ELEMENT_BYTES[self.dtype]

    @property
    def q_element_bytes(self) -> int:
        """Bytes of one element of q."""
        return _ELEMENT_BYTES[self.query_dtype]

    @property
    def kv_element_bytes(self) -> int:
        """Bytes of one element of K or V in the cache."""
        return _ELEMENT_BYTES[self.cache_dtype]

    def key(self) -> str:
        """The layer as text, such as `num_q_heads=32,num_kv_heads=8,head_dim=128,dtype=bfloat16`.

        Fields at their default are left out, except the dtype. `parse` is the inverse.
        """
        shown = (f for f in fields(self) if f.name == "dtype" or getattr(self, f.name) != f.default)
        return ",".join(f"{field.name}={getattr(self, field.name)}" for field in shown)

    @classmethod
    def parse(cls, text: str) -> AttentionSpec:
        """The layer with this `key`. Raises `SpecError` if the text is no key."""
        readers = {f.name: _READERS[str(f.type)] for f in fields(cls)}
        try:
            pairs = [part.split("=", 1) for part in text.split(",")]
            values: dict[str, Any] = {name: readers[name](value) for name, value in pairs}
            return cls(**values)
        except (ValueError, KeyError, TypeError) as error:
            raise SpecError(f"{text!r} does not name an attention layer; expected the form "
                            "num_q_heads=32,num_kv_heads=8,head_dim=128,dtype=bfloat16") from error


_READERS: dict[str, Callable[[str], Any]] = {
    "int": int,
    "str": str,
    "bool": {"True": True, "False": False}.__getitem__,
    "int | None": int,
    "float | None": float,
}
