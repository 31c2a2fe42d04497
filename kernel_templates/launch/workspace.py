"""Memory for partial results, which launchers that run one after the other may share."""

# pyright: basic
from __future__ import annotations

import math
from collections.abc import Sequence

import torch

# Bytes: what the kernels are compiled to expect of a tensor, and torch gives, with room to spare.
ALIGNMENT = 256

Layout = tuple[tuple[int, ...], torch.dtype]


class Workspace:
    """One buffer, grown when more is taken than it holds; `generation` counts how often it was made anew.

    A launch writes its partial results before it reads them, so that all launches of one stream can have the same
    buffer. What was taken before it grew stays what it was, at its address, for as long as it is held.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")

    # A tensor made in inference mode could not be written outside of it.
    @torch.inference_mode(False)
    def take(self, layouts: Sequence[Layout], device: torch.device | str) -> tuple[torch.Tensor, ...]:
        """A tensor of each shape and dtype on `device`, none overlapping another; what they hold is anything."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in layouts]
        steps = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        if self._buffer.numel() < sum(steps) or self._buffer.device != torch.device(device):
            self._buffer = torch.empty(sum(steps), dtype=torch.uint8, device=device)
            self.generation += 1
        parts = self._buffer[: sum(steps)].split(steps)
        return tuple(
            part[:size].view(dtype).view(shape)
            for part, size, (shape, dtype) in zip(parts, sizes, layouts, strict=True)
        )
