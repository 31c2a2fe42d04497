"""Eager attention with log-sum-exp, the reference for every variant.

    scores = scale * q k^T;  out = softmax(scores) v;  lse = log(sum(exp(scores)))

over the keys that causality allows (Vaswani et al. 2017, equation 1; the log-sum-exp as in Dao 2023, FlashAttention-2),
and with the features of `spec.AttentionSpec`. In float64 or float32 it is the oracle. In bfloat16 or float16 it is any
eager attention of that dtype: both products in the dtype, everything between them in float32, and the probabilities
rounded to the dtype.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Generator
from dataclasses import dataclass

import torch

from ..batch import TREE_TOKENS, Batch
from ..launch.launcher import Tensors, query_start_locs
from ..spec import AttentionSpec

# Scores held at once: 128 MiB in float32, and a few such temporaries.
MAX_SCORES = 2**25
# Rows of one block. With few rows a long prefill skips most keys that its first rows cannot see.
MAX_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Features:
    """The features of one sequence's attention beyond causality; None where it lacks one."""

    window: int | None = None
    soft_cap: float | None = None
    # [num_q_heads].
    sinks: torch.Tensor | None = None
    # ALiBi slopes [num_q_heads].
    slopes: torch.Tensor | None = None
    # [query_len] int64. Bit b of a token's word: the token sees query token b of the sequence. The word decides, not
    # causality and not the window.
    tree: torch.Tensor | None = None

    @classmethod
    def of(cls, spec: AttentionSpec, tensors: Tensors, tokens: slice) -> Features:
        """The features of the sequence whose query tokens are `tokens`."""
        tree = tensors.tree_mask if spec.has_tree_mask else None
        if tree is not None:
            tree = tree[tokens] if 1 < tokens.stop - tokens.start <= TREE_TOKENS else None
        return cls(
            spec.sliding_window,
            spec.logits_soft_cap,
            tensors.sinks if spec.has_sinks else None,
            tensors.alibi_slopes if spec.has_alibi else None,
            tree,
        )


CAUSAL = Features()


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context_len: int, scale: float, features: Features = CAUSAL
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one sequence in the dtype of its arguments: `(out, lse)`.

    q: [query_len, num_q_heads, head_dim]; k: [kv_len, num_kv_heads, head_dim] and v: the same with value_dim; key j is
    visible to query i iff j <= context_len + i and `features` allow it. out: [query_len, num_q_heads, value_dim] in
    q's dtype, zero where nothing is seen; lse [query_len, num_q_heads] is the natural logarithm, in float32 or wider.
    """
    query_len, num_q_heads, _ = q.shape
    kv_len, num_kv_heads, _ = k.shape
    group = num_q_heads // num_kv_heads
    rows = max(1, min(query_len, MAX_ROWS, MAX_SCORES // (group * max(kv_len, 1))))
    heads = max(1, MAX_SCORES // (group * rows * max(kv_len, 1)))
    out = q.new_empty(query_len, num_q_heads, v.shape[-1])
    lse = torch.empty(q.shape[:2], dtype=_softmax_dtype(q.dtype), device=q.device)
    with _no_tf32():
        for row, head in itertools.product(range(0, query_len, rows), range(0, num_kv_heads, heads)):
            kv_heads = slice(head, min(head + heads, num_kv_heads))
            block = slice(row, min(row + rows, query_len)), slice(kv_heads.start * group, kv_heads.stop * group)
            keys = _visible_keys(block[0], context_len, features)
            distance, hidden = _distance_and_hidden(block[0], keys, context_len, features, q.device)
            scores = _scores(q[block], k[keys, kv_heads], scale)
            if features.soft_cap is not None:
                scores = features.soft_cap * torch.tanh(scores / features.soft_cap)
            if features.slopes is not None:
                scores += features.slopes[block[1], None, None].to(scores) * distance.to(scores)
            scores.masked_fill_(hidden, -torch.inf)
            sinks = None if features.sinks is None else features.sinks[block[1], None].to(scores)
            out[block], lse[block] = _weigh(scores, v[keys, kv_heads], sinks)
    return out, lse


def paged_attention(
    tensors: Tensors, batch: Batch, spec: AttentionSpec, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every sequence of `batch` over the paged cache, computed in `dtype`: `(out, lse)`.

    out: [num_tokens, num_q_heads, value_dim] in `dtype`; lse: [num_tokens, num_q_heads]. `tensors.out` and
    `tensors.lse` are left alone.
    """
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    starts = query_start_locs(batch)
    for index, (query_len, context_len) in enumerate(batch.sequences):
        tokens = slice(starts[index], starts[index + 1])
        # Without query tokens no key is needed, and none may be read.
        kv_len = query_len + context_len if query_len else 0
        pages = tensors.block_table[index]
        k = dequantized(gather(tensors.k_cache, pages, kv_len), tensors.k_scale, dtype)
        v = dequantized(gather(tensors.v_cache, pages, kv_len), tensors.v_scale, dtype)
        features = Features.of(spec, tensors, tokens)
        q_scale = None if tensors.q_scale is None else tensors.q_scale.repeat_interleave(spec.group_size)
        q = dequantized(tensors.q[tokens], q_scale, dtype)
        parts.append(attention(q, k, v, context_len, spec.softmax_scale, features))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(lses)


def gather(cache: torch.Tensor, pages: torch.Tensor, kv_len: int) -> torch.Tensor:
    """The first `kv_len` keys or values of one sequence in logical order: [kv_len, num_kv_heads, head_dim].

    cache: [num_pages, page_size, num_kv_heads, head_dim]; pages: the sequence's row of the block table.
    """
    num_pages = -(-kv_len // cache.shape[1])
    return cache[pages[:num_pages].long()].flatten(0, 1)[:kv_len]


def dequantized(rows: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Queries, keys or values [len, num_heads, dim] in `dtype`, each head times its scale [num_heads] if given."""
    if scale is None:
        return rows.to(dtype)
    wide = _softmax_dtype(dtype)
    return (rows.to(wide) * scale.to(wide)[:, None]).to(dtype)


def _visible_keys(rows: slice, context_len: int, features: Features) -> slice:
    """The range of keys that any of these query rows may see."""
    first = 0 if features.window is None else max(0, context_len + rows.start - features.window + 1)
    if features.tree is not None:
        return slice(min(first, context_len), context_len + len(features.tree))
    return slice(first, context_len + rows.stop)


def _distance_and_hidden(
    rows: slice, keys: slice, context_len: int, features: Features, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each key's distance past each query, and a mask of the keys hidden from it: two of [rows, keys]."""
    key = torch.arange(keys.start, keys.stop, device=device)
    distance = key - torch.arange(context_len + rows.start, context_len + rows.stop, device=device)[:, None]
    hidden = distance > 0
    if features.window is not None:
        hidden |= distance <= -features.window
    if features.tree is not None:
        bits = features.tree[rows, None] >> (key - context_len).clamp(min=0) & 1
        hidden = torch.where(key >= context_len, bits == 0, hidden)
    return distance, hidden


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """The scaled products of a few rows and KV heads: [num_q_heads, rows, keys], in float32 or wider."""
    rows, num_q_heads, head_dim = q.shape
    kv_len, num_kv_heads, _ = k.shape
    # The query heads of one KV head are rows of one product: [num_kv_heads, group * rows, ...].
    grouped = q.permute(1, 0, 2).reshape(num_kv_heads, -1, head_dim)
    # Scaling by a power of two is exact, and done before the product it keeps float16 from overflowing.
    power = 2.0 ** math.floor(math.log2(scale))
    scores = torch.bmm(grouped * power, k.permute(1, 2, 0)).mul_(scale / power)
    return scores.view(num_q_heads, rows, kv_len).to(_softmax_dtype(q.dtype))


def _weigh(
    scores: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The softmax of scores [num_q_heads, rows, keys] times v, in v's dtype, and its log-sum-exp, rows first.

    sinks: [num_q_heads, 1], one more column of the softmax.
    """
    num_q_heads, rows, kv_len = scores.shape
    lse = torch.logsumexp(scores, dim=-1)
    probabilities = torch.softmax(scores, dim=-1).masked_fill_(lse[..., None] == -torch.inf, 0)
    if sinks is not None:
        with_sink = torch.logaddexp(lse, sinks)
        probabilities *= torch.exp(lse - with_sink)[..., None]
        lse = with_sink
    grouped = probabilities.to(v.dtype).view(v.shape[1], -1, kv_len)
    out = torch.bmm(grouped, v.permute(1, 0, 2)).view(num_q_heads, rows, -1)
    return out.permute(1, 0, 2), lse.permute(1, 0)


def _softmax_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@contextlib.contextmanager
def _no_tf32() -> Generator[None]:
    """Compute float32 products on a GPU in IEEE float32, whatever the process allows elsewhere."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
