"""flash-attn 3 as vLLM ships it for Hopper, called as `vllm_flash_attn` calls it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from attention_tuner.kernel_templates.launch.launcher import Tensors
from attention_tuner.kernel_templates.task import Task

from .contender import Contender, Loaded, MissingError, Peer, Places, reason_of
from .vllm_triton import version_of

LIBRARY = Path("vllm", "vllm_flash_attn", "_vllm_fa3_C.abi3.so")


class FlashAttention3(Contender):
    """`fwd` of `ops`, with scheduler metadata made once per step. With `num_splits` 0 it chooses the splits itself."""

    def __init__(self, task: Task, ops: Any, num_splits: int) -> None:
        super().__init__(task)
        self._ops = ops
        self._num_splits = num_splits
        self._metadata: torch.Tensor | None = None

    def prepare(self, tensors: Tensors) -> None:
        """Make the scheduler metadata, which depends only on lengths."""
        if self._metadata is None:
            spec = self.spec
            self._metadata = self._ops.get_scheduler_metadata(
                self.batch.num_seqs, self.max_query, self.max_kv, spec.num_q_heads, spec.num_kv_heads, spec.head_dim,
                spec.head_dim, tensors.q.dtype, tensors.kv_lens, tensors.query_start_loc,
                None, None, None, None,  # cu_seqlens_k, cu_seqlens_k_new, seqused_q, leftpad_k
                self.task.page_size, 0, True, -1, -1,  # max_seqlen_k_new, is_causal, window_size_left and _right
                False, self._num_splits, None, 0,  # has_softcap, num_splits, pack_gqa, sm_margin
            )  # fmt: skip

    def run(self, tensors: Tensors) -> Any:
        """Launch the kernel, and the reduction if KV is split."""
        return self._ops.fwd(
            tensors.q, tensors.k_cache, tensors.v_cache,
            None, None, None,  # k_new, v_new, q_v
            tensors.out, tensors.query_start_loc,
            None, None, None,  # cu_seqlens_k, cu_seqlens_k_new, seqused_q
            tensors.kv_lens, self.max_query, self.max_kv, tensors.block_table,
            None, None, None, None, None,  # kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary
            None, None, None,  # q_descale, k_descale, v_descale
            self.spec.softmax_scale, True, -1, -1, 0.0, True,  # is_causal, window_size, softcap, rotary_interleaved
            self._metadata, self._num_splits,
            None, 0, None, 1, 0, None,  # pack_gqa, sm_margin, s_aux, cp_world_size, cp_rank, cp_tot_seqused_k
        )  # fmt: skip


def _load(places: Places, num_splits: int) -> Loaded:
    if places.vllm is None:
        raise MissingError(f"no folder with {LIBRARY} was named (--vllm)")
    path = places.vllm / LIBRARY
    if not path.is_file():
        raise MissingError(f"there is no {path}")
    try:
        torch.ops.load_library(path)  # pyright: ignore[reportUnknownMemberType]
    except OSError as error:
        raise MissingError(reason_of(error.__cause__ or error)) from error
    make = functools.partial(FlashAttention3, ops=torch.ops._vllm_fa3_C, num_splits=num_splits)
    return Loaded(make, f"vLLM {version_of(places.vllm)}")


_GIVEN = "paged cache; scheduler metadata made once per step is not timed; "
PEERS = (
    Peer("flash_attn_3", _GIVEN + "splits automatic", functools.partial(_load, num_splits=0)),
    Peer("flash_attn_3_unsplit", _GIVEN + "num_splits 1", functools.partial(_load, num_splits=1)),
)
