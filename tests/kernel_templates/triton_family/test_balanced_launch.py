import pytest
import torch

from attention_tuner.kernel_templates.batch import SHORT_QUERY, Batch
from attention_tuner.kernel_templates.gpu import TARGETS
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.triton_family.launchers import FusedLauncher
from attention_tuner.kernel_templates.variant import Variant

VALUES = {
    "block_m": 128, "block_n": 64, "decode_block_m": 16, "decode_block_n": 32, "num_warps": 4, "num_stages": 2,
    "kv_load": "pointer", "order": "items", "long_weight": 1, "waves": 4, "schedule": "long_first",
    "partials": "float32", "reduction": "kernel",
}  # fmt: skip
BATCH = Batch.parse("1x512@16384,15x1@4000,1x1@60000")


def launcher(**changes: str) -> FusedLauncher:
    return FusedLauncher(Variant.of("fused", 16, VALUES | changes), AttentionSpec(8, 1, 128), TARGETS["sm_90"])


@pytest.mark.parametrize("partials", ["float32", "bfloat16"])
def test_partial_outputs_have_the_dtype_asked_for_and_their_maxima_and_sums_float32(partials: str):
    made = launcher(partials=partials)
    made.plan(BATCH, "cpu")
    assert [tensor.dtype for tensor in made.workspaces()] == [getattr(torch, partials), torch.float32, torch.float32]


def test_without_a_second_launch_there_are_no_entries():
    assert len(launcher().work_list(BATCH).entries) > 0
    assert len(launcher(reduction="last_program").work_list(BATCH).entries) == 0


def test_the_schedule_is_the_order_of_the_items():
    first, mixed = (launcher(schedule=schedule).work_list(BATCH) for schedule in ("long_first", "interleaved"))
    is_long = [(work.items[:, 2] > SHORT_QUERY * 8).tolist() for work in (first, mixed)]
    assert is_long[0] == sorted(is_long[0], reverse=True) != is_long[1]
