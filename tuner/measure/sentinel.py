"""The sentinel: work that always is the same, whose time says whether the card still is."""

from __future__ import annotations

import statistics

import torch

from ...kernel_templates.outcome import Regime
from .stopwatch import Stopwatch

# A product of bf16 matrices that takes about 100 us on an H200: of the work there is, it feels power and clocks most.
SHAPE = (4096, 4096, 2048)
GRAPH = Regime("graph")
_SAMPLES = 5


class Sentinel:
    """A matrix product of `shape` (rows, columns, inner size) in bf16, timed in `regime`."""

    def __init__(
        self, device: torch.device | str = "cuda", shape: tuple[int, int, int] = SHAPE, regime: Regime = GRAPH
    ) -> None:
        rows, columns, inner = shape
        # A generator of its own: a capture that failed before leaves the device's default one unusable.
        draw = torch.Generator(device).manual_seed(0)
        right = torch.randn(inner, columns, device=device, dtype=torch.bfloat16, generator=draw)
        left = torch.randn(rows, inner, device=device, dtype=torch.bfloat16, generator=draw)
        product = torch.empty(rows, columns, device=device, dtype=torch.bfloat16)
        self._watch = Stopwatch(lambda factor: torch.mm(factor, right, out=product), [left], regime)

    def ms(self) -> float:
        """Milliseconds of one product: the median of several samples, taken after as many that are dropped."""
        # Dropped, because they would tell what ran before rather than how the card is.
        return statistics.median(self._watch.samples(2 * _SAMPLES)[_SAMPLES:])
