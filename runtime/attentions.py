"""Attentions for callers that plan nothing: made for each layer that comes, planned when its lengths change."""

# pyright: basic
from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..kernel_templates.errors import BatchError
from ..kernel_templates.limits import next_power_of_two
from ..kernel_templates.spec import AttentionSpec
from .hybrid_attention import HybridAttention
from .launchers import Chooser, from_default_table

# Far beyond any engine's step; what is allocated depends on the steps that come.
MOST_TOKENS = 2**24
FEWEST_SEQS = 1024
# Far more kinds of layers than a model has; each holds a workspace.
MOST_MADE = 64


class HostLengths(NamedTuple):
    """The query tokens of each sequence, and those in the cache before them."""

    query_lens: NDArray[np.int32]
    context_lens: NDArray[np.int32]

    @classmethod
    def read(cls, cu_seqlens_q: torch.Tensor, seqused_k: torch.Tensor) -> HostLengths:
        """Those of tensors [num_seqs + 1] and [num_seqs] on any device, which is waited for."""
        starts, kv_lens = cu_seqlens_q.cpu().numpy(), seqused_k.cpu().numpy()
        if len(starts) <= len(kv_lens):
            raise BatchError(f"cu_seqlens_q must have a number more than seqused_k, not {len(starts)} and "
                             f"{len(kv_lens)}")
        query_lens = starts[1 : len(kv_lens) + 1] - starts[: len(kv_lens)]
        return cls(query_lens, kv_lens - query_lens)

    def equals(self, other: HostLengths | None) -> bool:
        """Whether `other` are the same lengths."""
        return other is not None and all(map(np.array_equal, self, other))


class Attentions(threading.local):
    """The attentions that calls need, made as they come, and what they are planned for.

    Each thread has its own, as if each had made this object. What one thread launches on a device must be on one
    stream, or ordered by events as if it were, as `HybridAttention` says. At most `MOST_MADE` are held at once.
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
        """The lengths in these tensors, or in their copies on the host where there are both.

        Raises `BatchError` while a graph is captured, which would repeat one step's plan.
        """
        if cu_seqlens_q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise BatchError("a captured graph needs a planned attention: pass one as 'attention'")
        if on_host is not None and kv_on_host is not None:
            return HostLengths.read(on_host, kv_on_host)
        versions = _version(cu_seqlens_q), _version(seqused_k)
        if None in versions:
            return HostLengths.read(cu_seqlens_q, seqused_k)
        # Held, so that no other tensor takes their place.
        read = self._read
        if read is not None and read[0] is cu_seqlens_q and read[1] is seqused_k and read[2] == versions:
            return read[3]
        lengths = HostLengths.read(cu_seqlens_q, seqused_k)
        self._read = cu_seqlens_q, seqused_k, versions, lengths
        return lengths

    def planned(self, spec: AttentionSpec, page_size: int, q: torch.Tensor, lengths: HostLengths) -> HybridAttention:
        """The attention of a layer where `q` is, planned for `lengths`."""
        max_seqs = max(FEWEST_SEQS, next_power_of_two(len(lengths.query_lens)))
        key = (spec, page_size, max_seqs, q.device)
        attention = self._made.get(key)
        if attention is None:
            attention = self._make(key, q)
        if not lengths.equals(self._planned_for.get(attention)):
            # A plan that fails leaves none behind.
            self._planned_for.pop(attention, None)
            attention.plan(*lengths)
            self._planned_for[attention] = lengths
        return attention

    def _make(self, key: tuple[Any, ...], q: torch.Tensor) -> HybridAttention:
        spec, page_size, max_seqs, _ = key
        # Whichever device is the current one.
        with torch.cuda.device_of(q):
            attention = HybridAttention(spec, page_size, MOST_TOKENS, max_seqs, choose=self._choose)
        if len(self._made) >= MOST_MADE:
            self._planned_for.pop(self._made.pop(next(iter(self._made))), None)
        self._made[key] = attention
        return attention


def _version(tensor: torch.Tensor) -> int | None:
    """How often PyTorch has changed `tensor`; None where it does not count, and on the host, where reading is quick."""
    return None if tensor.is_inference() or tensor.is_cpu else tensor._version
