"""Eager attention with log-sum-exp: what every variant is judged against.

    scores = scale * q k^T;  out = softmax(scores) v;  lse = log(sum(exp(scores)))

over the keys that causality allows (Vaswani et al. 2017, equation 1; the log-sum-exp as in Dao 2023, FlashAttention-2).
In float64 or float32 it is the oracle. In bfloat16 or float16 it is what any eager attention of that dtype gives: both
products in the dtype, the softmax in float32, the probabilities rounded to the dtype.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Generator

import torch

from .batch import Batch
from .launch import Tensors, query_start_locs
from .spec import AttentionSpec

# Scores held at once: 128 MiB in float32, and a few such temporaries.
MAX_SCORES = 2**25
# Rows of one block: few enough that a long prefill skips most of the keys that its first rows cannot see.
MAX_ROWS = 1024


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context_len: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of one sequence in the dtype of its arguments: `(out, lse)`.

    q: [query_len, num_q_heads, head_dim]; k, v: [kv_len, num_kv_heads, head_dim]; key j is visible to query i iff
    j <= context_len + i. out is like q; lse [query_len, num_q_heads] is the natural logarithm, in float32 or wider.
    """
    query_len, num_q_heads, _ = q.shape
    kv_len, num_kv_heads, _ = k.shape
    group = num_q_heads // num_kv_heads
    rows = max(1, min(query_len, MAX_ROWS, MAX_SCORES // (group * kv_len)))
    heads = max(1, MAX_SCORES // (group * rows * kv_len))
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=_softmax_dtype(q.dtype), device=q.device)
    with _no_tf32():
        for row, head in itertools.product(range(0, query_len, rows), range(0, num_kv_heads, heads)):
            kv_heads = slice(head, min(head + heads, num_kv_heads))
            block = slice(row, row + rows), slice(kv_heads.start * group, kv_heads.stop * group)
            visible = slice(0, min(context_len + row + rows, kv_len))
            out[block], lse[block] = _block(
                q[block], k[visible, kv_heads], v[visible, kv_heads], context_len + row, scale
            )
    return out, lse


def paged_attention(
    tensors: Tensors, batch: Batch, spec: AttentionSpec, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of every sequence of `batch` over the paged cache, computed in `dtype`: `(out, lse)`.

    out: [num_tokens, num_q_heads, head_dim] in `dtype`; lse: [num_tokens, num_q_heads]. `tensors.out` is left alone.
    """
    starts = query_start_locs(batch)
    parts = [
        attention(
            tensors.q[starts[index] : starts[index + 1]].to(dtype),
            gather(tensors.k_cache, tensors.block_table[index], query_len + context_len).to(dtype),
            gather(tensors.v_cache, tensors.block_table[index], query_len + context_len).to(dtype),
            context_len,
            spec.softmax_scale,
        )
        for index, (query_len, context_len) in enumerate(batch.sequences)
    ]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(lses)


def gather(cache: torch.Tensor, pages: torch.Tensor, kv_len: int) -> torch.Tensor:
    """The first `kv_len` keys or values of one sequence in logical order: [kv_len, num_kv_heads, head_dim].

    cache: [num_pages, page_size, num_kv_heads, head_dim]; pages: the sequence's row of the block table.
    """
    num_pages = -(-kv_len // cache.shape[1])
    return cache[pages[:num_pages].long()].flatten(0, 1)[:kv_len]


def _block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first_position: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention` for a few rows and KV heads, the first row standing at `first_position`."""
    rows, num_q_heads, head_dim = q.shape
    kv_len, num_kv_heads, _ = k.shape
    # The query heads of one KV head are rows of one product: [num_kv_heads, group * rows, ...].
    grouped = q.permute(1, 0, 2).reshape(num_kv_heads, -1, head_dim)
    # A power of two changes no digit, and products that are scaled before do not overflow float16.
    power = 2.0 ** math.floor(math.log2(scale))
    scores = torch.bmm(grouped * power, k.permute(1, 2, 0)).mul_(scale / power)
    if first_position + 1 < kv_len:
        positions = first_position + torch.arange(rows, device=q.device)
        hidden = torch.arange(kv_len, device=q.device) > positions[:, None]
        scores.view(num_q_heads, rows, kv_len).masked_fill_(hidden, -torch.inf)
    wide = scores.to(_softmax_dtype(q.dtype))
    lse = torch.logsumexp(wide, dim=-1)
    out = torch.bmm(torch.softmax(wide, dim=-1).to(q.dtype), v.permute(1, 0, 2))
    return (
        out.view(num_q_heads, rows, head_dim).permute(1, 0, 2),
        lse.view(num_q_heads, rows).permute(1, 0),
    )


def _softmax_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@contextlib.contextmanager
def _no_tf32() -> Generator[None]:
    """Float32 products on a GPU in float32 proper, whatever the process allows elsewhere."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
