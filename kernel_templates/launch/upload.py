"""Copies small arrays from the host to one fixed buffer on the device, without waiting for the device."""

# pyright: basic
from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

# Host buffers that are written in turn. A copy starts when the device gets to it: as many steps as there are buffers
# may be planned ahead of the device before one has to wait.
HOST_BUFFERS = 4


class Upload:
    """One int32 buffer of `size` elements on `device`, at a fixed address, and how to write it from the host."""

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
        """The host's array to fill before `send`; what it holds is what was there some steps ago."""
        if not self._is_host:
            # A pinned buffer must not change while an earlier copy may still read it. After some other steps that copy
            # has nearly always been made.
            self._copied[self._turn].synchronize()
        return self._arrays[self._turn]

    def send(self, count: int) -> None:
        """Start copying the first `count` elements of the array to the device, on that device's current stream."""
        if self._is_host:
            return
        self.buffer[:count].copy_(self._hosts[self._turn][:count], non_blocking=True)
        # The stream that the copy is on, whichever device is the current one.
        self._copied[self._turn].record(torch.cuda.current_stream(self.buffer.device))
        self._turn = (self._turn + 1) % len(self._hosts)
