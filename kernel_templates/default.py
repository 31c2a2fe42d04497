"""The default variant: what an engine runs without tuning, and what every search must beat."""

from __future__ import annotations

from .batch import SHORT_QUERY, Batch
from .spec import AttentionSpec
from .variant import Variant

# The numbers of vLLM 0.33's Triton backend (vllm/v1/attention/ops/triton_unified_attention.py and the backend's
# choice between its two kernels). Its decode kernel splits each sequence when a launch has too few programs.
BLOCK_M = 16
BLOCK_N = 32
SPLIT_BLOCK_N = 16
SPLIT_SEGMENTS = 16
SPLIT_PROGRAMS = 128


def default_variant(spec: AttentionSpec, batch: Batch, page_size: int) -> Variant:
    """The variant that vLLM's Triton backend amounts to for this layer and batch."""
    block_m = max(BLOCK_M, 1 << (spec.group_size - 1).bit_length())
    longest = max(query_len for query_len, _ in batch.sequences)
    query_blocks = -(-longest // (block_m // spec.group_size))
    split = longest <= SHORT_QUERY and batch.num_seqs * query_blocks <= SPLIT_PROGRAMS / spec.num_kv_heads
    values = {
        "block_m": block_m,
        "block_n": SPLIT_BLOCK_N if split else BLOCK_N,
        "num_segments": SPLIT_SEGMENTS if split else 1,
        "num_warps": 4,
        "num_stages": 3,
    }
    return Variant.of("unified", page_size, values)
