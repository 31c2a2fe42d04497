import gc

import pytest
import torch

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.errors import SpecError
from attention_tuner.kernel_templates.oracle.inputs import make_tensors
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.runtime.custom_op import hybrid_attention_op, register
from attention_tuner.runtime.hybrid_attention import HybridAttention


@pytest.mark.parametrize("lse", [False, True])
def test_pytorch_finds_nothing_wrong_with_the_operator(lse: bool):
    spec = AttentionSpec(4, 2, 32, "float16", has_sinks=True)
    t = make_tensors(spec, Batch.parse("1x9@5,1x1@40"), 16, "cpu", 0, lse=lse)
    attention = HybridAttention(spec, 16, 16, 4)
    attention.plan([9, 1], [5, 40])
    lse_out = None if t.lse is None else torch.zeros_like(t.lse)
    # opcheck compares tensors, and NaN is not equal to itself.
    caches = t.k_cache.nan_to_num(), t.v_cache.nan_to_num()
    arguments = (t.q, *caches, t.block_table, torch.zeros_like(t.q), lse_out, t.sinks, *[None] * 5)
    found = torch.library.opcheck(hybrid_attention_op, (*arguments, attention.handle))
    assert set(found.values()) == {"SUCCESS"}


class Recorder:
    def launch(self, *arguments: object) -> None:
        self.arguments = arguments


def test_a_handle_names_one_attention_for_as_long_as_it_is_held():
    first, second = Recorder(), Recorder()
    handles = register(first), register(second)
    assert handles[0] != handles[1]
    empty = torch.empty(0)
    rest = (empty, empty, empty, empty.clone(), *[None] * 7)
    hybrid_attention_op(empty, *rest, handles[1])
    assert len(second.arguments) == 12
    assert not hasattr(first, "arguments")
    del second
    gc.collect()
    with pytest.raises(SpecError, match=f"no attention has the handle {handles[1]}"):
        hybrid_attention_op(empty, *rest, handles[1])
