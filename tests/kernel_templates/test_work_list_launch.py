import pytest
import torch

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.gpu import INTERPRETER
from attention_tuner.kernel_templates.launch import make_launcher
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.tuner.check import Checker

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SPEC = AttentionSpec(4, 2, 64, "float16")
VALUES = {"block_m": 16, "block_n": 16, "num_warps": 4, "num_stages": 2}


def test_partial_results_have_room_for_every_segment():
    launcher = make_launcher(Variant.of("unified", 16, VALUES | {"num_segments": 4}), SPEC, INTERPRETER)
    launcher.plan(Batch.parse("1x1@127"), "cpu")
    out, maxima, sums = launcher.workspaces()
    assert out.shape == (2, 4 * 2, 64)  # heads; four segments of one token of two query heads; head size
    assert maxima.shape == sums.shape == (2, 8)
    assert {tensor.dtype for tensor in (out, maxima, sums)} == {torch.float32}


def test_a_launcher_planned_for_one_batch_serves_another_after_planning_again():
    launcher = make_launcher(Variant.of("unified", 16, VALUES | {"num_segments": 4}), SPEC, INTERPRETER)
    for text in ("1x1@127", "3x2@20,1x12@5"):
        assert Checker(SPEC, Batch.parse(text), 16, "cpu").check(launcher).passed


@pytest.mark.parametrize("order", ["items", "heads"])
def test_programs_past_the_list_do_nothing(order: str):
    values = VALUES | {"decode_block_m": 16, "decode_block_n": 16, "kv_load": "pointer", "order": order, "waves": 8,
                       "long_weight": 1}  # fmt: skip
    launcher = make_launcher(Variant.of("fused", 16, values), SPEC, INTERPRETER)
    batch = Batch.parse("1x12@5,1x1@70")
    checker = Checker(SPEC, batch, 16, "cpu")
    launcher.plan(batch, "cpu")
    # As a captured graph would: the grid of a longer list over the buffers of this one.
    launcher._num_items += 2  # pyright: ignore
    launcher._num_entries += 1  # pyright: ignore
    checker.tensors.out.fill_(torch.nan)
    launcher.run(checker.tensors)
    assert checker.judge(checker.tensors.out).passed
