"""How the templates that balance their items launch: tiles of two shapes, keys in ranges of about equal cost."""

# pyright: basic
from __future__ import annotations

import torch

from .batch import Batch
from .lengths import Lengths
from .plan import WorkList, balanced_segments, equal_segments, work_list
from .work_list_launch import KernelConstants, WorkListLauncher


class BalancedLauncher(WorkListLauncher):
    """Long and short sequences in tiles of their own shapes, their keys in ranges of about equal cost."""

    def make_constants(self) -> KernelConstants:
        """The two bodies, which are one when their shapes agree."""
        partials, reduction = self.variant.text("partials"), self.variant.text("reduction")
        return KernelConstants.of_two_bodies(
            self.variant, partials=getattr(torch, partials), last_merges=reduction == "last_program"
        )

    def work_list(self, batch: Batch | Lengths) -> WorkList:
        """Key ranges for `waves` programs a multiprocessor."""
        tiles = self.tiles(batch)
        segments = equal_segments(tiles, 1)
        if self.num_balanced:
            segments = balanced_segments(tiles, self.num_balanced, self.variant.number("long_weight"))
        return work_list(tiles, segments, self.combine_rows, self.variant.text("schedule"), self.short_partials)
