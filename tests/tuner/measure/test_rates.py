import pytest
import torch

from attention_tuner.kernel_templates.errors import GpuError
from attention_tuner.tuner.measure.rates import measure_rates


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is present")
def test_rates_need_a_gpu() -> None:
    with pytest.raises(GpuError, match="no NVIDIA GPU"):
        measure_rates()


@pytest.mark.gpu
def test_rates_are_those_of_a_gpu() -> None:
    read_tb_per_s, matmul_tflops = measure_rates()
    assert 0.1 < read_tb_per_s < 20
    assert 10 < matmul_tflops < 5000
