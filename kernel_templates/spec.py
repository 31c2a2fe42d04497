"""The attention layer: everything about it that is fixed when a model is deployed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from .errors import SpecError

DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128, 256)
# Of softmax scales; models have 1/512 to 1. Beyond, float16 holds no queries that tell keys apart.
MIN_SCALE, MAX_SCALE = 1e-6, 1e3


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention layer on one GPU, after tensor parallelism. Dtypes are torch's names.

    `kv_dtype` "auto" means that of `dtype`; `scale` None means 1 / sqrt(head_dim). Raises `SpecError` for a layer that
    cannot exist, and for one that needs a feature the templates do not have, naming the feature.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    kv_dtype: str = "auto"
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    has_sinks: bool = False
    has_alibi: bool = False
    scale: float | None = None

    def __post_init__(self) -> None:
        if self.num_q_heads < 1 or self.num_kv_heads < 1:
            raise SpecError(f"head counts must be at least 1, not {self.num_q_heads} and {self.num_kv_heads}")
        if self.num_q_heads % self.num_kv_heads:
            raise SpecError(f"{self.num_q_heads} query heads are not divisible by {self.num_kv_heads} KV heads")
        if self.scale is not None and not MIN_SCALE <= self.scale <= MAX_SCALE:
            raise SpecError(f"the softmax scale must be from {MIN_SCALE:g} to {MAX_SCALE:g}, not {self.scale}")
        missing = self._missing_feature()
        if missing:
            raise SpecError(f"not supported yet: {missing}")

    def _missing_feature(self) -> str:
        if self.head_dim not in HEAD_DIMS:
            return f"a head size of {self.head_dim} (supported: {', '.join(map(str, HEAD_DIMS))})"
        if self.dtype not in DTYPES:
            return f"dtype {self.dtype!r} (supported: {', '.join(DTYPES)})"
        if self.kv_dtype not in ("auto", self.dtype):
            return f"a KV cache in {self.kv_dtype!r} beside {self.dtype!r} queries"
        if self.sliding_window is not None:
            return f"a sliding window (of {self.sliding_window})"
        if self.logits_soft_cap is not None:
            return f"a logits soft cap (of {self.logits_soft_cap})"
        if self.has_sinks:
            return "attention sinks"
        return "ALiBi" if self.has_alibi else ""

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def softmax_scale(self) -> float:
        """What scores are multiplied by before the softmax."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of q, K or V."""
        return 2

    def key(self) -> str:
        """A text that names the layer, such as `num_q_heads=32,num_kv_heads=8,head_dim=128,dtype=bfloat16`.

        Fields at their default are left out; `parse` reads it back.
        """
        shown = (f for f in fields(self) if f.name == "dtype" or getattr(self, f.name) != f.default)
        return ",".join(f"{field.name}={getattr(self, field.name)}" for field in shown)

    @classmethod
    def parse(cls, text: str) -> AttentionSpec:
        """The layer that `key` named. Raises `SpecError` when the text names none."""
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
