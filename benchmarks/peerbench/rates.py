"""The rates of a GPU, from which the floor of a batch is computed."""

from __future__ import annotations

from collections.abc import Sequence

from attention_tuner.kernel_templates.gpu import Gpu
from attention_tuner.tuner.measure.rates import Rates, measure_rates

# The highest rates measured on this GPU; a single run measures slightly less.
KNOWN_RATES = {"NVIDIA H200": Rates(4.5, 790.0)}


def rates_of(gpu: Gpu, given: Sequence[float] | None = None) -> tuple[Rates, str]:
    """The rates for the floor, and their origin."""
    if given:
        return Rates(*given), "given"
    if gpu.name in KNOWN_RATES:
        return KNOWN_RATES[gpu.name], "the highest seen on this GPU"
    if gpu.is_interpreter:
        return Rates(1.0, 1.0), "made up: nothing limits an interpreter"
    return measure_rates(), "measured: a sum and a matrix product"
