"""Launches template `fused`."""

# pyright: basic
from __future__ import annotations

from .batch import Batch
from .fused import bodies
from .plan import WorkList, balanced_segments, cut_tiles, equal_segments, work_list
from .work_list_launch import COMBINE_ROWS, KernelConstants, WorkListLauncher


class FusedLauncher(WorkListLauncher):
    """Long and short sequences in tiles of their own shapes, their keys in ranges of about equal cost."""

    def make_constants(self) -> KernelConstants:
        """The two bodies, which are one when their shapes agree."""
        long, short = bodies(self.variant)
        return KernelConstants(
            long,
            short,
            num_warps=self.variant.number("num_warps"),
            num_stages=self.variant.number("num_stages"),
            tma=self.variant.text("kv_load") == "tma",
            heads_first=self.variant.text("order") == "heads",
        )

    def work_list(self, batch: Batch) -> WorkList:
        """Key ranges for `waves` programs a multiprocessor."""
        tiles = cut_tiles(batch, self.spec.group_size, self.constants.long, self.constants.short)
        waves = self.variant.number("waves")
        if waves == 0:
            return work_list(tiles, equal_segments(tiles, 1), COMBINE_ROWS)
        num_items = waves * self.gpu.num_sms / self.spec.num_kv_heads
        segments = balanced_segments(tiles, num_items, self.variant.number("long_weight"))
        return work_list(tiles, segments, COMBINE_ROWS)
