"""Launches the kernel over a work list: what the templates `unified` and `fused` share."""

# pyright: basic
from __future__ import annotations

import abc
import hashlib
import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from triton import knobs

from .attention import ITEM_FIELDS, attention_kernel
from .batch import Batch
from .combine import ENTRY_FIELDS, combine_kernel
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

    _device: torch.device | None = None
    _room: tuple[int, ...] = (0, 0, 0)
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
        """Write the work list of `batch` to `device` and make room for its partial results.

        Planning anew for a batch that the room is enough for changes no address and, when `padded`, no grid.
        """
        work = self.work_list(batch)
        needed = (len(work.items), len(work.entries), work.partial_rows)
        if self._device != torch.device(device) or any(map(operator.gt, needed, self._room)):
            self._make_room(needed, device)
        counts = np.array([work.num_long, *needed[:2]], dtype=np.int32)
        lists = ((self._items, work.items), (self._entries, work.entries), (self._counts, counts))
        for buffer, array in lists:
            buffer[: len(array)].copy_(torch.from_numpy(array), non_blocking=True)
        self._num_items, self._num_entries = self._room[:2] if self.padded else needed[:2]

    def _make_room(self, needed: tuple[int, int, int], device: torch.device | str) -> None:
        """Allocate what the kernels read and write, for `needed` items, entries and rows of partial results."""
        self._device = torch.device(device)
        num_items, num_entries, partial_rows = self._room = tuple(map(self.capacity, needed))
        self._items = torch.empty(num_items, ITEM_FIELDS, dtype=torch.int32, device=device)
        self._entries = torch.empty(num_entries, ENTRY_FIELDS, dtype=torch.int32, device=device)
        self._counts = torch.empty(3, dtype=torch.int32, device=device)
        rows = (self.spec.num_kv_heads, max(1, partial_rows))
        self._partial = (
            torch.empty(*rows, self.spec.head_dim, dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
        )

    def workspaces(self) -> tuple[torch.Tensor, ...]:
        """The partial outputs [kv_heads, rows, head_dim] and their maxima and sums [kv_heads, rows], all float32."""
        return self._partial

    def launch_key(self) -> str:
        """A hash of the grid and the work list, read back from the device, and of the layout of partial results."""
        counts = self._counts.tolist()
        digest = hashlib.sha256(repr((self._num_items, self._num_entries, self._room[2], counts)).encode())
        for buffer, count in zip((self._items, self._entries), counts[1:], strict=True):
            digest.update(buffer[:count].cpu().numpy().tobytes())
        return digest.hexdigest()

    def run(self, tensors: Tensors) -> None:
        """Launch the planned work list, then the reduction if there is room for any sequence that is split."""
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
