"""The attention kernel as a fixed grid of programs, each of which takes one work item after another."""

# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from .attention import unit


@triton.jit(do_not_specialize=["partial_rows", "stride_table"])
def persistent_attention_kernel(
    items, merges, counts, q, k_cache, v_cache, k_long, v_long, k_short, v_short, out, block_table,
    partial_out, partial_max, partial_sum, counters, partial_rows, features, qk_scale,
    stride_q_token, stride_q_head, stride_o_token, stride_o_head,
    stride_k_page, stride_k_token, stride_k_head, stride_v_page, stride_v_token, stride_v_head, stride_table,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, LONG_M: tl.constexpr, LONG_N: tl.constexpr, SHORT_M: tl.constexpr,
    SHORT_N: tl.constexpr, STAGES: tl.constexpr, LOAD: tl.constexpr,
    HEADS_FIRST: tl.constexpr, LAST_MERGES: tl.constexpr, WIDEN: tl.constexpr, PDL: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Compute the `counts[0]` items of the work list for each of HEADS KV heads, whatever the grid.

    Program p takes units p, p + programs, ... of the (item, KV head) pairs, counted along the items of one head after
    another, or along the heads of one item after another with HEADS_FIRST.
    """
    if PDL:
        gdc_launch_dependents()
    num_items = tl.load(counts)
    for index in tl.range(tl.program_id(0), num_items * HEADS, tl.num_programs(0)):
        if HEADS_FIRST:
            kv_head = index % HEADS
            number = index // HEADS
        else:
            kv_head = index // num_items
            number = index % num_items
        unit(
            number, kv_head, items, merges, q, k_cache, v_cache, k_long, v_long, k_short, v_short, out, block_table,
            partial_out, partial_max, partial_sum, counters, partial_rows, features, qk_scale,
            stride_q_token, stride_q_head, stride_o_token, stride_o_head,
            stride_k_page, stride_k_token, stride_k_head, stride_v_page, stride_v_token, stride_v_head, stride_table,
            GROUP, HEAD_DIM, VALUE_DIM, PAGE_SIZE, WINDOW, SOFT_CAP, LONG_M, LONG_N, SHORT_M, SHORT_N,
            STAGES, LOAD, LAST_MERGES, WIDEN,
        )  # fmt: skip
