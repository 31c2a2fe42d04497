"""The attention kernel: one program computes one work item, a tile of query rows over a range of keys.

Rows of a sequence are its (query token, head of the group) pairs, tokens first: row r is token r // GROUP and query
head kv_head * GROUP + r % GROUP. So a tile is full whatever the group, and a group larger than a tile is split. The
online softmax is FlashAttention's (arXiv:2205.14135, 2307.08691), in base 2 with the scale folded in.
"""

# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false
import triton
import triton.language as tl

from .arithmetic import LOWEST, dot, narrow
from .batch import SHORT_QUERY
from .combine import MERGE, merge_if_last
from .plan import ITEM_FIELDS

ITEM: tl.constexpr = tl.constexpr(ITEM_FIELDS)
SHORT_TOKENS: tl.constexpr = tl.constexpr(SHORT_QUERY)


@triton.jit
def attend(
    state, q, k_cache, v_cache, k_desc, v_desc, pages, kv_head, start, stop, position, qk_scale,
    stride_k_page, stride_k_token, stride_v_page, stride_v_token,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    WIDEN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold keys start to stop, start a multiple of BLOCK_N, into `state` (accumulator, row maximum, row sum).

    Without MASKED all keys are visible to all rows and stop is a multiple of BLOCK_N too.
    """
    acc, row_max, row_sum = state
    columns = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, HEAD_DIM)
    for first in tl.range(start, stop, BLOCK_N, num_stages=STAGES):
        key = first + columns
        written = key < stop
        if PAGE_SIZE % BLOCK_N == 0:
            page = tl.load(pages + first // PAGE_SIZE).to(tl.int64)
            slot = first % PAGE_SIZE + columns
        elif MASKED:
            page = tl.load(pages + key // PAGE_SIZE, mask=written, other=0).to(tl.int64)
            slot = key % PAGE_SIZE
        else:
            page = tl.load(pages + key // PAGE_SIZE).to(tl.int64)
            slot = key % PAGE_SIZE
        if TMA:
            index = [page.to(tl.int32), kv_head, first % PAGE_SIZE, 0]
            k = k_desc.load(index).reshape(BLOCK_N, HEAD_DIM).T
        else:
            k_offset = page * stride_k_page + slot * stride_k_token
            if MASKED:
                k = tl.load(k_cache + k_offset[None, :] + dims[:, None], mask=written[None, :], other=0.0)
            else:
                k = tl.load(k_cache + k_offset[None, :] + dims[:, None])
        scores = dot(q, k, WIDEN)
        if MASKED:
            scores = tl.where(key[None, :] <= position[:, None], scores * qk_scale, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            p = tl.exp2(scores - new_max[:, None])
        else:
            new_max = tl.maximum(row_max, tl.max(scores, 1) * qk_scale)
            p = tl.exp2(scores * qk_scale - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        if TMA:
            v = v_desc.load(index).reshape(BLOCK_N, HEAD_DIM)
            if MASKED:
                # A probability of 0 does not cancel a NaN in a slot that was never written.
                v = tl.where(written[:, None], v, 0.0)
        else:
            v_offset = page * stride_v_page + slot * stride_v_token
            if MASKED:
                v = tl.load(v_cache + v_offset[:, None] + dims[None, :], mask=written[:, None], other=0.0)
            else:
                v = tl.load(v_cache + v_offset[:, None] + dims[None, :])
        if WIDEN:
            acc += dot(p, v, WIDEN)
        else:
            acc = tl.dot(p.to(v.dtype), v, acc)
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def tile(
    item, kv_head, q, k_cache, v_cache, k_desc, v_desc, out, block_table, partial_out, partial_max, partial_sum,
    partial_rows, qk_scale, stride_q_token, stride_q_head, stride_o_token, stride_o_head,
    stride_k_page, stride_k_token, stride_k_head, stride_v_page, stride_v_token, stride_v_head, stride_table,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute one work item for one KV head."""
    q_start = tl.load(item)
    context_len = tl.load(item + 1)
    num_rows = tl.load(item + 2)
    first_row = tl.load(item + 3)
    start = tl.multiple_of(tl.load(item + 4), BLOCK_N)
    stop = tl.load(item + 5)
    pages = block_table + tl.load(item + 6).to(tl.int64) * stride_table
    slot = tl.load(item + 7)

    row = first_row + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    valid = row < num_rows
    q_offset = (q_start + token).to(tl.int64) * stride_q_token + head * stride_q_head
    q_tile = tl.load(q + q_offset[:, None] + dims[None, :], mask=valid[:, None], other=0.0)
    position = context_len + token
    k_head = k_cache + kv_head.to(tl.int64) * stride_k_head
    v_head = v_cache + kv_head.to(tl.int64) * stride_v_head

    state = (
        tl.zeros([BLOCK_M, HEAD_DIM], tl.float32),
        tl.full([BLOCK_M], LOWEST, tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
    )
    # Keys up to here are visible to the tile's first row, so to all of its rows.
    visible = tl.minimum(context_len + first_row // GROUP + 1, stop) // BLOCK_N * BLOCK_N
    visible = tl.maximum(visible, start)
    state = attend(
        state, q_tile, k_head, v_head, k_desc, v_desc, pages, kv_head, start, visible, position, qk_scale,
        stride_k_page, stride_k_token, stride_v_page, stride_v_token,
        BLOCK_N, HEAD_DIM, PAGE_SIZE, STAGES, TMA, WIDEN, False,
    )  # fmt: skip
    # The tail is at most a few tiles: pipelining it would only add code and shared memory.
    acc, row_max, row_sum = attend(
        state, q_tile, k_head, v_head, k_desc, v_desc, pages, kv_head, visible, stop, position, qk_scale,
        stride_k_page, stride_k_token, stride_v_page, stride_v_token,
        BLOCK_N, HEAD_DIM, PAGE_SIZE, 1, TMA, WIDEN, True,
    )  # fmt: skip

    if slot < 0:
        o_offset = (q_start + token).to(tl.int64) * stride_o_token + head * stride_o_head
        result = narrow(acc / row_sum[:, None], out.dtype.element_ty, WIDEN)
        tl.store(out + o_offset[:, None] + dims[None, :], result, mask=valid[:, None])
    else:
        partial = kv_head.to(tl.int64) * partial_rows + slot + tl.arange(0, BLOCK_M)
        # Not divided by the sum where they are stored in bfloat16: it has the range of float32, and the same relative
        # error whatever the size.
        values = narrow(acc, partial_out.dtype.element_ty, WIDEN)
        tl.store(partial_out + partial[:, None] * HEAD_DIM + dims[None, :], values, mask=valid[:, None])
        tl.store(partial_max + partial, row_max, mask=valid)
        tl.store(partial_sum + partial, row_sum, mask=valid)


@triton.jit
def whole_tile(
    item, merge, kv_head, q, k_cache, v_cache, k_desc, v_desc, out, block_table, partial_out, partial_max, partial_sum,
    counters, partial_rows, qk_scale, stride_q_token, stride_q_head, stride_o_token, stride_o_head,
    stride_k_page, stride_k_token, stride_k_head, stride_v_page, stride_v_token, stride_v_head, stride_table,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr, LAST_MERGES: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute one work item for one KV head and, if it is the last of its tile and LAST_MERGES, merge the tile."""
    tile(
        item, kv_head, q, k_cache, v_cache, k_desc, v_desc, out, block_table, partial_out, partial_max, partial_sum,
        partial_rows, qk_scale, stride_q_token, stride_q_head, stride_o_token, stride_o_head,
        stride_k_page, stride_k_token, stride_k_head, stride_v_page, stride_v_token, stride_v_head, stride_table,
        GROUP, BLOCK_M, BLOCK_N, HEAD_DIM, PAGE_SIZE, STAGES, TMA, WIDEN,
    )  # fmt: skip
    if LAST_MERGES:
        merge_if_last(
            item, merge, kv_head, out, partial_out, partial_max, partial_sum, counters, partial_rows,
            stride_o_token, stride_o_head, GROUP, HEAD_DIM, BLOCK_M, WIDEN,
        )  # fmt: skip


@triton.jit
def unit(
    number, kv_head, items, merges, q, k_cache, v_cache, k_long, v_long, k_short, v_short, out, block_table,
    partial_out, partial_max, partial_sum, counters, partial_rows, qk_scale,
    stride_q_token, stride_q_head, stride_o_token, stride_o_head,
    stride_k_page, stride_k_token, stride_k_head, stride_v_page, stride_v_token, stride_v_head, stride_table,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, LONG_M: tl.constexpr, LONG_N: tl.constexpr,
    SHORT_M: tl.constexpr, SHORT_N: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    LAST_MERGES: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute item `number` for one KV head, in the body of its sequence."""
    item = items + number * ITEM
    merge = merges + number * MERGE
    if LONG_M == SHORT_M and LONG_N == SHORT_N:
        whole_tile(
            item, merge, kv_head, q, k_cache, v_cache, k_long, v_long, out, block_table, partial_out, partial_max,
            partial_sum, counters, partial_rows, qk_scale, stride_q_token, stride_q_head, stride_o_token,
            stride_o_head, stride_k_page, stride_k_token, stride_k_head, stride_v_page, stride_v_token, stride_v_head,
            stride_table, GROUP, LONG_M, LONG_N, HEAD_DIM, PAGE_SIZE, STAGES, TMA, LAST_MERGES, WIDEN,
        )  # fmt: skip
    elif tl.load(item + 2) > SHORT_TOKENS * GROUP:
        whole_tile(
            item, merge, kv_head, q, k_cache, v_cache, k_long, v_long, out, block_table, partial_out, partial_max,
            partial_sum, counters, partial_rows, qk_scale, stride_q_token, stride_q_head, stride_o_token,
            stride_o_head, stride_k_page, stride_k_token, stride_k_head, stride_v_page, stride_v_token, stride_v_head,
            stride_table, GROUP, LONG_M, LONG_N, HEAD_DIM, PAGE_SIZE, STAGES, TMA, LAST_MERGES, WIDEN,
        )  # fmt: skip
    else:
        whole_tile(
            item, merge, kv_head, q, k_cache, v_cache, k_short, v_short, out, block_table, partial_out, partial_max,
            partial_sum, counters, partial_rows, qk_scale, stride_q_token, stride_q_head, stride_o_token,
            stride_o_head, stride_k_page, stride_k_token, stride_k_head, stride_v_page, stride_v_token, stride_v_head,
            stride_table, GROUP, SHORT_M, SHORT_N, HEAD_DIM, PAGE_SIZE, STAGES, TMA, LAST_MERGES, WIDEN,
        )  # fmt: skip


@triton.jit(do_not_specialize=["partial_rows", "stride_table"])
def attention_kernel(
    items, merges, counts, q, k_cache, v_cache, k_long, v_long, k_short, v_short, out, block_table,
    partial_out, partial_max, partial_sum, counters, partial_rows, qk_scale,
    stride_q_token, stride_q_head, stride_o_token, stride_o_head,
    stride_k_page, stride_k_token, stride_k_head, stride_v_page, stride_v_token, stride_v_head, stride_table,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, LONG_M: tl.constexpr, LONG_N: tl.constexpr,
    SHORT_M: tl.constexpr, SHORT_N: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr, PART: tl.constexpr,
    HEADS_FIRST: tl.constexpr, LAST_MERGES: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute the `counts[0]` items of the work list, or a PART of them: the first `counts[2]` ("long") or the others.

    The grid is (items, KV heads), or the other way round with HEADS_FIRST; programs past the list do nothing, so that
    a captured grid serves shorter lists.
    """
    if HEADS_FIRST:
        kv_head = tl.program_id(0)
        number = tl.program_id(1)
    else:
        number = tl.program_id(0)
        kv_head = tl.program_id(1)
    if PART == "short":
        number += tl.load(counts + 2)
    stop = tl.load(counts + 2) if PART == "long" else tl.load(counts)
    if number < stop:
        unit(
            number, kv_head, items, merges, q, k_cache, v_cache, k_long, v_long, k_short, v_short, out, block_table,
            partial_out, partial_max, partial_sum, counters, partial_rows, qk_scale,
            stride_q_token, stride_q_head, stride_o_token, stride_o_head,
            stride_k_page, stride_k_token, stride_k_head, stride_v_page, stride_v_token, stride_v_head, stride_table,
            GROUP, HEAD_DIM, PAGE_SIZE, LONG_M, LONG_N, SHORT_M, SHORT_N, STAGES, TMA, LAST_MERGES, WIDEN,
        )  # fmt: skip
