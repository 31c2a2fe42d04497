"""Launches template `persistent`."""

# pyright: basic
from __future__ import annotations

from ..launch.launcher import Tensors
from .balanced_launch import BalancedLauncher
from .persistent_attention import persistent_attention_kernel


class PersistentLauncher(BalancedLauncher):
    """A fixed grid of programs that take one item of one KV head after another."""

    @property
    def programs(self) -> tuple[int, ...]:
        """A fixed number for each multiprocessor."""
        return (self.gpu.num_sms * self.variant.number("programs_per_sm"),)

    def _start_attention(self, tensors: Tensors) -> None:
        c = self.constants
        constants = self._compile_time(tensors, c) | {"HEADS_FIRST": c.heads_first, "HEADS": self.spec.num_kv_heads}
        self.start(persistent_attention_kernel, self.programs, self._arguments(tensors, c), constants)
