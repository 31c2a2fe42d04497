"""The attention kernel: one program computes one work item, a tile of query rows over a range of keys.

Rows of a sequence are its (query token, head of the group) pairs, tokens first: row r is token r // GROUP and query
head kv_head * GROUP + r % GROUP. So a tile is full whatever the group, and a group larger than a tile is split. The
online softmax is FlashAttention's (arXiv:2205.14135, 2307.08691), in base 2 with the scale folded in.
"""

# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ..batch import SHORT_QUERY, TREE_TOKENS
from ..launch.plan import ITEM_FIELDS
from .arithmetic import LOG2_E, LOWEST, dot, in_half, load_tile, logits, narrow, shift_of, weights
from .combine import MERGE, merge_if_last, write_rows

ITEM: tl.constexpr = tl.constexpr(ITEM_FIELDS)
SHORT_TOKENS: tl.constexpr = tl.constexpr(SHORT_QUERY)
MOST_TREE_TOKENS: tl.constexpr = tl.constexpr(TREE_TOKENS)


@triton.jit
def seen(key, stop, rows, features, WINDOW: tl.constexpr):
    """Which keys, of those before stop, each row sees: [rows, keys]."""
    position, _, context_len, word, has_words, _ = rows
    visible = key[None, :] <= position[:, None]
    if WINDOW:
        visible = visible & (key[None, :] > position[:, None] - WINDOW)
    if features.tree_mask is not None:
        own = key - context_len
        by_word = has_words & (own >= 0) & (key < stop)
        # By halves: a tile of 64-bit numbers would take twice the registers of the scores.
        low_half, high_half = word.to(tl.int32), (word >> 32).to(tl.int32)
        half = tl.where((own < 32)[None, :], low_half[:, None], high_half[:, None])
        bit = (half >> (own & 31)[None, :]) & 1
        visible = tl.where(by_word[None, :], bit != 0, visible)
    return visible


@triton.jit
def is_written(key, low, stop, WINDOW: tl.constexpr):
    """Which keys are in the cache: what no row sees, since its window begins at `low`, need not be there any more."""
    return (key >= low) & (key < stop) if WINDOW else key < stop


@triton.jit
def pages_of(pages, first, low, stop, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """The pages of BLOCK_N keys from `first` on, or one number where they are all in one page; 0 past the last key."""
    if PAGE_SIZE % BLOCK_N == 0:
        page = tl.load(pages + first // PAGE_SIZE, mask=first < stop, other=0)
    else:
        key = first + tl.arange(0, BLOCK_N)
        page = tl.load(pages + key // PAGE_SIZE, mask=is_written(key, low, stop, WINDOW), other=0)
    return page


@triton.jit
def attend(
    state, q, k_cache, v_cache, k_desc, v_desc, pages, kv_head, start, stop, rows, features, qk_scales,
    stride_k_page, stride_k_token, stride_v_page, stride_v_token,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, STAGES: tl.constexpr, LOAD: tl.constexpr, WIDEN: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Fold keys start to stop, start a multiple of BLOCK_N, into `state` (accumulator, row maximum, row sum).

    `rows`: of each row its position, the word of its tree mask and its ALiBi slope; of the tile the first key that any
    row sees, the context length, and whether the words count. Without MASKED all keys are visible to all rows and stop
    is a multiple of BLOCK_N too. `qk_scales`: of what is one number for each row, and of scores. The "maximum" may be
    less by a constant: it is what the exponents are relative to. LOAD: K and V come through TMA ("tma"), or through
    pointers at offsets in "int32" or "int64".
    """
    acc, row_max, row_sum = state
    SHIFT: tl.constexpr = shift_of(q.dtype)
    of_rows, of_scores = qk_scales
    position, low, _, _, _, slope = rows
    K_DIM: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    V_DIM: tl.constexpr = triton.next_power_of_2(VALUE_DIM)
    ALIBI: tl.constexpr = features.alibi_slopes is not None
    columns = tl.arange(0, BLOCK_N)
    k_dims = tl.arange(0, K_DIM)
    v_dims = tl.arange(0, V_DIM)
    page = pages_of(pages, start, low, stop, PAGE_SIZE, BLOCK_N, WINDOW)
    for first in tl.range(start, stop, BLOCK_N, num_stages=STAGES):
        key = first + columns
        written = is_written(key, low, stop, WINDOW)
        slot = first % PAGE_SIZE + columns if PAGE_SIZE % BLOCK_N == 0 else key % PAGE_SIZE
        this_page = page
        if LOAD == "int64":
            this_page, slot = page.to(tl.int64), slot.to(tl.int64)
        # One tile ahead: loads whose addresses wait for another load of the same tile are pipelined a stage less.
        page = pages_of(pages, first + BLOCK_N, low, stop, PAGE_SIZE, BLOCK_N, WINDOW)
        if LOAD == "tma":
            index = [this_page, kv_head, first % PAGE_SIZE, 0]
            k = k_desc.load(index).reshape(BLOCK_N, K_DIM)
        else:
            # Keys as rows, as those of V: both then need the same pages in the same threads.
            k_offset = this_page * stride_k_page + slot * stride_k_token
            k = load_tile(
                k_cache + k_offset[:, None] + k_dims[None, :], written, k_dims < HEAD_DIM, MASKED, K_DIM != HEAD_DIM
            )
        scores = dot(q, k.T.to(q.dtype), WIDEN)
        if MASKED or SOFT_CAP is not None or ALIBI:
            scores = logits(scores, first, position, slope, of_scores, SOFT_CAP, ALIBI)
            if MASKED:
                scores = tl.where(seen(key, stop, rows, features, WINDOW), scores, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1) - SHIFT)
            p = weights(scores - new_max[:, None], SHIFT)
        else:
            new_max = tl.maximum(row_max, tl.max(scores, 1) * of_rows - SHIFT)
            p = weights(scores * of_scores - new_max[:, None], SHIFT)
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        if LOAD == "tma":
            v = v_desc.load(index).reshape(BLOCK_N, V_DIM).to(q.dtype)
            if MASKED:
                # A probability of 0 does not cancel a NaN in a slot that was never written.
                v = tl.where(written[:, None], v, 0.0)
        else:
            v_offset = this_page * stride_v_page + slot * stride_v_token
            v = load_tile(
                v_cache + v_offset[:, None] + v_dims[None, :], written, v_dims < VALUE_DIM, MASKED, V_DIM != VALUE_DIM
            ).to(q.dtype)
        acc = dot(narrow(p, v.dtype, WIDEN), v, WIDEN, acc)
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def tile(
    item, kv_head, q, k_cache, v_cache, k_desc, v_desc, out, block_table, partial_out, partial_max, partial_sum,
    partial_rows, features, qk_scale, stride_q_token, stride_q_head, stride_o_token, stride_o_head,
    stride_k_page, stride_k_token, stride_k_head, stride_v_page, stride_v_token, stride_v_head, stride_table,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    STAGES: tl.constexpr, LOAD: tl.constexpr, WIDEN: tl.constexpr,
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

    K_DIM: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    V_DIM: tl.constexpr = triton.next_power_of_2(VALUE_DIM)
    row = first_row + tl.arange(0, BLOCK_M)
    k_dims = tl.arange(0, K_DIM)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    valid = row < num_rows
    q_offset = (q_start + token).to(tl.int64) * stride_q_token + head.to(tl.int64) * stride_q_head
    q_tile = load_tile(q + q_offset[:, None] + k_dims[None, :], valid, k_dims < HEAD_DIM, True, K_DIM != HEAD_DIM)
    position = context_len + token
    k_head = k_cache + kv_head.to(tl.int64) * stride_k_head
    v_head = v_cache + kv_head.to(tl.int64) * stride_v_head
    if features.k_scale is not None:
        qk_scale = qk_scale * tl.load(features.k_scale + kv_head)
    if features.q_scale is not None:
        qk_scale = qk_scale * tl.load(features.q_scale + kv_head)
        # Exact, as that of keys in 8 bits is; products of the largest are summed in float32, far from its end.
        q_tile = q_tile.to(tl.float16)
    qk_scales = (qk_scale, qk_scale)
    if features.k_scale is not None and q_tile.dtype == tl.bfloat16:
        q_tile, power = in_half(q_tile)
        qk_scales = (qk_scale * power, (qk_scale * power)[:, None])

    # The keys up to `common` are visible to the tile's first row, so to all of its rows; windows aside.
    common = context_len + first_row // GROUP + 1
    low = 0
    if WINDOW:
        low = tl.maximum(common - WINDOW, 0)
    word, has_words = 0, False
    if features.tree_mask is not None:
        has_words = (num_rows > GROUP) & (num_rows <= MOST_TREE_TOKENS * GROUP)
        word = tl.load(features.tree_mask + q_start + token, mask=valid, other=0)
        common = tl.where(has_words, context_len, common)
        low = tl.where(has_words, tl.minimum(low, context_len), low)
    slope = 0.0
    if features.alibi_slopes is not None:
        slope = tl.load(features.alibi_slopes + head, mask=valid, other=0.0) * LOG2_E
    rows = (position, low, context_len, word, has_words, slope)

    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    SINK_LAST: tl.constexpr = shift_of(q_tile.dtype) > 0.0
    if features.sinks is not None:
        # A sink is a key without a value that one item sees before all others: the first of its tile.
        sink = tl.load(features.sinks + head, mask=valid, other=0.0) * LOG2_E
        is_first = start == low // BLOCK_N * BLOCK_N
        if not SINK_LAST:
            row_max = tl.where(is_first, tl.maximum(sink, LOWEST), row_max)
            row_sum = tl.where(is_first, 1.0, row_sum)
    state = (tl.zeros([BLOCK_M, V_DIM], tl.float32), row_max, row_sum)
    visible = tl.minimum(common, stop) // BLOCK_N * BLOCK_N
    visible = tl.maximum(visible, start)
    whole = start
    if WINDOW:
        # Before `whole` lie keys that are outside the window of the tile's last row.
        last_row = tl.minimum(first_row + BLOCK_M, num_rows) - 1
        outside = tl.maximum(context_len + last_row // GROUP + 1 - WINDOW, 0)
        whole = tl.minimum(tl.maximum(tl.cdiv(outside, BLOCK_N) * BLOCK_N, start), visible)
        state = attend(
            state, q_tile, k_head, v_head, k_desc, v_desc, pages, kv_head, start, whole, rows, features, qk_scales,
            stride_k_page, stride_k_token, stride_v_page, stride_v_token,
            BLOCK_N, HEAD_DIM, VALUE_DIM, PAGE_SIZE, WINDOW, SOFT_CAP, 1, LOAD, WIDEN, True,
        )  # fmt: skip
    state = attend(
        state, q_tile, k_head, v_head, k_desc, v_desc, pages, kv_head, whole, visible, rows, features, qk_scales,
        stride_k_page, stride_k_token, stride_v_page, stride_v_token,
        BLOCK_N, HEAD_DIM, VALUE_DIM, PAGE_SIZE, WINDOW, SOFT_CAP, STAGES, LOAD, WIDEN, False,
    )  # fmt: skip
    # The tail is at most a few tiles: pipelining it would only add code and shared memory.
    acc, row_max, row_sum = attend(
        state, q_tile, k_head, v_head, k_desc, v_desc, pages, kv_head, visible, stop, rows, features, qk_scales,
        stride_k_page, stride_k_token, stride_v_page, stride_v_token,
        BLOCK_N, HEAD_DIM, VALUE_DIM, PAGE_SIZE, WINDOW, SOFT_CAP, 1, LOAD, WIDEN, True,
    )  # fmt: skip
    if features.sinks is not None and SINK_LAST:
        # In float16 after all others: beside a sink that outweighs them, their probabilities would vanish.
        new_max = tl.where(is_first, tl.maximum(sink, row_max), row_max)
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.where(is_first, tl.exp2(tl.maximum(sink, LOWEST) - new_max), 0.0)
        acc = acc * shrink[:, None]
        row_max = new_max
    if features.v_scale is not None:
        acc = acc * tl.load(features.v_scale + kv_head)

    if slot < 0:
        write_rows(
            acc, row_max, row_sum, q_start + token, head, valid, out, features, stride_o_token, stride_o_head,
            VALUE_DIM, WIDEN,
        )  # fmt: skip
    else:
        partial = kv_head.to(tl.int64) * partial_rows + slot + tl.arange(0, BLOCK_M)
        # Not divided by the sum where they are stored in bfloat16: it has the range of float32, and the same relative
        # error whatever the size.
        values = narrow(acc, partial_out.dtype.element_ty, WIDEN)
        v_dims = tl.arange(0, V_DIM)
        stored = valid[:, None] & (v_dims < VALUE_DIM)[None, :] if V_DIM != VALUE_DIM else valid[:, None]
        tl.store(partial_out + partial[:, None] * VALUE_DIM + v_dims[None, :], values, mask=stored)
        tl.store(partial_max + partial, row_max, mask=valid)
        tl.store(partial_sum + partial, row_sum, mask=valid)


@triton.jit
def whole_tile(
    item, merge, kv_head, q, k_cache, v_cache, k_desc, v_desc, out, block_table, partial_out, partial_max, partial_sum,
    counters, partial_rows, features, qk_scale, stride_q_token, stride_q_head, stride_o_token, stride_o_head,
    stride_k_page, stride_k_token, stride_k_head, stride_v_page, stride_v_token, stride_v_head, stride_table,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    STAGES: tl.constexpr, LOAD: tl.constexpr, LAST_MERGES: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute one work item for one KV head and, if it is the last of its tile and LAST_MERGES, merge the tile."""
    tile(
        item, kv_head, q, k_cache, v_cache, k_desc, v_desc, out, block_table, partial_out, partial_max, partial_sum,
        partial_rows, features, qk_scale, stride_q_token, stride_q_head, stride_o_token, stride_o_head,
        stride_k_page, stride_k_token, stride_k_head, stride_v_page, stride_v_token, stride_v_head, stride_table,
        GROUP, BLOCK_M, BLOCK_N, HEAD_DIM, VALUE_DIM, PAGE_SIZE, WINDOW, SOFT_CAP, STAGES, LOAD, WIDEN,
    )  # fmt: skip
    if LAST_MERGES:
        merge_if_last(
            item, merge, kv_head, out, partial_out, partial_max, partial_sum, counters, partial_rows,
            features, stride_o_token, stride_o_head, GROUP, VALUE_DIM, BLOCK_M, WIDEN,
        )  # fmt: skip


@triton.jit
def unit(
    number, kv_head, items, merges, q, k_cache, v_cache, k_long, v_long, k_short, v_short, out, block_table,
    partial_out, partial_max, partial_sum, counters, partial_rows, features, qk_scale,
    stride_q_token, stride_q_head, stride_o_token, stride_o_head,
    stride_k_page, stride_k_token, stride_k_head, stride_v_page, stride_v_token, stride_v_head, stride_table,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, LONG_M: tl.constexpr, LONG_N: tl.constexpr, SHORT_M: tl.constexpr,
    SHORT_N: tl.constexpr, STAGES: tl.constexpr, LOAD: tl.constexpr,
    LAST_MERGES: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute item `number` for one KV head, in the body of its sequence."""
    item = items + number * ITEM
    merge = merges + number * MERGE
    if LONG_M == SHORT_M and LONG_N == SHORT_N:
        whole_tile(
            item, merge, kv_head, q, k_cache, v_cache, k_long, v_long, out, block_table, partial_out, partial_max,
            partial_sum, counters, partial_rows, features, qk_scale, stride_q_token, stride_q_head, stride_o_token,
            stride_o_head, stride_k_page, stride_k_token, stride_k_head, stride_v_page, stride_v_token, stride_v_head,
            stride_table, GROUP, LONG_M, LONG_N, HEAD_DIM, VALUE_DIM, PAGE_SIZE, WINDOW, SOFT_CAP, STAGES,
            LOAD, LAST_MERGES, WIDEN,
        )  # fmt: skip
    elif tl.load(item + 2) > SHORT_TOKENS * GROUP:
        whole_tile(
            item, merge, kv_head, q, k_cache, v_cache, k_long, v_long, out, block_table, partial_out, partial_max,
            partial_sum, counters, partial_rows, features, qk_scale, stride_q_token, stride_q_head, stride_o_token,
            stride_o_head, stride_k_page, stride_k_token, stride_k_head, stride_v_page, stride_v_token, stride_v_head,
            stride_table, GROUP, LONG_M, LONG_N, HEAD_DIM, VALUE_DIM, PAGE_SIZE, WINDOW, SOFT_CAP, STAGES,
            LOAD, LAST_MERGES, WIDEN,
        )  # fmt: skip
    else:
        whole_tile(
            item, merge, kv_head, q, k_cache, v_cache, k_short, v_short, out, block_table, partial_out, partial_max,
            partial_sum, counters, partial_rows, features, qk_scale, stride_q_token, stride_q_head, stride_o_token,
            stride_o_head, stride_k_page, stride_k_token, stride_k_head, stride_v_page, stride_v_token, stride_v_head,
            stride_table, GROUP, SHORT_M, SHORT_N, HEAD_DIM, VALUE_DIM, PAGE_SIZE, WINDOW, SOFT_CAP, STAGES,
            LOAD, LAST_MERGES, WIDEN,
        )  # fmt: skip


@triton.jit(do_not_specialize=["partial_rows", "stride_table"])
def attention_kernel(
    items, merges, counts, q, k_cache, v_cache, k_long, v_long, k_short, v_short, out, block_table,
    partial_out, partial_max, partial_sum, counters, partial_rows, features, qk_scale,
    stride_q_token, stride_q_head, stride_o_token, stride_o_head,
    stride_k_page, stride_k_token, stride_k_head, stride_v_page, stride_v_token, stride_v_head, stride_table,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, LONG_M: tl.constexpr, LONG_N: tl.constexpr, SHORT_M: tl.constexpr,
    SHORT_N: tl.constexpr, STAGES: tl.constexpr, LOAD: tl.constexpr, PART: tl.constexpr,
    HEADS_FIRST: tl.constexpr, LAST_MERGES: tl.constexpr, WIDEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the `counts[0]` items of the work list, or a PART of them: the first `counts[2]` ("long") or the others.

    The grid is (items, KV heads), or the other way round with HEADS_FIRST; programs past the list do nothing, so that
    a captured grid serves shorter lists.
    """
    if PDL:
        # At once, since the reduction waits for the end of all programs whenever it is launched: so its launch is over
        # by then, and no program of this grid has to make way for it.
        gdc_launch_dependents()
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
            partial_out, partial_max, partial_sum, counters, partial_rows, features, qk_scale,
            stride_q_token, stride_q_head, stride_o_token, stride_o_head,
            stride_k_page, stride_k_token, stride_k_head, stride_v_page, stride_v_token, stride_v_head, stride_table,
            GROUP, HEAD_DIM, VALUE_DIM, PAGE_SIZE, WINDOW, SOFT_CAP, LONG_M, LONG_N, SHORT_M, SHORT_N,
            STAGES, LOAD, LAST_MERGES, WIDEN,
        )  # fmt: skip


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
