import pytest

from attention_tuner.kernel_templates.device import present_gpu


def test_without_a_gpu_there_is_none():
    import torch

    if torch.cuda.is_available():
        pytest.skip("a GPU is present")
    assert present_gpu() is None


@pytest.mark.gpu
def test_the_present_gpu_has_a_name_a_size_and_a_driver():
    gpu = present_gpu()
    assert gpu is not None
    assert gpu.name.startswith("NVIDIA")
    assert gpu.num_sms > 1
    assert gpu.shared_memory_bytes >= 64 * 1024
    assert gpu.driver
