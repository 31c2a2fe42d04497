"""Launches template `unified`."""

# pyright: basic
from __future__ import annotations

from .batch import Batch
from .lengths import Lengths
from .plan import WorkList, equal_segments, work_list
from .unified import bodies
from .work_list_launch import KernelConstants, WorkListLauncher


class UnifiedLauncher(WorkListLauncher):
    """All rows in tiles of one shape, every sequence in the same number of segments."""

    def make_constants(self) -> KernelConstants:
        """One body, whatever the sequence."""
        (body,) = bodies(self.variant)
        return KernelConstants(body, body, self.variant.number("num_warps"), self.variant.number("num_stages"))

    def work_list(self, batch: Batch | Lengths) -> WorkList:
        """Every tile's keys in `num_segments` equal ranges."""
        tiles = self.tiles(batch)
        return work_list(tiles, equal_segments(tiles, self.variant.number("num_segments")), self.combine_rows)
