"""How the templates that balance their items launch: tiles of two shapes, keys in ranges of about equal cost."""

# pyright: basic
from __future__ import annotations

import torch

from ..batch import IntArray
from ..launch.plan import balanced_segments, equal_segments
from ..launch.tiles import Tiles
from ..launch.work_list import KernelConstants, WorkListLauncher


class BalancedLauncher(WorkListLauncher):
    """Long and short sequences in tiles of their own shapes, their keys in ranges of about equal cost."""

    def make_constants(self) -> KernelConstants:
        """The two bodies, which are one when their shapes agree."""
        partials, reduction = self.variant.text("partials"), self.variant.text("reduction")
        return KernelConstants.of_two_bodies(
            self.variant, partials=getattr(torch, partials), last_merges=reduction == "last_program"
        )

    def segments(self, tiles: Tiles) -> IntArray:
        """Key ranges for `waves` programs a multiprocessor."""
        if not self.num_balanced:
            return equal_segments(tiles, 1)
        return balanced_segments(tiles, self.num_balanced, self.variant.number("long_weight"))
