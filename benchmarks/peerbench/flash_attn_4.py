"""flash-attn 4, written in the CuTe DSL."""

# pyright: basic
from __future__ import annotations

import functools
import importlib.metadata
from typing import Any

import torch

from attention_tuner.kernel_templates.launch.launcher import Tensors
from attention_tuner.kernel_templates.task import Task

from .contender import Contender, Loaded, MissingError, Peer, Places, reason_of


class FlashAttention4(Contender):
    """`flash_attn_varlen_func` with a page table. It takes no output tensor and does not split KV on Hopper."""

    def __init__(self, task: Task, flash_attn_varlen_func: Any) -> None:
        super().__init__(task)
        self._function = flash_attn_varlen_func

    def run(self, tensors: Tensors) -> Any:
        """Launch the kernel."""
        return self._function(
            tensors.q, tensors.k_cache, tensors.v_cache, cu_seqlens_q=tensors.query_start_loc,
            max_seqlen_q=self.max_query, max_seqlen_k=self.max_kv, seqused_k=tensors.kv_lens,
            page_table=tensors.block_table, softmax_scale=self.spec.softmax_scale, causal=True, num_splits=1,
        )  # fmt: skip

    def output(self, tensors: Tensors, returned: Any) -> torch.Tensor:
        """The returned output, without the log-sum-exp."""
        return returned[0] if isinstance(returned, tuple) else returned


def _load(places: Places) -> Loaded:
    try:
        from flash_attn.cute import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingError(reason_of(error)) from error
    return Loaded(functools.partial(FlashAttention4, flash_attn_varlen_func=flash_attn_varlen_func),
                  importlib.metadata.version("flash-attn-4"))


PEERS = (Peer("flash_attn_4", "paged cache; num_splits 1, pack_gqa automatic", _load),)
