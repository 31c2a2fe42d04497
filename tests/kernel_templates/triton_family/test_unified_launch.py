import pytest

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.gpu import INTERPRETER
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.triton_family.launchers import UnifiedLauncher
from attention_tuner.kernel_templates.variant import Variant


@pytest.mark.parametrize("num_segments", [1, 4, 64])
def test_every_sequence_has_the_same_number_of_segments(num_segments: int):
    values = {"block_m": 16, "block_n": 16, "num_segments": num_segments, "num_warps": 4, "num_stages": 3}
    launcher = UnifiedLauncher(Variant.of("unified", 16, values), AttentionSpec(4, 2, 64), INTERPRETER)
    work = launcher.work_list(Batch.parse("1x1@4095,1x1@1023"))
    assert [int((work.items[:, 6] == seq).sum()) for seq in (0, 1)] == [num_segments] * 2
