import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_tuner.kernel_templates.launch.arguments import Features, Heads, Partials
from attention_tuner.kernel_templates.triton_family.combine import combine_kernel

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

GROUP = 2


@given(
    st.integers(1, 20), st.integers(1, 5), st.integers(0, 999), st.sampled_from((64, 40)), st.sampled_from((1, 2, 4))
)
@settings(deadline=None, max_examples=20, derandomize=True)
def test_segments_merge_to_the_softmax_over_all_of_them(
    num_segments: int, tokens: int, seed: int, value_dim: int, rows_per_program: int
):
    draw = torch.Generator().manual_seed(seed)
    rows, heads = tokens * GROUP, 2
    scores = 30 * torch.randn(heads, num_segments, rows, 7, generator=draw)
    values = torch.randn(heads, num_segments, 7, value_dim, generator=draw)
    maxima = scores.amax(-1)
    weights = torch.exp2(scores - maxima[..., None])
    partial_out = weights @ values
    lse = torch.full((tokens, heads * GROUP), torch.nan)
    features = Features(*[None] * 6, lse=lse, stride_lse=heads * GROUP)
    flat = (heads, num_segments * rows)
    out = torch.full((tokens, heads * GROUP, value_dim), torch.nan, dtype=torch.float16)
    rows_per_entry = 4
    entries = [[0, -1, rows, first, *[-1] * 4, first, num_segments, rows] for first in range(0, rows, rows_per_entry)]
    # One program past the list, and an entry there that nobody is to use.
    padded = [*entries, [0, -1, rows, rows, *[-1] * 4, 0, num_segments, rows]]
    combine_kernel[len(padded), heads, rows_per_entry // rows_per_program](
        torch.tensor(padded, dtype=torch.int32), torch.tensor([0, len(entries)], dtype=torch.int32), out,
        Partials(partial_out.reshape(*flat, value_dim), maxima.reshape(flat), weights.sum(-1).reshape(flat), None),
        flat[1], features, *out.stride()[:2], LAYER=Heads(GROUP, value_dim), ROWS=rows_per_program,
        PARTIALS=32 // rows_per_program, WIDEN=False, PDL=False,
    )  # fmt: skip
    joined = torch.softmax(scores.double().permute(0, 2, 1, 3).flatten(2) * np.log(2), -1)
    expected = joined @ values.double().flatten(1, 2)
    found = out.view(tokens, heads, GROUP, value_dim).permute(1, 0, 2, 3).reshape(heads, rows, value_dim)
    assert torch.allclose(found.double(), expected, atol=2e-3)
    expected_lse = torch.logsumexp(scores.double().permute(0, 2, 1, 3).flatten(2) * math.log(2), -1)
    assert torch.allclose(lse.view(tokens, heads, GROUP).permute(1, 0, 2).reshape(heads, rows).double(), expected_lse)


# Compiles each kernel of a batch with a split sequence, and says which griddepcontrol instructions it has.
SCRIPT = """
import json, re
from attention_tuner.kernel_templates.launch import compiler
from attention_tuner.kernel_templates.batch import Batch, BatchBucket
from attention_tuner.kernel_templates.gpu import TARGETS
from attention_tuner.kernel_templates.heuristic import candidates
from attention_tuner.kernel_templates.spec import AttentionSpec

found = []
compiler._static_facts = lambda launcher: found.append([
    (each.metadata.name, each.metadata.launch_pdl, re.findall(r"griddepcontrol\\.(\\w+)", each.asm["ptx"]))
    for each in launcher.compiled
])
spec, batch = AttentionSpec(32, 8, 64), Batch.parse("1x1@5000")
for name in ("sm_80", "sm_90", "sm_120"):
    likely = candidates(spec, BatchBucket.of(batch), 16, TARGETS[name])
    for variant in {variant.template: variant for variant in likely}.values():
        compiler.compile_variant(variant, spec, TARGETS[name], batch)
        found[-1] = (name, variant.template, found[-1])
print(json.dumps(found))
"""


def test_the_reduction_is_launched_early_and_waits_where_the_gpu_can():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"fused", "gluon_hopper"} <= {template for _, template, _ in found}
    for target, _, (attention, *reductions) in found:
        # Where the last program of a tile merges there are none.
        can = target != "sm_80" and bool(reductions)
        assert attention[1:] == [False, ["launch_dependents"] if can else []]
        assert all(each == ["combine_kernel", can, ["wait"] if can else []] for each in reductions)
    # Of one row a program, and of more.
    assert {len(reductions) for _, template, (_, *reductions) in found if template == "fused"} == {2}
