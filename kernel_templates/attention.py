"""The attention kernel: one program computes one work item, a tile of query rows over a range of keys.

Rows of a sequence are its (query token, head of the group) pairs, tokens first: row r is token r // GROUP and query
head kv_head * GROUP + r % GROUP. So a tile is full whatever the group, and a group larger than a tile is split. The
online softmax is FlashAttention's (arXiv:2205.14135, 2307.08691), in base 2 with the scale folded in.
"""

# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false
import triton
import triton.language as tl

# An item of the work list, as int32: where the sequence's tokens start in q, its context length, its rows, the tile's
# first row, the first key, the key after the last, the sequence, and the tile's first row in the partial results
# (negative: the item covers all its keys and writes the output).
ITEM_FIELDS = 8

# Finite, so that a row that sees no key of an item has weight 0 and not NaN.
LOWEST: tl.constexpr = tl.constexpr(-1.0e30)


@triton.jit
def dot(a, b, WIDEN: tl.constexpr):
    """a @ b in float32. The interpreter multiplies bfloat16 wrongly, so there, and only there, operands are widened."""
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def narrow(x, dtype: tl.constexpr, WIDEN: tl.constexpr):
    """x, float32, in `dtype`. The interpreter cuts off the low bits of bfloat16: there, round to nearest even first."""
    if WIDEN:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


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
        tl.store(partial_out + partial[:, None] * HEAD_DIM + dims[None, :], acc, mask=valid[:, None])
        tl.store(partial_max + partial, row_max, mask=valid)
        tl.store(partial_sum + partial, row_sum, mask=valid)


@triton.jit(do_not_specialize=["partial_rows", "stride_table"])
def attention_kernel(
    items, counts, q, k_cache, v_cache, k_long, v_long, k_short, v_short, out, block_table,
    partial_out, partial_max, partial_sum, partial_rows, qk_scale,
    stride_q_token, stride_q_head, stride_o_token, stride_o_head,
    stride_k_page, stride_k_token, stride_k_head, stride_v_page, stride_v_token, stride_v_head, stride_table,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, LONG_M: tl.constexpr, LONG_N: tl.constexpr,
    SHORT_M: tl.constexpr, SHORT_N: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    HEADS_FIRST: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute the work list: `counts[0]` items in long tiles, then up to `counts[1]` in short ones.

    The grid is (items, KV heads), or the other way round with HEADS_FIRST; programs past the list do nothing, so that
    a captured grid serves shorter lists.
    """
    if HEADS_FIRST:
        kv_head = tl.program_id(0)
        index = tl.program_id(1)
    else:
        index = tl.program_id(0)
        kv_head = tl.program_id(1)
    num_long = tl.load(counts)
    if index < tl.load(counts + 1):
        item = items + index * 8
        if LONG_M == SHORT_M and LONG_N == SHORT_N:
            tile(
                item, kv_head, q, k_cache, v_cache, k_long, v_long, out, block_table, partial_out, partial_max,
                partial_sum, partial_rows, qk_scale, stride_q_token, stride_q_head, stride_o_token, stride_o_head,
                stride_k_page, stride_k_token, stride_k_head, stride_v_page, stride_v_token, stride_v_head,
                stride_table, GROUP, LONG_M, LONG_N, HEAD_DIM, PAGE_SIZE, STAGES, TMA, WIDEN,
            )  # fmt: skip
        elif index < num_long:
            tile(
                item, kv_head, q, k_cache, v_cache, k_long, v_long, out, block_table, partial_out, partial_max,
                partial_sum, partial_rows, qk_scale, stride_q_token, stride_q_head, stride_o_token, stride_o_head,
                stride_k_page, stride_k_token, stride_k_head, stride_v_page, stride_v_token, stride_v_head,
                stride_table, GROUP, LONG_M, LONG_N, HEAD_DIM, PAGE_SIZE, STAGES, TMA, WIDEN,
            )  # fmt: skip
        else:
            tile(
                item, kv_head, q, k_cache, v_cache, k_short, v_short, out, block_table, partial_out, partial_max,
                partial_sum, partial_rows, qk_scale, stride_q_token, stride_q_head, stride_o_token, stride_o_head,
                stride_k_page, stride_k_token, stride_k_head, stride_v_page, stride_v_token, stride_v_head,
                stride_table, GROUP, SHORT_M, SHORT_N, HEAD_DIM, PAGE_SIZE, STAGES, TMA, WIDEN,
            )  # fmt: skip
