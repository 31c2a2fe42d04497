import pytest
import torch

from attention_tuner.kernel_templates.launch.memory import HOST_BUFFERS, Upload, Workspace, indexed


def test_on_the_host_the_array_is_the_buffer():
    upload = Upload(6, "cpu")
    place = upload.buffer.data_ptr()
    for first in range(3):
        upload.array()[:4] = range(first, first + 4)
        upload.send(4)
        assert upload.buffer.tolist() == [*range(first, first + 4), 0, 0]
    assert upload.buffer.data_ptr() == place


def test_a_buffer_made_in_inference_mode_can_be_written_outside():
    with torch.inference_mode():
        upload = Upload(6, "cpu")
    upload.buffer.fill_(1)


@pytest.mark.gpu
def test_what_is_planned_ahead_of_the_device_arrives_in_its_turn():
    upload = Upload(1 << 16, "cuda")
    place = upload.buffer.data_ptr()
    upload.array()[:] = -1
    upload.send(1 << 16)
    seen = torch.empty(2 * HOST_BUFFERS, 1 << 16, dtype=torch.int32, device="cuda")
    # The device is behind by all of the copies.
    torch.cuda._sleep(100_000_000)
    for step, row in enumerate(seen):
        upload.array()[:] = step
        upload.send(1 << 16)
        row.copy_(upload.buffer)
    assert [row.unique().tolist() for row in seen] == [[step] for step in range(2 * HOST_BUFFERS)]
    assert upload.buffer.data_ptr() == place


@pytest.mark.gpu
def test_the_copy_waits_for_what_is_on_the_current_stream():
    upload = Upload(8, "cuda")
    side = torch.cuda.Stream()
    upload.array()[:] = 1
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        upload.send(8)
    before = upload.buffer.tolist()
    side.synchronize()
    assert (set(before), set(upload.buffer.tolist())) == ({0}, {1})


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


@pytest.mark.gpu
def test_the_current_gpu_is_named_as_tensors_name_it():
    assert indexed("cuda") == torch.empty(1, device="cuda").device
