"""The launcher of template `gluon_hopper`."""

# pyright: basic
from __future__ import annotations

import math
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..batch import IntArray
from ..errors import VariantError
from ..launch.arguments import CacheView, RowStrides
from ..launch.launcher import Tensors
from ..launch.plan import most_rounds, whole_rounds
from ..launch.room import Limit, Room
from ..launch.tiles import Tiles
from ..launch.work_list import KernelConstants
from ..triton_family.arithmetic import LOG2_E
from ..triton_family.launchers import BalancedLauncher
from .kernel import gluon_attention_kernel
from .template import bodies

# With up to this many waves, one item more than the programs that run at once costs a good part of the time.
FEW_WAVES = 2


class GluonHopperLauncher(BalancedLauncher):
    """Launches `gluon_hopper`: each of the two consumers of a short sequence's item writes its own partial result."""

    short_partials = 2

    def make_constants(self) -> KernelConstants:
        """The bodies. Warps are those of the first consumer; the kernel adds those of its other workers."""
        v = self.variant
        return KernelConstants(
            *bodies(v),
            num_warps=4,
            num_stages=v.number("num_stages"),
            tma=True,
            heads_first=v.text("order") == "heads",
            partials=getattr(torch, v.text("partials")),
            last_merges=v.text("reduction") == "last_program",
            schedule=v.text("schedule"),
        )

    def segments(self, tiles: Tiles) -> IntArray:
        """Key ranges of about equal cost: whole rounds of them for few waves."""
        waves = self.variant.number("waves")
        if not 0 < waves <= FEW_WAVES:
            return super().segments(tiles)
        return whole_rounds(tiles, waves, self._per_round, self.variant.number("long_weight"))

    def room(self, limit: Limit) -> Room:
        """See `WorkListLauncher.room`; there may be more rounds than `waves`."""
        waves = self.variant.number("waves")
        if not 0 < waves <= FEW_WAVES:
            return super().room(limit)
        return limit.balanced(most_rounds(limit.tiles, waves, self._per_round) * self._per_round)

    @property
    def _per_round(self) -> float:
        """Items of a KV head that run at once."""
        return self.gpu.num_sms / self.spec.num_kv_heads

    @property
    def programs(self) -> tuple[int, ...]:
        """One for each unit of work; unless the grid has all units, at most one for each SM."""
        num_units = self._num_items * self.spec.num_kv_heads
        return (num_units if self.variant.text("dispatch") == "grid" else min(num_units, self.gpu.num_sms),)

    def _make_room(self, room: Room, device: torch.device | str) -> None:
        super()._make_room(room, device)
        # The number of units drawn, and of programs done. Each launch leaves zeros behind.
        self._drawn = torch.zeros(2, dtype=torch.int32, device=device)

    def start_attention(self, tensors: Tensors) -> None:
        """Start the grid of warp-specialised programs."""
        t, c, spec = tensors, self.constants, self.spec
        if t.lse is not None:
            raise VariantError("gluon_hopper writes no log-sum-exp; other templates do")
        chunk = math.gcd(self.variant.page_size, c.long.block_n)
        k_desc, *view = rows_view(t.k_cache, chunk)
        v_desc, *v_view = rows_view(t.v_cache, chunk)
        if view != v_view:
            raise VariantError(
                f"gluon_hopper cannot read K with strides {t.k_cache.stride()} and V with others, {t.v_cache.stride()}"
            )
        arguments = (
            self._work, self._drawn, spec.num_kv_heads, t.q, k_desc, v_desc, t.out, t.block_table, self._partials,
            self._partials.max.stride(0), spec.softmax_scale * LOG2_E.value,
            RowStrides(*t.q.stride()[:2], *t.out.stride()[:2]), t.block_table.stride(0), CacheView(*view),
        )  # fmt: skip
        constants: dict[str, Any] = {
            "GROUP": spec.group_size, "HEAD_DIM": spec.head_dim, "PAGE_SIZE": self.variant.page_size, "CHUNK": chunk,
            "BLOCK_N": c.long.block_n, "STAGES": c.num_stages, "REGISTERS": self.variant.number("registers"),
            "HEADS_FIRST": c.heads_first, "DYNAMIC": self.variant.text("dispatch") == "dynamic",
            "LAST_MERGES": c.last_merges, "PDL": self.overlaps_reduction, "num_warps": c.num_warps,
        }  # fmt: skip
        self.start(gluon_attention_kernel, self.programs, arguments, constants)


def rows_view(cache: torch.Tensor, chunk: int) -> tuple[Any, int, int, int]:
    """A TMA descriptor of `cache` [pages, slots, heads, dim] as a matrix, and the steps between pages and heads in it.

    A row has the length of a slot's stride; a load takes `chunk` rows of `dim` columns. The steps are rows from page to
    page, rows from head to head, and columns from head to head. Raises `VariantError` for strides that form no such
    matrix.
    """
    pages, slots, heads, dim = cache.shape
    page, slot, head, _ = cache.stride()
    is_in_row = head < slot
    if page % slot or (head % slot and not is_in_row):
        raise VariantError(
            f"gluon_hopper cannot read a cache with strides {cache.stride()}: those of pages and heads "
            "must be multiples of a slot's, or all heads lie within a slot's"
        )
    rows_per_head, columns_per_head = (0, head) if is_in_row else (head // slot, 0)
    shape = [(pages - 1) * (page // slot) + (heads - 1) * rows_per_head + slots, dim + (heads - 1) * columns_per_head]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    descriptor = TensorDescriptor(cache, shape, [slot, 1], [chunk, dim], layout)
    return descriptor, page // slot, rows_per_head, columns_per_head
