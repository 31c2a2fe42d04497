import dataclasses

import pytest

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.gpu import TARGETS
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.triton_family.launchers import FusedLauncher
from attention_tuner.kernel_templates.variant import Variant

VALUES = {
    "block_m": 128, "block_n": 64, "decode_block_m": 16, "decode_block_n": 32, "num_warps": 4, "num_stages": 2,
    "kv_load": "pointer", "order": "items", "long_weight": 1,
    "schedule": "long_first", "partials": "float32", "reduction": "kernel",
}  # fmt: skip
BATCH = Batch.parse("1x512@16384,15x1@4000,1x1@60000")


def num_items(waves: int, num_sms: int = 132) -> int:
    gpu = dataclasses.replace(TARGETS["sm_90"], num_sms=num_sms)
    launcher = FusedLauncher(Variant.of("fused", 16, VALUES | {"waves": waves}), AttentionSpec(8, 1, 128), gpu)
    return len(launcher.work_list(BATCH).items)


def test_without_waves_nothing_is_split():
    assert num_items(0) == 32 + 16


@pytest.mark.parametrize("waves", [2, 4])
def test_there_are_about_as_many_items_as_waves_times_multiprocessors(waves: int):
    assert waves * 132 <= num_items(waves) <= waves * 132 + 48


def test_a_larger_gpu_gets_more_items():
    assert num_items(2, 264) == pytest.approx(num_items(4, 132), abs=1)
