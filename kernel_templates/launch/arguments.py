"""The records by which launchers pass arguments to kernels: tensors and strides, and compile-time constants.

A kernel reads their fields by name. Triton passes each tensor and number of a record as if it were an argument, and
none for a field that is None.
"""

# pyright: basic
from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Work(NamedTuple):
    """The work list on the device, as `plan.WorkList` describes it."""

    # [n, 8] int32.
    items: torch.Tensor
    # [n, 2] int32, where the last program of a tile merges.
    merges: torch.Tensor
    # The numbers of items, of entries, and of items of long sequences.
    counts: torch.Tensor


class Inputs(NamedTuple):
    """Queries, keys and values, as `launcher.Tensors` has them."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor


class Partials(NamedTuple):
    """Partial results, a row for each query row and segment."""

    # [kv_heads, rows, value_dim].
    out: torch.Tensor
    # The maxima of scores [kv_heads, rows] float32, in base 2.
    max: torch.Tensor
    # The sums of exponentials [kv_heads, rows] float32.
    sum: torch.Tensor
    # [kv_heads, rows] int32: at a tile's first row, its programs that are done. None for the reduction kernel.
    counters: torch.Tensor | None


class Features(NamedTuple):
    """The tensors of a layer's features, as `launcher.Tensors` has them; None where the layer lacks the feature."""

    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    q_scale: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    tree_mask: torch.Tensor | None
    lse: torch.Tensor | None
    # The elements from one token of `lse` to the next.
    stride_lse: int | None


NO_FEATURES = Features(None, None, None, None, None, None, None, None)


class Strides(NamedTuple):
    """The strides, in elements, of queries, output, keys and values."""

    q_token: int
    q_head: int
    o_token: int
    o_head: int
    k_page: int
    k_token: int
    k_head: int
    v_page: int
    v_token: int
    v_head: int

    @classmethod
    def of(cls, q: torch.Tensor, out: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> Strides:
        """The strides of these tensors."""
        return cls(*q.stride()[:2], *out.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3])


class Heads(NamedTuple):
    """Sizes of a layer that the reduction is compiled with."""

    # Query heads per KV head.
    GROUP: int
    VALUE_DIM: int


class Layer(NamedTuple):
    """Sizes and features of a layer that the attention kernel is compiled with."""

    # Query heads per KV head.
    GROUP: int
    HEAD_DIM: int
    VALUE_DIM: int
    PAGE_SIZE: int
    # 0 without a window.
    WINDOW: int
    SOFT_CAP: float | None


class Code(NamedTuple):
    """Compile-time choices of the attention kernel beside the layer and the tile shapes."""

    # Stages of the pipelined loop over key tiles.
    STAGES: int
    # K and V come through TMA ("tma"), or through pointers at offsets in "int32" or "int64".
    LOAD: str
    # The last program of a tile merges the tile's partial results.
    LAST_MERGES: bool
    # Operands in bfloat16 are widened to float32, for the interpreter.
    WIDEN: bool


class RowStrides(NamedTuple):
    """The strides, in elements, of queries and output."""

    q_token: int
    q_head: int
    o_token: int
    o_head: int


class CacheView(NamedTuple):
    """The steps between pages and heads in a cache that is seen as a matrix."""

    rows_per_page: int
    rows_per_head: int
    columns_per_head: int


class Units(NamedTuple):
    """The units of work of `gluon_hopper`: each item for each KV head."""

    # The fields of `Work`.
    items: Any
    merges: Any
    num_items: Any
    num_heads: Any


class Ring(NamedTuple):
    """The ring of K and V tiles in shared memory, and each stage's barriers."""

    # [stages, block_n, head_dim].
    k: Any
    v: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


class Tickets(NamedTuple):
    """Announced units in shared memory, and their barriers."""

    ring: Any
    full: Any
    empty: Any
