"""Replacement for vLLM 0.33's Triton function `unified_attention`: same arguments, tuned kernel.

Callers of that function do not plan. So this module makes one attention per kind of layer, and plans it when the
lengths change.
"""

# pyright: basic
from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..kernel_templates.errors import BatchError, SpecError
from ..kernel_templates.limits import next_power_of_two
from ..kernel_templates.spec import AttentionSpec
from .hybrid_attention import HybridAttention
from .launchers import Chooser, from_default_table

# Supported values of vLLM's `kv_quant_mode`: cache in the model's dtype, and cache in 8 bits with one scale.
KV_QUANT_MODES = (0, 1)
# Limits of each attention, far beyond any engine's step. They cost no memory, which grows with the actual steps.
MOST_TOKENS = 2**24
FEWEST_SEQS = 1024
# The most attentions, each with a workspace: far more kinds of layers than a model has.
MOST_MADE = 64

HostLengths = tuple[NDArray[np.int32], NDArray[np.int32]]
"""Query tokens and context tokens of each sequence, both [num_seqs] on the host."""


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
    """Write causal attention of a batch over a paged KV cache to `out`.

    - q, out: [num_tokens, num_q_heads, head_dim]; k, v: [num_pages, page_size, num_kv_heads, head_dim].
    - cu_seqlens_q: [num_seqs + 1] int32, start of each sequence's query tokens; seqused_k: [num_seqs] int32, its keys,
      query tokens included.
    - window_size: (keys before the query's own, 0), -1 for no window; softcap: 0 for none.
    - k_descale and v_descale: scales of a cache in 8 bits; q_descale: required for queries in 8 bits, else refused. A
      scale is one number, or [num_seqs, num_kv_heads] with equal rows. Unequal rows are refused on the host. On a GPU
      the first row is used, because a check would wait.
    - The longest lengths, the scratch for split-KV and `use_td` are ignored.

    Lengths on a GPU are copied to the host, which waits for the GPU. They are not copied again if both tensors are
    those of the previous call and PyTorch counted no change. Tensors made in inference mode have no count and are
    copied each time. PyTorch does not count writes of other kernels, so pass a new view in each step. To avoid the
    wait, pass host copies as `cu_seqlens_q_cpu` and `seqused_k_cpu`, or a planned `attention` of this layer. A captured
    graph needs `attention`.

    Each thread has its own attentions and workspaces. Its calls on one device must be on one stream or ordered by
    events, and q's device must be current. Raises `SpecError` for an unsupported argument, which the message names.
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
    sizes = (q.shape[1], k.shape[2], q.shape[2], v.shape[3])
    dtypes = (out.dtype if q.dtype.itemsize == 1 else q.dtype, k.dtype, q.dtype)
    spec = _spec(sizes, dtypes, window_size[0], softcap, softmax_scale, (sinks is not None, alibi_slopes is not None))
    if attention is None:
        lengths = _attentions.lengths(cu_seqlens_q, seqused_k, cu_seqlens_q_cpu, seqused_k_cpu)
        attention = _attentions.planned(spec, k.shape[1], q, lengths)
    elif attention.spec != spec:
        raise SpecError(f"the given attention is of layer {attention.spec.key()}, not of {spec.key()}")
    attention.run(q, k, v, block_table, out, sinks=_float32(sinks), alibi_slopes=_float32(alibi_slopes),
                  q_scale=_scale("q_descale", q_descale, spec), k_scale=_scale("k_descale", k_descale, spec),
                  v_scale=_scale("v_descale", v_descale, spec))  # fmt: skip


def _refuse(asked: dict[str, bool]) -> None:
    for name, is_asked in asked.items():
        if is_asked:
            raise SpecError(f"not supported: unified_attention with this {name!r}")


@functools.lru_cache(maxsize=1024)
def _spec(
    sizes: tuple[int, int, int, int], dtypes: tuple[torch.dtype, torch.dtype, torch.dtype], window: int, softcap: float,
    scale: float, features: tuple[bool, bool],
) -> AttentionSpec:  # fmt: skip
    """Spec of the layer of a call.

    sizes: query heads, KV heads, head size of keys, head size of values. dtypes: model, cache, queries. features:
    sinks, ALiBi.
    """
    num_q_heads, num_kv_heads, head_dim, v_head_dim = sizes
    dtype, kv_dtype, q_dtype = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    has_sinks, has_alibi = features
    return AttentionSpec(
        num_q_heads, num_kv_heads, head_dim, dtype, kv_dtype,
        sliding_window=window + 1 if window >= 0 else None,
        logits_soft_cap=softcap or None,
        has_sinks=has_sinks,
        has_alibi=has_alibi,
        # The caller may have computed the usual scale, which tuned layers have, in another way.
        scale=None if math.isclose(scale, head_dim**-0.5, rel_tol=1e-6) else scale,
        v_head_dim=v_head_dim,
        q_dtype=q_dtype,
    )  # fmt: skip


def _float32(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.float().contiguous()


def _scale(name: str, descale: torch.Tensor | None, spec: AttentionSpec) -> torch.Tensor | None:
    """Expand one scale, or one per sequence and head, to one per KV head; None if no scale applies."""
    if descale is None or not spec.has_fp8_cache:
        return None
    if not isinstance(descale, torch.Tensor):
        raise SpecError(f"a scale must be a tensor, not a {type(descale).__name__}")
    num_kv_heads = spec.num_kv_heads
    of_heads = descale[0] if descale.dim() == 2 and len(descale) else descale
    if of_heads.shape not in ((), (1,), (num_kv_heads,)):
        raise SpecError(f"a scale must be one number, or [num_seqs, {num_kv_heads}], not {list(descale.shape)}")
    if descale.is_cpu and not (descale == of_heads).all():
        raise SpecError(f"not supported: a {name} that differs between sequences")
    return of_heads.float().expand(num_kv_heads).contiguous()


class Attentions(threading.local):
    """The attentions of one thread by kind of layer, each with the lengths that it is planned for.

    The launches of one thread on a device must be on one stream or ordered by events. At most `MOST_MADE` attentions
    are kept.
    """

    def __init__(self, choose: Chooser = from_default_table) -> None:
        self._choose = choose
        self._made: dict[tuple[Any, ...], HybridAttention] = {}
        self._planned_for: dict[HybridAttention, HostLengths] = {}
        self._read: tuple[torch.Tensor, torch.Tensor, tuple[int | None, ...], HostLengths] | None = None

    def lengths(
        self, cu_seqlens_q: torch.Tensor, seqused_k: torch.Tensor, on_host: torch.Tensor | None = None,
        kv_on_host: torch.Tensor | None = None,
    ) -> HostLengths:  # fmt: skip
        """Read the lengths from these tensors, or from their host copies if both are given.

        Raises `BatchError` while a graph is captured, because it would repeat one step's plan.
        """
        if cu_seqlens_q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise BatchError("a captured graph needs a planned attention: pass one as 'attention'")
        if on_host is not None and kv_on_host is not None:
            return host_lengths(on_host, kv_on_host)
        versions = _version(cu_seqlens_q), _version(seqused_k)
        if None in versions:
            return host_lengths(cu_seqlens_q, seqused_k)
        read = self._read
        if read is not None and read[0] is cu_seqlens_q and read[1] is seqused_k and read[2] == versions:
            return read[3]
        lengths = host_lengths(cu_seqlens_q, seqused_k)
        # Keeps the tensors alive, so that no other tensor can get their identity.
        self._read = cu_seqlens_q, seqused_k, versions, lengths
        return lengths

    def planned(self, spec: AttentionSpec, page_size: int, q: torch.Tensor, lengths: HostLengths) -> HybridAttention:
        """Attention of a layer on the device of `q`, planned for `lengths`."""
        max_seqs = max(FEWEST_SEQS, next_power_of_two(len(lengths[0])))
        key = (spec, page_size, max_seqs, q.device)
        attention = self._made.get(key)
        if attention is None:
            attention = self._make(key, q)
        planned_for = self._planned_for.get(attention)
        if planned_for is None or not all(map(np.array_equal, planned_for, lengths)):
            # Removed first, so that a plan that fails leaves no entry.
            self._planned_for.pop(attention, None)
            attention.plan(*lengths)
            self._planned_for[attention] = lengths
        return attention

    def _make(self, key: tuple[Any, ...], q: torch.Tensor) -> HybridAttention:
        spec, page_size, max_seqs, _ = key
        # An attention uses the current device, which may differ from that of q.
        with torch.cuda.device_of(q):
            attention = HybridAttention(spec, page_size, MOST_TOKENS, max_seqs, choose=self._choose)
        if len(self._made) >= MOST_MADE:
            self._planned_for.pop(self._made.pop(next(iter(self._made))), None)
        self._made[key] = attention
        return attention


def host_lengths(cu_seqlens_q: torch.Tensor, seqused_k: torch.Tensor) -> HostLengths:
    """Read the lengths from tensors [num_seqs + 1] and [num_seqs]; waits for their GPU."""
    starts, kv_lens = cu_seqlens_q.cpu().numpy(), seqused_k.cpu().numpy()
    if len(starts) <= len(kv_lens):
        raise BatchError("cu_seqlens_q must have one element more than seqused_k, not "
                         f"{len(starts)} and {len(kv_lens)}")
    query_lens = starts[1 : len(kv_lens) + 1] - starts[: len(kv_lens)]
    return query_lens, kv_lens - query_lens


def _version(tensor: torch.Tensor) -> int | None:
    """PyTorch's count of changes of `tensor`; None without a count, and on the host, where reading is fast."""
    return None if tensor.is_inference() or tensor.is_cpu else tensor._version


_attentions = Attentions()
