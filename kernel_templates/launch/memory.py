"""Buffers that launchers keep between steps: uploads of plans, and partial results that launchers may share."""

# pyright: basic
from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

# Host buffers that are written in turn. A copy starts when the GPU gets to it, so the host can plan as many steps ahead
# of the GPU as there are buffers before it has to wait.
HOST_BUFFERS = 4
# Bytes. Torch aligns its allocations to at least this, and the kernels are compiled for tensors aligned to 16.
ALIGNMENT = 256

Layout = tuple[tuple[int, ...], torch.dtype]


class Upload:
    """An int32 buffer of `size` elements at a fixed address on `device`, written from the host without waiting."""

    # A tensor made in inference mode could not be written outside of it.
    @torch.inference_mode(False)
    def __init__(self, size: int, device: torch.device | str) -> None:
        self.buffer = torch.zeros(size, dtype=torch.int32, device=device)
        self._is_host = self.buffer.device.type == "cpu"
        self._hosts = [self.buffer] if self._is_host else [
            torch.zeros(size, dtype=torch.int32, device="cpu", pin_memory=True) for _ in range(HOST_BUFFERS)
        ]
        self._arrays = [host.numpy() for host in self._hosts]
        self._copied = [] if self._is_host else [torch.cuda.Event() for _ in self._hosts]
        self._turn = 0

    def array(self) -> NDArray[np.int32]:
        """The host's array to fill before `send`; it still holds what was written some steps ago."""
        if not self._is_host:
            # An earlier copy may still read this pinned buffer, so wait for it. It is some steps old and nearly always
            # done.
            self._copied[self._turn].synchronize()
        return self._arrays[self._turn]

    def send(self, count: int) -> None:
        """Start copying the first `count` elements of the array to the device, on that device's current stream."""
        if self._is_host:
            return
        self.buffer[:count].copy_(self._hosts[self._turn][:count], non_blocking=True)
        # The copy runs on the buffer's device, which need not be the current one: record the event on its stream.
        self._copied[self._turn].record(torch.cuda.current_stream(self.buffer.device))
        self._turn = (self._turn + 1) % len(self._hosts)


class Workspace:
    """One buffer for partial results, replaced by a larger one when needed; `generation` counts the buffers made.

    A launch writes its partial results before it reads them, so all launches of one stream can share a buffer. Tensors
    taken before a replacement keep their contents and address for as long as they are held.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")

    # A tensor made in inference mode could not be written outside of it.
    @torch.inference_mode(False)
    def take(self, layouts: Sequence[Layout], device: torch.device | str) -> tuple[torch.Tensor, ...]:
        """A tensor of each shape and dtype on `device`, without overlap and with undefined contents."""
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


def indexed(device: torch.device | str) -> torch.device:
    """`device` with its index, as the device of a tensor has it: "cuda" becomes the current GPU."""
    named = torch.device(device)
    if named.type == "cuda" and named.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return named
