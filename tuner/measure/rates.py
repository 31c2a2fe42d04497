"""What a GPU can do at most, measured: the physical floor that attention is held against."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...kernel_templates.errors import GpuError
from ...kernel_templates.outcome import Regime
from .stopwatch import Stopwatch, timing

READ_BYTES = 4 << 30
MATMUL_SIZE = 8192
_SAMPLES = 20
_ROW = 1 << 14


def measure_rates() -> tuple[float, float]:
    """The present GPU's rates: TB/s of a sum over 4 GiB, and TFLOP/s of an 8192 x 8192 x 8192 bf16 matmul.

    Raises `GpuError` where there is none.
    """
    if not torch.cuda.is_available():
        raise GpuError("no NVIDIA GPU is present whose rates could be measured")
    numbers = torch.ones(READ_BYTES // 4 // _ROW, _ROW, device="cuda")
    sums = torch.empty(len(numbers), device="cuda")
    read_ms = _median_ms(lambda source: torch.sum(source, dim=1, out=sums), numbers)
    del numbers
    matrix = torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(matrix)
    matmul_ms = _median_ms(lambda factor: torch.mm(factor, matrix, out=product), matrix)
    return READ_BYTES / read_ms * 1e-9, 2 * MATMUL_SIZE**3 / matmul_ms * 1e-9


def _median_ms(run: Callable[[torch.Tensor], object], buffer: torch.Tensor) -> float:
    # One buffer is enough: both are larger than twice any L2.
    return timing(Stopwatch(run, [buffer], Regime("graph")), _SAMPLES, plan_ms=0.0).median_ms
