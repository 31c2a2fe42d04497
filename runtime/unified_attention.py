"""A stand-in for the function of that name in vLLM 0.33's Triton backend: the same arguments, the tuned kernel.

What is behind is a `HybridAttention` for each layer that it meets, planned when lengths change.
"""

# pyright: basic
from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from ..kernel_templates.errors import SpecError
from ..kernel_templates.spec import AttentionSpec
from .attentions import Attentions
from .hybrid_attention import HybridAttention

# Of vLLM's ways to store the cache: as it is, and in 8 bits with one scale.
KV_QUANT_MODES = (0, 1)


def unified_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int, seqused_k: torch.Tensor, max_seqlen_k: int, softmax_scale: float, causal: bool,
    window_size: Sequence[int], block_table: torch.Tensor, softcap: float, q_descale: torch.Tensor | None,
    k_descale: torch.Tensor | None, v_descale: torch.Tensor | None,
    seq_threshold_3D: int | None = None,
    num_par_softmax_segments: int | None = None, softmax_segm_output: torch.Tensor | None = None,
    softmax_segm_max: torch.Tensor | None = None, softmax_segm_expsum: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None, output_scale: None = None, qq_bias: None = None,
    sinks: torch.Tensor | None = None, mm_prefix_range: None = None, rswa_prefix_lens: None = None,
    rswa_window: int | None = None, use_alibi_sqrt: bool = False, kv_quant_mode: int = 0,
    k_scale_cache: None = None, v_scale_cache: None = None, chunk_lookback: int = -1, use_td: bool = False,
    mm_prefix_clamp_sliding_window: bool = False, *,
    cu_seqlens_q_cpu: torch.Tensor | None = None, seqused_k_cpu: torch.Tensor | None = None,
    attention: HybridAttention | None = None,
) -> None:  # fmt: skip
    """Write causal attention of a batch over a paged cache to `out`.

    q, out: [num_tokens, num_q_heads, head_dim]; k, v: [num_pages, page_size, num_kv_heads, head_dim]; cu_seqlens_q:
    [num_seqs + 1] int32, where each sequence's query tokens start; seqused_k: [num_seqs] int32, its keys with them.
    window_size: (keys before the query's own, 0), -1 for no window; softcap: 0 for none. k_descale and v_descale are
    heeded with a cache in 8 bits, q_descale is needed with queries in 8 bits and refused with others: one number, or
    [num_seqs, num_kv_heads], the same for all sequences. Scales that differ between sequences are refused on the host;
    on a GPU looking would wait for it, and the first sequence's count for all.
    Not looked at: the longest lengths, the scratch for split keys, `use_td`.

    The lengths are read on the host: from a GPU that waits for it, unless both are the very tensors of the call before,
    unchanged as far as PyTorch counts; a tensor made in inference mode has no such count and is read anew. (What other
    kernels write into a tensor PyTorch does not count: pass a new view with each step.) To wait for nothing, pass
    copies of both in the host's memory as `cu_seqlens_q_cpu` and `seqused_k_cpu`, or as `attention` one of this layer
    that is planned, which is also what a captured graph needs. Each thread has attentions and workspaces of its own;
    its calls on one device must be on one stream, or ordered by events as if they were, and q's device the current
    one. Raises `SpecError` for what is not supported, by name.
    """
    _refuse({
        "causal": causal is not True,
        "q_descale": q_descale is not None and q.dtype.itemsize > 1,
        "output_scale": output_scale is not None,
        "qq_bias": qq_bias is not None,
        "mm_prefix_range": mm_prefix_range is not None,
        "rswa_window": rswa_window is not None and rswa_prefix_lens is not None,
        "use_alibi_sqrt": use_alibi_sqrt and alibi_slopes is not None,
        "kv_quant_mode": int(kv_quant_mode) not in KV_QUANT_MODES,
        "k_scale_cache": k_scale_cache is not None,
        "v_scale_cache": v_scale_cache is not None,
        "chunk_lookback": chunk_lookback > -1 and window_size[0] >= 0,
        "window_size": window_size[0] < -1 or window_size[1] not in (-1, 0),
    })  # fmt: skip
    if not len(q):
        return
    spec = _spec(
        q.shape[1], k.shape[2], q.shape[2], v.shape[3], out.dtype if q.dtype.itemsize == 1 else q.dtype, k.dtype,
        q.dtype, window_size[0], softcap, softmax_scale, sinks is not None, alibi_slopes is not None,
    )  # fmt: skip
    if attention is None:
        lengths = _shared.lengths(cu_seqlens_q, seqused_k, cu_seqlens_q_cpu, seqused_k_cpu)
        attention = _shared.planned(spec, k.shape[1], q, lengths)
    elif attention.spec != spec:
        raise SpecError(f"the given attention is of layer {attention.spec.key()}, not of {spec.key()}")
    scales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    q_scale, k_scale, v_scale = (
        _scale(name, scale, spec.num_kv_heads) if spec.has_fp8_cache else None for name, scale in scales.items()
    )
    attention.run(q, k, v, block_table, out, sinks=_float32(sinks), alibi_slopes=_float32(alibi_slopes),
                  q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)  # fmt: skip


def _refuse(asked: dict[str, bool]) -> None:
    for name, is_asked in asked.items():
        if is_asked:
            raise SpecError(f"not supported: unified_attention with this {name!r}")


@functools.lru_cache(maxsize=1024)
def _spec(
    num_q_heads: int, num_kv_heads: int, head_dim: int, v_head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype,
    q_dtype: torch.dtype, window: int, softcap: float, scale: float, has_sinks: bool, has_alibi: bool,
) -> AttentionSpec:  # fmt: skip
    return AttentionSpec(
        num_q_heads, num_kv_heads, head_dim, str(dtype).removeprefix("torch."), str(kv_dtype).removeprefix("torch."),
        sliding_window=window + 1 if window >= 0 else None,
        logits_soft_cap=softcap or None,
        has_sinks=has_sinks,
        has_alibi=has_alibi,
        # That of every tuned layer, though it may have been computed in another way.
        scale=None if math.isclose(scale, head_dim**-0.5, rel_tol=1e-6) else scale,
        v_head_dim=v_head_dim,
        q_dtype=str(q_dtype).removeprefix("torch."),
    )  # fmt: skip


def _float32(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.float().contiguous()


def _scale(name: str, descale: torch.Tensor | None, num_kv_heads: int) -> torch.Tensor | None:
    """A scale for each KV head [num_kv_heads] of one for all, or of one for each sequence and head."""
    if descale is None:
        return None
    if not isinstance(descale, torch.Tensor):
        raise SpecError(f"a scale must be a tensor, not a {type(descale).__name__}")
    of_heads = descale[0] if descale.dim() == 2 and len(descale) else descale
    if of_heads.shape not in ((), (1,), (num_kv_heads,)):
        raise SpecError(f"a scale must be one number, or [num_seqs, {num_kv_heads}], not {list(descale.shape)}")
    if descale.is_cpu and not (descale == of_heads).all():
        raise SpecError(f"not supported: a {name} that differs between sequences")
    return of_heads.float().expand(num_kv_heads).contiguous()


# For each thread its own.
_shared = Attentions()
