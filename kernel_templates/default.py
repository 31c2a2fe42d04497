"""The default variant: what an engine runs without tuning, and what every search must beat."""

from __future__ import annotations

from .batch import SHORT_QUERY, Batch
from .spec import AttentionSpec
from .variant import Variant

# The numbers of vLLM 0.33's Triton backend (vllm/v1/attention/ops/triton_unified_attention.py and the backend's
# choice between its two kernels). Its decode kernel splits each sequence when a launch has too few programs.
BLOCK_M = 16
MOST_BLOCK_M = 128
BLOCK_N = 32
SPLIT_BLOCK_N = 16
SPLIT_SEGMENTS = 16
SPLIT_PROGRAMS = 128


def default_variant(spec: AttentionSpec, batch: Batch, page_size: int) -> Variant:
    """The variant that vLLM's Triton backend amounts to for this layer and batch."""
    # There, a tile is a whole number of groups; a group of more rows than the largest tile is split here.
    block_m = min(max(BLOCK_M, 1 << (spec.group_size - 1).bit_length()), MOST_BLOCK_M)
    longest = max(query_len for query_len, _ in batch.sequences)
    tokens_per_block = max(1, block_m // spec.group_size)
    query_blocks = -(-longest // tokens_per_block)
    split = longest <= SHORT_QUERY and batch.num_seqs * query_blocks <= SPLIT_PROGRAMS / spec.num_kv_heads
    values = {
        "block_m": block_m,
        "block_n": SPLIT_BLOCK_N if split else BLOCK_N,
        "num_segments": SPLIT_SEGMENTS if split else 1,
        "num_warps": 4,
        "num_stages": 3,
    }
    return Variant.of("unified", page_size, values)
