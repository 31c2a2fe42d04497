from typing import Any

import pytest
import torch

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.gpu import INTERPRETER
from attention_tuner.kernel_templates.launch.launcher import make_launcher
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.tuner.measure.check import Checker

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SPEC, BATCH = AttentionSpec(4, 2, 64, "float16"), Batch.parse("1x12@50,2x1@70")
VALUES = {
    "block_m": 16, "block_n": 32, "decode_block_m": 16, "decode_block_n": 64, "num_warps": 4, "num_stages": 3,
    "kv_load": "pointer", "order": "items", "programs_per_sm": 1, "waves": 4, "long_weight": 2,
    "schedule": "interleaved", "partials": "float32", "reduction": "kernel",
}  # fmt: skip


@pytest.mark.parametrize("order", ["items", "heads"])
@pytest.mark.parametrize("programs", [1, 3, 1000])
def test_any_number_of_programs_gives_the_same_bits(order: str, programs: int):
    checker = Checker(SPEC, BATCH, 16, "cpu")
    launcher = make_launcher(Variant.of("persistent", 16, VALUES | {"order": order}), SPEC, INTERPRETER)
    assert checker.check(launcher).passed
    expected = checker.tensors.out.clone()
    start = launcher.start

    def fewer(kernel: Any, grid: tuple[int, ...], *rest: Any) -> None:
        start(kernel, (programs,) if len(grid) == 1 else grid, *rest)

    launcher.start = fewer
    assert checker.check(launcher).passed
    assert torch.equal(checker.tensors.out, expected)
