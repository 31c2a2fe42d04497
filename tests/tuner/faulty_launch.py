"""Launches the variants of `faulty_template`: eager attention, beside a kernel that does what a bad kernel does."""

from __future__ import annotations

import os
import signal
import time

import torch
import triton
import triton.language as tl

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.launch.launcher import Launcher, Tensors
from attention_tuner.kernel_templates.oracle.reference import paged_attention


@triton.jit
def touch_kernel(block_table, k_cache, stride_page, scratch, DELAY: tl.constexpr, ENDLESS: tl.constexpr):
    """Reads a key of the first page that the block table names."""
    page = tl.load(block_table).to(tl.int64)
    key = tl.load(k_cache + page * stride_page).to(tl.float32)
    count = DELAY
    if ENDLESS:
        while tl.load(scratch, volatile=True) == 0:
            count += 1
    tl.store(scratch + 1, count + (key > 0).to(tl.int32))


class FaultyLauncher(Launcher):
    def plan(self, batch: Batch, device: torch.device | str) -> None:
        self.batch = batch
        self.right: torch.Tensor | None = None
        self.scratch = torch.zeros(2, dtype=torch.int32, device=device)
        if self._fault("out_of_memory") and not self.settings.compile_only:
            self._exhaust(torch.device(device))

    def run(self, tensors: Tensors) -> None:
        if self._fault("sigkill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault("compiler_abort"):
            os.write(2, b"LLVM ERROR: Cannot select: intrinsic %llvm.nvvm\nPLEASE submit a bug report\n")
            os.abort()
        is_interpreted = not (tensors.q.is_cuda or self.settings.compile_only)
        if self._fault("endless_compile") or (self._fault("endless_kernel") and is_interpreted):
            # It ends as little as a loop would, and takes no time of a core from others.
            time.sleep(1e6)
        table = tensors.block_table
        if self._fault("illegal_address"):
            table = torch.full_like(table, 1 << 30)
        begin, delay_ms = time.monotonic(), self.variant.number("delay_ms")
        arguments = (table, tensors.k_cache, tensors.k_cache.stride(0), self.scratch)
        constants = {"DELAY": delay_ms, "ENDLESS": self._fault("endless_kernel"), "num_warps": 1}
        self.start(touch_kernel, (1,), arguments, constants)
        if self.settings.compile_only:
            return
        if self.right is None:
            # Only the first launch after a plan is checked; others may be captured in a graph.
            self.right, _ = paged_attention(tensors, self.batch, self.spec, tensors.q.dtype)
        tensors.out.copy_(self.right)
        if tensors.q.is_cuda:
            torch.cuda._sleep(delay_ms * 1_000_000)
        else:
            time.sleep(delay_ms / 1e3)
        if "LAUNCH_LOG" in os.environ:
            with open(os.environ["LAUNCH_LOG"], "a") as log:
                log.write(f"{begin} {time.monotonic()} {os.getpid()}\n")

    def _fault(self, name: str) -> bool:
        return self.variant.text("fault") == name

    def _exhaust(self, device: torch.device) -> None:
        """Ask for more memory than there is, on a GPU while holding most of what is free."""
        size = 1 << 50
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info()
            size = free * 3 // 4
            self.held = torch.empty(size, dtype=torch.uint8, device=device)
        torch.empty(size, dtype=torch.uint8, device=device)
