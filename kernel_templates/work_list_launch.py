"""Launches the kernel over a work list: what the templates `unified` and `fused` share."""

# pyright: basic
from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from triton import knobs

from .attention import attention_kernel
from .batch import Batch
from .combine import combine_kernel
from .gpu import Gpu
from .launch import LOG2_E, Launcher, Tensors
from .limits import Body
from .plan import WorkList
from .spec import AttentionSpec
from .variant import Variant

INTERPRETED = bool(knobs.runtime.interpret)
# Rows that one program of the reduction merges: few, so that there are many programs, but for the interpreter, where
# each program costs milliseconds.
COMBINE_ROWS = 16 if INTERPRETED else 4
COMBINE_SEGMENTS = 8
COMBINE_WARPS = 4


@dataclass(frozen=True, slots=True)
class KernelConstants:
    """What the attention kernel is compiled with: the bodies for long and for short sequences, and how."""

    long: Body
    short: Body
    num_warps: int
    num_stages: int
    tma: bool = False
    heads_first: bool = False


class WorkListLauncher(Launcher):
    """A launcher that plans a work list on the host. A template says its bodies and how it cuts the batch."""

    _items: torch.Tensor
    _entries: torch.Tensor
    _counts: torch.Tensor
    _partial: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    _num_items = 0
    _num_entries = 0

    def __init__(self, variant: Variant, spec: AttentionSpec, gpu: Gpu) -> None:
        super().__init__(variant, spec, gpu)
        self.constants = self.make_constants()

    @abc.abstractmethod
    def make_constants(self) -> KernelConstants:
        """The constants of the kernel for this variant."""

    @abc.abstractmethod
    def work_list(self, batch: Batch) -> WorkList:
        """The work list of `batch`."""

    def plan(self, batch: Batch, device: torch.device | str) -> None:
        """Write the work list of `batch` to `device` and make room for its partial results."""
        work = self.work_list(batch)
        counts = np.array([work.num_long, len(work.items), len(work.entries)], dtype=np.int32)
        self._items, self._entries, self._counts = (
            torch.from_numpy(array).to(device, non_blocking=True) for array in (work.items, work.entries, counts)
        )
        self._num_items, self._num_entries = len(work.items), len(work.entries)
        rows = (self.spec.num_kv_heads, max(1, work.partial_rows))
        self._partial = (
            torch.empty(*rows, self.spec.head_dim, dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
        )

    def workspaces(self) -> tuple[torch.Tensor, ...]:
        """The partial outputs [kv_heads, rows, head_dim] and their maxima and sums [kv_heads, rows], all float32."""
        return self._partial

    def run(self, tensors: Tensors) -> None:
        """Launch the planned work list, then the reduction if any sequence was split."""
        self._start_attention(tensors)
        if self._num_entries or self.compile_only:
            self._start_combine(tensors.out)

    @property
    def _widen(self) -> bool:
        return INTERPRETED and self.spec.dtype == "bfloat16"

    def _start_attention(self, tensors: Tensors) -> None:
        t, c, spec = tensors, self.constants, self.spec
        grid = (self._num_items, spec.num_kv_heads)
        arguments = (
            self._items, self._counts, t.q, t.k_cache, t.v_cache, *self._descriptors(t), t.out, t.block_table,
            *self._partial, self._partial[1].stride(0), spec.softmax_scale * LOG2_E,
            *t.q.stride()[:2], *t.out.stride()[:2], *t.k_cache.stride()[:3], *t.v_cache.stride()[:3],
            t.block_table.stride(0),
        )  # fmt: skip
        constants: dict[str, Any] = {
            "GROUP": spec.group_size, "HEAD_DIM": spec.head_dim, "PAGE_SIZE": self.variant.page_size,
            "LONG_M": c.long.block_m, "LONG_N": c.long.block_n, "SHORT_M": c.short.block_m, "SHORT_N": c.short.block_n,
            "STAGES": c.num_stages, "TMA": c.tma, "HEADS_FIRST": c.heads_first,
            "WIDEN": self._widen, "num_warps": c.num_warps, "num_stages": c.num_stages,
        }  # fmt: skip
        self.start(attention_kernel, grid[::-1] if c.heads_first else grid, arguments, constants)

    def _start_combine(self, out: torch.Tensor) -> None:
        spec = self.spec
        arguments = (self._entries, self._counts, out, *self._partial, self._partial[1].stride(0), *out.stride()[:2])
        constants = {"GROUP": spec.group_size, "HEAD_DIM": spec.head_dim, "ROWS": COMBINE_ROWS,
                     "SEGMENTS": COMBINE_SEGMENTS, "WIDEN": self._widen, "num_warps": COMBINE_WARPS}  # fmt: skip
        self.start(combine_kernel, (self._num_entries, spec.num_kv_heads), arguments, constants)

    def _descriptors(self, tensors: Tensors) -> tuple[Any, ...]:
        """TMA descriptors of K and V for the long and the short body, or four times None."""
        if not self.constants.tma:
            return (None,) * 4
        from triton.tools.tensor_descriptor import TensorDescriptor

        def describe(cache: torch.Tensor, block_n: int) -> Any:
            # Heads before slots, so that the unit dimensions lead and the load is a plain two-dimensional tile.
            view = cache.permute(0, 2, 1, 3)
            block = [1, 1, block_n, self.spec.head_dim]
            return TensorDescriptor(view, list(view.shape), list(view.stride()), block)

        caches = (tensors.k_cache, tensors.v_cache)
        widths = (self.constants.long.block_n, self.constants.short.block_n)
        return tuple(describe(cache, width) for width in widths for cache in caches)
