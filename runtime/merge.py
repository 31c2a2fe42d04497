"""Merges attention over disjoint keys, for cascades and for context split between GPUs.

With the log-sum-exp of each part, softmax(a, b) v = w_a out_a + w_b out_b with w_x = exp(lse_x - lse), and
lse = log(exp(lse_a) + exp(lse_b)) (Dao et al. 2022, FlashAttention, section 3.1; Ye et al. 2024, FlashInfer, 2.2).
A sink belongs in exactly one of the parts.
"""

from __future__ import annotations

import torch


def merge(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over two parts with no key in common: `(out, lse)`.

    out_a and out_b: [num_tokens, num_q_heads, value_dim], the result in the dtype of `out_a`; lse_a and lse_b:
    [num_tokens, num_q_heads] float32 (or wider), natural logarithms. An lse is finite, or -inf if the part has no
    visible key; its out is then ignored. If neither part has a visible key, out is 0 and lse is -inf.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    merged = _weighted(out_a, lse_a, lse) + _weighted(out_b, lse_b, lse)
    return merged.to(out_a.dtype), lse


def _weighted(out: torch.Tensor, part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    is_empty = part == -torch.inf
    weight = torch.exp(part - whole).masked_fill(is_empty, 0)[..., None]
    return out.to(weight.dtype).masked_fill(is_empty[..., None], 0) * weight
