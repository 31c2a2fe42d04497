import torch

from attention_tuner.kernel_templates.launch.workspace import Workspace


def test_what_is_taken_together_does_not_overlap():
    first, second = Workspace().take((((2, 3), torch.bfloat16), ((5,), torch.float32)), "cpu")
    first.fill_(1)
    second.fill_(2)
    assert (first.shape, first.dtype, second.shape, second.dtype) == ((2, 3), torch.bfloat16, (5,), torch.float32)
    assert first.eq(1).all()
    assert second.data_ptr() % 16 == 0


def test_what_is_taken_in_inference_mode_can_be_written_outside():
    with torch.inference_mode():
        (taken,) = Workspace().take((((3,), torch.float32),), "cpu")
    taken.fill_(1)


def test_takers_share_one_buffer_until_it_grows_and_then_keep_what_they_have():
    workspace = Workspace()
    (large,) = workspace.take((((100,), torch.float32),), "cpu")
    (small,) = workspace.take((((10,), torch.float32),), "cpu")
    assert large.data_ptr() == small.data_ptr()
    assert workspace.generation == 1
    large.fill_(3)
    (larger,) = workspace.take((((200,), torch.float32),), "cpu")
    larger.fill_(4)
    assert workspace.generation == 2
    assert large.eq(3).all()
