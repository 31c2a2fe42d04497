"""Launches template `unified`."""

# pyright: basic
from __future__ import annotations

from ..batch import IntArray
from ..launch.plan import equal_segments
from ..launch.tiles import Tiles
from ..launch.work_list import KernelConstants, WorkListLauncher
from .unified import bodies


class UnifiedLauncher(WorkListLauncher):
    """All rows in tiles of one shape, every sequence in the same number of segments."""

    def make_constants(self) -> KernelConstants:
        """One body, whatever the sequence."""
        (body,) = bodies(self.variant)
        return KernelConstants(body, body, self.variant.number("num_warps"), self.variant.number("num_stages"))

    def segments(self, tiles: Tiles) -> IntArray:
        """Every tile's keys in `num_segments` equal ranges."""
        return equal_segments(tiles, self.variant.number("num_segments"))
