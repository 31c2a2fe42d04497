"""The physical floor: the time that a batch takes at the rates that were measured on a machine."""

from __future__ import annotations

from ...kernel_templates.batch import Batch, minimum_traffic
from ...kernel_templates.spec import AttentionSpec
from .jobs import Rates


def floor_ms(spec: AttentionSpec, batch: Batch, rates: Rates) -> float:
    """The least time for `batch`, in milliseconds: the longer of reading what it must and multiplying what it must.

    This is the roofline of Williams, Waterman and Patterson (CACM 52:4, 2009), with rates that a plain sum and a plain
    matrix product reached: a kernel that reads faster than the sum does takes a little less. The product was in bf16: a
    float32 layer, whose products are slower, stays farther above.
    """
    read_bytes, flops = minimum_traffic(spec, batch)
    return 1e3 * max(read_bytes / (rates.read_tb_per_s * 1e12), flops / (rates.matmul_tflops * 1e12))
