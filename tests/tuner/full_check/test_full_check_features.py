"""The full check of layers with features, through the interpreter: what a GPU runs beside it are larger batches."""

from __future__ import annotations

import pytest

from attention_tuner.kernel_templates.gpu import INTERPRETER
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.tuner.full_check.cases import cases_of
from attention_tuner.tuner.full_check.run import make_checker, run_case

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

WINDOWED = AttentionSpec(2, 1, 32, "float16", "float8_e4m3fn", sliding_window=40, logits_soft_cap=30.0, has_sinks=True)
TREE = AttentionSpec(2, 1, 32, "float16", has_tree_mask=True)
# The cases of a tree that run other code than plain layers; the others differ only in their inputs.
TREE_CASES = {"verification", "chunks at tile edges", "log-sum-exp", "a fixed split", "trees of tokens"}
VARIANTS = {
    "unified": "block_m=16,block_n=32,num_segments=4,num_stages=1,num_warps=4",
    "fused": "block_m=32,block_n=16,decode_block_m=16,decode_block_n=16,kv_load=pointer,long_weight=1,num_stages=1,"
             "num_warps=4,order=items,partials=float32,reduction=last_program,schedule=long_first,waves=4",
}  # fmt: skip


@pytest.mark.parametrize("template", VARIANTS)
@pytest.mark.parametrize(("spec", "page_size"), [(WINDOWED, 48), (TREE, 16)], ids=["window", "tree"])
def test_every_case_passes(spec: AttentionSpec, page_size: int, template: str) -> None:
    variant = Variant.parse(f"{template}:page_size={page_size},{VARIANTS[template]}")
    cases = [case for case in cases_of(spec, variant) if not case.needs_gpu]
    if spec == TREE:
        cases = [case for case in cases if case.name in TREE_CASES]
        assert len(cases) == len(TREE_CASES)
    else:
        # Other seeds, and more of the same sequences, are slow and run no other code.
        cases = [case for case in cases if case.seed == 0 and case.name != "many sequences"]
    results = [run_case(variant, case, INTERPRETER, make_checker(spec, page_size, case, "cpu")) for case in cases]
    assert [result for result in results if result.state != "passed"] == []
