import pytest
import torch

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.errors import GpuError
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.tuner.measure.rates import Rates, floor_ms, measure_rates

SPEC = AttentionSpec(32, 8, 128)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is present")
def test_rates_need_a_gpu() -> None:
    with pytest.raises(GpuError, match="no NVIDIA GPU"):
        measure_rates()


@pytest.mark.gpu
def test_rates_are_those_of_a_gpu() -> None:
    rates = measure_rates()
    assert 0.1 < rates.read_tb_per_s < 20
    assert 10 < rates.matmul_tflops < 5000


def test_decode_is_bound_by_reading() -> None:
    # 64 sequences of 16384 keys: K and V of 8 heads of 128 numbers of 2 bytes each, and 64 rows of q and the output.
    read = 64 * 16384 * 2 * 8 * 128 * 2 + 2 * 64 * 32 * 128 * 2
    assert floor_ms(SPEC, Batch.parse("64x1@16383"), Rates(4.0, 1e9)) == pytest.approx(read / 4e12 * 1e3)


def test_prefill_is_bound_by_multiplying() -> None:
    pairs = 8192 * 8193 / 2
    flops = 4 * 32 * 128 * pairs
    assert floor_ms(SPEC, Batch.parse("1x8192@0"), Rates(4.0, 700.0)) == pytest.approx(flops / 700e12 * 1e3)
