"""Small attentions, inputs with a checker of the output, and a way to run them."""

from __future__ import annotations

from typing import Any

import torch

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.launch.launcher import Tensors
from attention_tuner.kernel_templates.oracle.inputs import make_tensors
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.runtime.hybrid_attention import HybridAttention
from attention_tuner.tuner.measure.check import Checker

SPEC = AttentionSpec(4, 2, 64, "float16")
SPLIT = Variant.of("unified", 16, {"block_m": 16, "block_n": 16, "num_segments": 4, "num_warps": 4, "num_stages": 2})
GPU_SPEC = AttentionSpec(32, 8, 128)
FEATURES = ("sinks", "alibi_slopes", "q_scale", "k_scale", "v_scale", "tree_mask")


def made(spec: AttentionSpec = SPEC, max_tokens: int = 40, max_seqs: int = 6, **more: Any) -> HybridAttention:
    return HybridAttention(spec, 16, max_tokens, max_seqs, **more)


def plan(attention: Any, batch: Batch | str) -> None:
    sequences = (Batch.parse(batch) if isinstance(batch, str) else batch).sequences
    attention.plan([query_len for query_len, _ in sequences], [context_len for _, context_len in sequences])


def checker_of(batch: str, spec: AttentionSpec = SPEC, device: str = "cpu", **more: Any) -> Checker:
    """A checker of `batch`; `more` says which inputs `make_tensors` makes."""
    parsed = Batch.parse(batch)
    tensors = make_tensors(spec, parsed, 16, device, 0, **more)
    found = Checker(spec, parsed, 16, device, tensors=tensors)
    found.tensors.out.fill_(torch.nan)
    return found


def run(attention: HybridAttention, t: Tensors, **more: Any) -> Any:
    features = {name: getattr(t, name) for name in FEATURES}
    return attention.run(t.q, t.k_cache, t.v_cache, t.block_table, **features, **more)
