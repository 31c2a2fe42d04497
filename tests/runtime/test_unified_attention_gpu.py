"""The replacement of vLLM's function on a GPU, called as vLLM's own test calls it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from unified_samples import call_of, expected, right

from attention_tuner import AttentionSpec, HybridAttention, unified_attention
from attention_tuner.kernel_templates.errors import BatchError

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

MIXED = [(1, 1328), (5, 18), (129, 463)]
DECODE = [(1, 523), (1, 37), (1, 2011)]
# The values of vLLM's test: sequences, heads, head size, queries in 8 bits, window, soft cap, pages, and its threshold
# for split keys. Each value meets each of the others somewhere, and each window each soft cap with either queries.
MATRIX: list[tuple[Any, ...]] = [
    (MIXED, (4, 4), 256, False, None, None, 2048, 0),
    (MIXED, (8, 2), 256, False, None, 50.0, 32768, 8),
    (MIXED, (8, 2), 128, False, 64, None, 32768, 8),
    (DECODE, (4, 4), 256, False, 64, 50.0, 2048, 8),
    (MIXED, (4, 4), 256, False, 128, None, 32768, 8),
    (MIXED, (8, 2), 128, False, 128, 50.0, 32768, 8),
    (MIXED, (4, 4), 128, False, 256, None, 2048, 0),
    (DECODE, (5, 1), 256, False, 256, 50.0, 32768, 0),
    (DECODE, (5, 1), 128, True, None, None, 2048, 8),
    (DECODE, (5, 1), 256, True, None, 50.0, 2048, 0),
    (DECODE, (8, 2), 128, True, 64, None, 2048, 0),
    (MIXED, (5, 1), 256, True, 64, 50.0, 32768, 0),
    (MIXED, (5, 1), 256, True, 128, None, 32768, 0),
    (DECODE, (8, 2), 256, True, 128, 50.0, 2048, 0),
    (DECODE, (8, 2), 256, True, 256, None, 2048, 8),
    (DECODE, (4, 4), 256, True, 256, 50.0, 2048, 0),
]


def test_every_value_meets_every_other():
    columns = [list(map(str, column)) for column in zip(*MATRIX, strict=True)]
    for one, other in itertools.combinations(columns, 2):
        assert set(zip(one, other, strict=True)) == set(itertools.product(one, other))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("seq_lens", "num_heads", "head_size", "fp8_queries", "sliding_window", "soft_cap", "num_blocks", "seq_threshold"),
    MATRIX,
    ids=[f"{'decode' if row[0] is DECODE else 'mixed'}-{'-'.join(map(str, row[1:]))}" for row in MATRIX],
)
@torch.inference_mode()
def test_called_as_vllm_calls_its_function_on_a_gpu(
    seq_lens: list[tuple[int, int]], num_heads: tuple[int, int], head_size: int, fp8_queries: bool,
    sliding_window: int | None, soft_cap: float | None, num_blocks: int, seq_threshold: int,
):  # fmt: skip
    call, expected = call_of(seq_lens, num_heads, head_size, "cuda", fp8_queries=fp8_queries,
                             sliding_window=sliding_window, soft_cap=soft_cap, num_blocks=num_blocks,
                             seq_threshold=seq_threshold)  # fmt: skip
    # vLLM's test sets this default device.
    with torch.device("cuda"):
        unified_attention(**call)
    right(call, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [(4, 4), (8, 2), (5, 1)], ids=str)
@torch.inference_mode()
def test_a_cache_in_8_bits_on_a_gpu(num_heads: tuple[int, int]):
    call, expected = call_of(MIXED, num_heads, 128, "cuda", fp8=True, num_blocks=2048)
    unified_attention(**call)
    right(call, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
def test_a_captured_call_serves_the_next_steps_on_a_gpu(fp8: bool):
    call, _ = call_of(MIXED, (8, 2), 128, "cuda", fp8=fp8, num_blocks=2048)
    k, v = (call["k"].float() * 0.5, call["v"].float() * 0.25) if fp8 else (call["k"], call["v"])
    # Lengths are the plan's: those of the step that is captured are not looked at.
    call |= {"cu_seqlens_q": None, "seqused_k": None}
    attention = HybridAttention(AttentionSpec(8, 2, 128, kv_dtype="float8_e4m3fn" if fp8 else "auto"), 16, 256, 4)
    planned = attention.plan_graph([query_len for query_len, _ in MIXED], [kv - query_len for query_len, kv in MIXED])
    unified_attention(**call, attention=attention)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        unified_attention(**call, attention=attention)
    for query_lens, kv_lens in (([1, 5, 129], [1328, 18, 463]), ([1, 1], [900, 1328]), ([100], [400])):
        call["out"].fill_(torch.nan)
        planned.plan(query_lens, [kv - query for query, kv in zip(query_lens, kv_lens, strict=True)])
        graph.replay()
        step = call | {"q": call["q"][: sum(query_lens)]}
        right({"out": call["out"][: sum(query_lens)]}, expected(step, query_lens, kv_lens, k, v))
        assert call["out"][sum(query_lens) :].isnan().all()


@pytest.mark.gpu
def test_a_capture_is_refused_without_a_planned_attention():
    call, _ = call_of([(3, 40)], (4, 4), 64, "cuda")
    unified_attention(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(BatchError, match="a captured graph needs a planned attention"):
            unified_attention(**call)
        torch.zeros(1, device="cuda")
