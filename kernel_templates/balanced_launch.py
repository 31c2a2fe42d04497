"""How the templates that balance their items launch: tiles of two shapes, keys in ranges of about equal cost."""

# pyright: basic
from __future__ import annotations

import torch

from .batch import Batch
from .limits import Body
from .plan import WorkList, balanced_segments, equal_segments, work_list
from .work_list_launch import KernelConstants, WorkListLauncher


class BalancedLauncher(WorkListLauncher):
    """Long and short sequences in tiles of their own shapes, their keys in ranges of about equal cost."""

    def make_constants(self) -> KernelConstants:
        """The two bodies, which are one when their shapes agree."""
        v = self.variant
        return KernelConstants(
            Body(v.number("block_m"), v.number("block_n")),
            Body(v.number("decode_block_m"), v.number("decode_block_n")),
            num_warps=v.number("num_warps"),
            num_stages=v.number("num_stages"),
            tma=v.text("kv_load") == "tma",
            heads_first=v.text("order") == "heads",
            partials=getattr(torch, v.text("partials")),
            last_merges=v.text("reduction") == "last_program",
        )

    def work_list(self, batch: Batch) -> WorkList:
        """Key ranges for `waves` programs a multiprocessor."""
        tiles = self.tiles(batch)
        segments = equal_segments(tiles, 1)
        if self.num_balanced:
            segments = balanced_segments(tiles, self.num_balanced, self.variant.number("long_weight"))
        return work_list(tiles, segments, self.combine_rows, self.variant.text("schedule"), self.short_partials)
