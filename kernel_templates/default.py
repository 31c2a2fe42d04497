"""The default variant: what an engine runs without tuning, and what every search must beat."""

from __future__ import annotations

from .batch import SHORT_QUERY, Batch
from .limits import next_power_of_two
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
# Elements of a tile of queries or keys: with so many of both, three stages fit the 99 KB of shared memory that the
# smallest GPUs have, where that backend's numbers do not.
MOST_TILE = 32 * 256


def default_variant(spec: AttentionSpec, batch: Batch, page_size: int) -> Variant:
    """The variant that vLLM's Triton backend amounts to for this layer and batch."""
    # There, a tile is a whole number of groups; a group of more rows than the largest tile is split here.
    width = next_power_of_two(max(spec.head_dim, spec.value_dim))
    block_m = min(max(BLOCK_M, next_power_of_two(spec.group_size)), MOST_BLOCK_M, MOST_TILE // width)
    is_float32 = spec.dtype == "float32"
    if is_float32:
        block_m = BLOCK_M
    longest = max(query_len for query_len, _ in batch.sequences)
    tokens_per_block = max(1, block_m // spec.group_size)
    query_blocks = -(-longest // tokens_per_block)
    split = longest <= SHORT_QUERY and batch.num_seqs * query_blocks <= SPLIT_PROGRAMS / spec.num_kv_heads
    values = {
        "block_m": block_m,
        "block_n": min(SPLIT_BLOCK_N if split or is_float32 else BLOCK_N, MOST_TILE // width),
        "num_segments": SPLIT_SEGMENTS if split else 1,
        "num_warps": 8 if is_float32 and width > 128 else 4,
        "num_stages": 1 if is_float32 and width > 256 else 3,
    }
    return Variant.of("unified", page_size, values)
