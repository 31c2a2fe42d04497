"""FlashInfer: its one kernel for mixed batches, its paged prefill with two backends, and its decode."""

# pyright: basic
from __future__ import annotations

import functools
import importlib.metadata
import math
from collections.abc import Callable
from typing import Any

import torch

from attention_tuner.kernel_templates.launch.launcher import Tensors
from attention_tuner.kernel_templates.task import Task

from .contender import Contender, Loaded, MissingError, Peer, Places, RefusedError, query_starts, reason_of, starts_of

WORKSPACE_BYTES = 384 << 20


class FlashInfer(Contender):
    """A wrapper that plans the batch once per step."""

    # The wrapper's attribute with the pages to read.
    indices = "_paged_kv_indices_buf"

    def __init__(self, task: Task, flashinfer: Any) -> None:
        super().__init__(task)
        self._flashinfer = flashinfer
        self._pages = tuple(math.ceil(kv_len / task.page_size) for kv_len in task.batch.kv_lens)
        self._wrapper: Any = None

    def prepare(self, tensors: Tensors) -> None:
        """List the pages, and plan once: a plan depends only on lengths and serves all sets of tensors."""
        rows = (tensors.block_table[row, :count] for row, count in enumerate(self._pages))
        indices = self.made[id(tensors)] = torch.cat(list(rows))
        if self._wrapper is None:
            self._wrapper = self.planned(indices, tensors)

    def planned(self, indices: torch.Tensor, tensors: Tensors) -> Any:
        """The wrapper, planned with the pages `indices`."""
        raise NotImplementedError

    def run(self, tensors: Tensors) -> Any:
        """Launch the kernel, and the reduction if KV is split."""
        setattr(self._wrapper, self.indices, self.made[id(tensors)])
        return self._wrapper.run(tensors.q, (tensors.k_cache, tensors.v_cache), out=tensors.out)

    def page_starts(self) -> torch.Tensor:
        """The start of each sequence's pages in the list, on the host."""
        return starts_of(self._pages, torch.device("cpu"))

    def last_page_lens(self) -> torch.Tensor:
        """The number of keys in each sequence's last page, on the host."""
        return torch.tensor([(kv_len - 1) % self.task.page_size + 1 for kv_len in self.batch.kv_lens],
                            dtype=torch.int32)

    def workspace(self, tensors: Tensors) -> torch.Tensor:
        """Memory for partial results."""
        return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=tensors.q.device)


class FlashInferAttention(FlashInfer):
    """`BatchAttention`."""

    indices = "_kv_indices"

    def planned(self, indices: torch.Tensor, tensors: Tensors) -> Any:
        """The wrapper, planned."""
        spec, device = self.spec, tensors.q.device
        wrapper = self._flashinfer.BatchAttention(kv_layout="NHD", device=str(device))
        wrapper.plan(
            query_starts(self.task).to(device), self.page_starts().to(device), indices, tensors.kv_lens,
            spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.head_dim, self.task.page_size, causal=True,
            sm_scale=spec.softmax_scale, q_data_type=tensors.q.dtype, kv_data_type=tensors.k_cache.dtype,
        )  # fmt: skip
        return wrapper


class FlashInferPrefill(FlashInfer):
    """`BatchPrefillWithPagedKVCacheWrapper`."""

    def __init__(self, task: Task, flashinfer: Any, backend: str) -> None:
        super().__init__(task, flashinfer)
        self._backend = backend

    def planned(self, indices: torch.Tensor, tensors: Tensors) -> Any:
        """The wrapper, planned."""
        spec = self.spec
        wrapper = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self.workspace(tensors), kv_layout="NHD", backend=self._backend
        )
        wrapper.plan(
            query_starts(self.task), self.page_starts(), indices, self.last_page_lens(), spec.num_q_heads,
            spec.num_kv_heads, spec.head_dim, self.task.page_size, causal=True, sm_scale=spec.softmax_scale,
            q_data_type=tensors.q.dtype, kv_data_type=tensors.k_cache.dtype,
        )  # fmt: skip
        return wrapper


class FlashInferDecode(FlashInfer):
    """`BatchDecodeWithPagedKVCacheWrapper`."""

    def __init__(self, task: Task, flashinfer: Any, use_tensor_cores: bool) -> None:
        super().__init__(task, flashinfer)
        if self.max_query > 1:
            raise RefusedError("it decodes one query token a sequence")
        self._use_tensor_cores = use_tensor_cores

    def planned(self, indices: torch.Tensor, tensors: Tensors) -> Any:
        """The wrapper, planned."""
        spec = self.spec
        wrapper = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self.workspace(tensors), kv_layout="NHD", use_tensor_cores=self._use_tensor_cores
        )
        wrapper.plan(
            self.page_starts(), indices, self.last_page_lens(), spec.num_q_heads, spec.num_kv_heads, spec.head_dim,
            self.task.page_size, sm_scale=spec.softmax_scale, q_data_type=tensors.q.dtype,
            kv_data_type=tensors.k_cache.dtype,
        )  # fmt: skip
        return wrapper


def _load(places: Places, make: Callable[..., Contender]) -> Loaded:
    # FlashInfer loads its modules when it plans, so a missing module is a failure on that batch.
    try:
        import flashinfer  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingError(reason_of(error)) from error
    return Loaded(functools.partial(make, flashinfer=flashinfer), importlib.metadata.version("flashinfer-python"))


_GIVEN = "paged cache; its plan, made once per step, is not timed"
_MAKERS: dict[str, Callable[..., Contender]] = {
    "flashinfer_attention": FlashInferAttention,
    "flashinfer_fa2": functools.partial(FlashInferPrefill, backend="fa2"),
    "flashinfer_fa3": functools.partial(FlashInferPrefill, backend="fa3"),
    "flashinfer_decode": functools.partial(FlashInferDecode, use_tensor_cores=False),
    "flashinfer_decode_tc": functools.partial(FlashInferDecode, use_tensor_cores=True),
}
PEERS = tuple(Peer(name, _GIVEN, functools.partial(_load, make=make)) for name, make in _MAKERS.items())
