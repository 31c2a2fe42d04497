"""Launches template `two_launch`."""

# pyright: basic
from __future__ import annotations

import dataclasses

import torch

from ..batch import Batch, IntArray, Lengths
from ..launch.launcher import Tensors
from ..launch.plan import balanced_by_part, equal_segments
from ..launch.tiles import Tiles
from ..launch.work_list import KernelConstants, WorkListLauncher


class TwoLaunchLauncher(WorkListLauncher):
    """The items of long sequences in one launch, those of short ones in another, then one reduction."""

    # The grids of the two launches. Both are as wide as the room where it is reserved.
    _grids: tuple[int, int] = (0, 0)

    def make_constants(self) -> KernelConstants:
        """The two bodies, with the warps of the launch for long sequences."""
        return KernelConstants.of_two_bodies(self.variant)

    @property
    def num_balanced(self) -> float:
        """As many items for each launch as fill the GPU."""
        return 2 * super().num_balanced

    def segments(self, tiles: Tiles) -> IntArray:
        """Key ranges for `waves` programs a multiprocessor in each launch."""
        return balanced_by_part(tiles, self.num_balanced / 2) if self.num_balanced else equal_segments(tiles, 1)

    def plan(self, batch: Batch | Lengths, device: torch.device | str) -> None:
        """See `WorkListLauncher.plan`."""
        super().plan(batch, device)
        # Grids that are padded do not shrink.
        long, short = self._num_planned
        if self.reserved is not None and self.has_fixed_grid:
            self._grids = (self._num_items, self._num_items)
        elif self.has_fixed_grid:
            self._grids = (max(self._grids[0], self.capacity(long)), max(self._grids[1], self.capacity(short)))
        else:
            self._grids = (long, short)

    @property
    def programs(self) -> tuple[int, ...]:
        """Those of both launches."""
        return tuple(num_items * self.spec.num_kv_heads for num_items in self._grids)

    def _start_attention(self, tensors: Tensors) -> None:
        c = self.constants
        # A body alone, so that no launch carries the registers and shared memory of the other's.
        long = dataclasses.replace(c, short=c.long)
        short = dataclasses.replace(c, long=c.short, num_warps=self.variant.number("decode_num_warps"))
        for part, constants, num_items in zip(("long", "short"), (long, short), self._grids, strict=True):
            if num_items:
                self._start_items(tensors, constants, num_items, part)
