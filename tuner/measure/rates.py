"""The most that a GPU can do, measured, and the physical floor of a batch that follows from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...kernel_templates.batch import Batch, minimum_traffic
from ...kernel_templates.errors import GpuError
from ...kernel_templates.outcome import GRAPH
from ...kernel_templates.spec import AttentionSpec
from ..processes.child import Context, Job

if TYPE_CHECKING:
    import torch

# Both the numbers that are read and a matrix are larger than twice any L2.
READ_BYTES = 4 << 30
MATMUL_SIZE = 8192
_SAMPLES = 20
_ROW = 1 << 14


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured rates of a GPU."""

    # Reading memory, in TB/s.
    read_tb_per_s: float
    # Multiplying bf16 matrices, in TFLOP/s.
    matmul_tflops: float


@dataclass(frozen=True, slots=True)
class RatesJob(Job[Rates]):
    """Measure the rates of the GPU."""

    def run(self, context: Context) -> Rates:
        """The rates of the present GPU. Raises `GpuError` where there is none."""
        return measure_rates()


def measure_rates() -> Rates:
    """Time a sum over 4 GiB and an 8192 x 8192 x 8192 bf16 matrix product on the present GPU.

    Raises `GpuError` where there is none.
    """
    import torch

    if not torch.cuda.is_available():
        raise GpuError("no NVIDIA GPU is present whose rates could be measured")
    numbers = torch.ones(READ_BYTES // 4 // _ROW, _ROW, device="cuda")
    sums = torch.empty(len(numbers), device="cuda")
    read_ms = _median_ms(lambda source: torch.sum(source, dim=1, out=sums), numbers)
    del numbers
    matrix = torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(matrix)
    matmul_ms = _median_ms(lambda factor: torch.mm(factor, matrix, out=product), matrix)
    return Rates(READ_BYTES / read_ms * 1e-9, 2 * MATMUL_SIZE**3 / matmul_ms * 1e-9)


def floor_ms(spec: AttentionSpec, batch: Batch, rates: Rates) -> float:
    """The least time for `batch` in milliseconds: the longer of its necessary reads and its necessary products.

    This is the roofline of Williams, Waterman and Patterson (CACM 52:4, 2009), with the rates of a plain sum and a
    plain matrix product: a kernel that reads faster than the sum does takes a little less. The product was in bf16: a
    float32 layer, whose products are slower, stays farther above.
    """
    read_bytes, flops = minimum_traffic(spec, batch)
    return 1e3 * max(read_bytes / (rates.read_tb_per_s * 1e12), flops / (rates.matmul_tflops * 1e12))


def _median_ms(run: Callable[[torch.Tensor], object], buffer: torch.Tensor) -> float:
    from .stopwatch import Stopwatch, timing

    return timing(Stopwatch(run, [buffer], GRAPH), _SAMPLES, plan_ms=0.0).median_ms
