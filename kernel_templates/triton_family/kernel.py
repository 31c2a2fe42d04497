"""The attention kernels: a program computes a work item, or one item after another.

A work item is a tile of query rows over a range of keys. Rows of a sequence are its (query token, head of the group)
pairs, tokens first: row r is token r // GROUP and query head kv_head * GROUP + r % GROUP. So a tile is full whatever
the group, and a group larger than a tile is split. The online softmax is FlashAttention's (arXiv:2205.14135,
2307.08691), in base 2 with the scale folded in.

The arguments `work`, `inputs`, `partials`, `features`, `strides`, `LAYER`, `LONG`, `SHORT` and `CODE` are the records
of `launch.arguments`.
"""

# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
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
    """A mask [rows, keys] of the keys before `stop` that each row sees."""
    position, _, context_len, word, has_words, _ = rows
    visible = key[None, :] <= position[:, None]
    if WINDOW:
        visible = visible & (key[None, :] > position[:, None] - WINDOW)
    if features.tree_mask is not None:
        own = key - context_len
        by_word = has_words & (own >= 0) & (key < stop)
        # By halves, because a tile of 64-bit numbers would take twice the registers of the scores.
        low_half, high_half = word.to(tl.int32), (word >> 32).to(tl.int32)
        half = tl.where((own < 32)[None, :], low_half[:, None], high_half[:, None])
        bit = (half >> (own & 31)[None, :]) & 1
        visible = tl.where(by_word[None, :], bit != 0, visible)
    return visible


@triton.jit
def is_written(key, low, stop, WINDOW: tl.constexpr):
    """True for keys that must be in the cache. Keys before `low`, which no row's window reaches, may be gone."""
    return (key >= low) & (key < stop) if WINDOW else key < stop


@triton.jit
def pages_of(pages, first, low, stop, BLOCK_N: tl.constexpr, LAYER: tl.constexpr):
    """The pages of BLOCK_N keys from `first` on, or one number where they share a page; 0 past the last key."""
    if LAYER.PAGE_SIZE % BLOCK_N == 0:
        page = tl.load(pages + first // LAYER.PAGE_SIZE, mask=first < stop, other=0)
    else:
        key = first + tl.arange(0, BLOCK_N)
        page = tl.load(pages + key // LAYER.PAGE_SIZE, mask=is_written(key, low, stop, LAYER.WINDOW), other=0)
    return page


@triton.jit
def attend(
    state, q, caches, descs, pages, kv_head, start, stop, rows, features, qk_scales, strides,
    BLOCK_N: tl.constexpr, LAYER: tl.constexpr, CODE: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold keys start to stop, start a multiple of BLOCK_N, into `state` (accumulator, row maximum, row sum).

    caches, descs: K and V of the KV head behind pointers, and their TMA descriptors. rows: each row's position, word of
    the tree mask and ALiBi slope; the tile's first key that any row sees, its context length, and whether the words
    count. qk_scales: the factors of per-row numbers and of scores. Without MASKED all keys are visible to all rows, and
    stop is a multiple of BLOCK_N too. The row maximum may be smaller by a constant: exponents are relative to it.
    """
    acc, row_max, row_sum = state
    SHIFT: tl.constexpr = shift_of(q.dtype)
    k_cache, v_cache = caches
    k_desc, v_desc = descs
    of_rows, of_scores = qk_scales
    position, low, _, _, _, slope = rows
    HEAD_DIM: tl.constexpr = LAYER.HEAD_DIM
    VALUE_DIM: tl.constexpr = LAYER.VALUE_DIM
    PAGE_SIZE: tl.constexpr = LAYER.PAGE_SIZE
    K_DIM: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    V_DIM: tl.constexpr = triton.next_power_of_2(VALUE_DIM)
    ALIBI: tl.constexpr = features.alibi_slopes is not None
    columns = tl.arange(0, BLOCK_N)
    k_dims = tl.arange(0, K_DIM)
    v_dims = tl.arange(0, V_DIM)
    page = pages_of(pages, start, low, stop, BLOCK_N, LAYER)
    for first in tl.range(start, stop, BLOCK_N, num_stages=STAGES):
        key = first + columns
        written = is_written(key, low, stop, LAYER.WINDOW)
        slot = first % PAGE_SIZE + columns if PAGE_SIZE % BLOCK_N == 0 else key % PAGE_SIZE
        this_page = page
        if CODE.LOAD == "int64":
            this_page, slot = page.to(tl.int64), slot.to(tl.int64)
        # Looked up one tile ahead: loads whose addresses need another load of the same tile get one stage less.
        page = pages_of(pages, first + BLOCK_N, low, stop, BLOCK_N, LAYER)
        if CODE.LOAD == "tma":
            index = [this_page, kv_head, first % PAGE_SIZE, 0]
            k = k_desc.load(index).reshape(BLOCK_N, K_DIM)
        else:
            # Keys are rows, like those of V, so that both need the same pages in the same threads.
            k_offset = this_page * strides.k_page + slot * strides.k_token
            k = load_tile(
                k_cache + k_offset[:, None] + k_dims[None, :], written, k_dims < HEAD_DIM, MASKED, K_DIM != HEAD_DIM
            )
        scores = dot(q, k.T.to(q.dtype), CODE.WIDEN)
        if MASKED or LAYER.SOFT_CAP is not None or ALIBI:
            scores = logits(scores, first, position, slope, of_scores, LAYER.SOFT_CAP, ALIBI)
            if MASKED:
                scores = tl.where(seen(key, stop, rows, features, LAYER.WINDOW), scores, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1) - SHIFT)
            p = weights(scores - new_max[:, None], SHIFT)
        else:
            new_max = tl.maximum(row_max, tl.max(scores, 1) * of_rows - SHIFT)
            p = weights(scores * of_scores - new_max[:, None], SHIFT)
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        if CODE.LOAD == "tma":
            v = v_desc.load(index).reshape(BLOCK_N, V_DIM).to(q.dtype)
            if MASKED:
                # A probability of 0 does not cancel a NaN in a slot that was never written.
                v = tl.where(written[:, None], v, 0.0)
        else:
            v_offset = this_page * strides.v_page + slot * strides.v_token
            v = load_tile(
                v_cache + v_offset[:, None] + v_dims[None, :], written, v_dims < VALUE_DIM, MASKED, V_DIM != VALUE_DIM
            ).to(q.dtype)
        acc = dot(narrow(p, v.dtype, CODE.WIDEN), v, CODE.WIDEN, acc)
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def tile(
    item, kv_head, inputs, descs, out, block_table, partials, partial_rows, features, qk_scale, strides, stride_table,
    BODY: tl.constexpr, LAYER: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    """Compute one work item for one KV head."""
    q_start = tl.load(item)
    context_len = tl.load(item + 1)
    num_rows = tl.load(item + 2)
    first_row = tl.load(item + 3)
    GROUP: tl.constexpr = LAYER.GROUP
    HEAD_DIM: tl.constexpr = LAYER.HEAD_DIM
    VALUE_DIM: tl.constexpr = LAYER.VALUE_DIM
    WINDOW: tl.constexpr = LAYER.WINDOW
    BLOCK_M: tl.constexpr = BODY.block_m
    BLOCK_N: tl.constexpr = BODY.block_n
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
    q_offset = (q_start + token).to(tl.int64) * strides.q_token + head.to(tl.int64) * strides.q_head
    q_tile = load_tile(
        inputs.q + q_offset[:, None] + k_dims[None, :], valid, k_dims < HEAD_DIM, True, K_DIM != HEAD_DIM
    )
    position = context_len + token
    k_head = inputs.k_cache + kv_head.to(tl.int64) * strides.k_head
    v_head = inputs.v_cache + kv_head.to(tl.int64) * strides.v_head
    caches = (k_head, v_head)
    if features.k_scale is not None:
        qk_scale = qk_scale * tl.load(features.k_scale + kv_head)
    if features.q_scale is not None:
        qk_scale = qk_scale * tl.load(features.q_scale + kv_head)
        # Exact, like keys in 8 bits; products of the largest are summed in float32, far from its largest number.
        q_tile = q_tile.to(tl.float16)
    qk_scales = (qk_scale, qk_scale)
    if features.k_scale is not None and q_tile.dtype == tl.bfloat16:
        q_tile, power = in_half(q_tile)
        qk_scales = (qk_scale * power, (qk_scale * power)[:, None])

    # Without a window, keys before `common` are visible to the tile's first row, so to all of its rows.
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
        # A sink is a key without a value. Only the first item of a tile sees it, before all other keys.
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
        # Keys before `whole` are outside the window of the tile's last row.
        last_row = tl.minimum(first_row + BLOCK_M, num_rows) - 1
        outside = tl.maximum(context_len + last_row // GROUP + 1 - WINDOW, 0)
        whole = tl.minimum(tl.maximum(tl.cdiv(outside, BLOCK_N) * BLOCK_N, start), visible)
        state = attend(
            state, q_tile, caches, descs, pages, kv_head, start, whole, rows, features, qk_scales, strides,
            BLOCK_N, LAYER, CODE, 1, True,
        )  # fmt: skip
    state = attend(
        state, q_tile, caches, descs, pages, kv_head, whole, visible, rows, features, qk_scales, strides,
        BLOCK_N, LAYER, CODE, CODE.STAGES, False,
    )  # fmt: skip
    # The tail is at most a few tiles: pipelining it would only add code and shared memory.
    acc, row_max, row_sum = attend(
        state, q_tile, caches, descs, pages, kv_head, visible, stop, rows, features, qk_scales, strides,
        BLOCK_N, LAYER, CODE, 1, True,
    )  # fmt: skip
    if features.sinks is not None and SINK_LAST:
        # In float16 the sink comes last: if it outweighs all keys, their probabilities would vanish beside it.
        new_max = tl.where(is_first, tl.maximum(sink, row_max), row_max)
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.where(is_first, tl.exp2(tl.maximum(sink, LOWEST) - new_max), 0.0)
        acc = acc * shrink[:, None]
        row_max = new_max
    if features.v_scale is not None:
        acc = acc * tl.load(features.v_scale + kv_head)

    if slot < 0:
        write_rows(
            acc, row_max, row_sum, q_start + token, head, valid, out, features, strides.o_token, strides.o_head,
            LAYER, CODE.WIDEN,
        )  # fmt: skip
    else:
        partial = kv_head.to(tl.int64) * partial_rows + slot + tl.arange(0, BLOCK_M)
        # Partial outputs are not divided by the sum. In bfloat16 that costs nothing: it has the range of float32, and
        # the same relative error at every size.
        values = narrow(acc, partials.out.dtype.element_ty, CODE.WIDEN)
        v_dims = tl.arange(0, V_DIM)
        stored = valid[:, None] & (v_dims < VALUE_DIM)[None, :] if V_DIM != VALUE_DIM else valid[:, None]
        tl.store(partials.out + partial[:, None] * VALUE_DIM + v_dims[None, :], values, mask=stored)
        tl.store(partials.max + partial, row_max, mask=valid)
        tl.store(partials.sum + partial, row_sum, mask=valid)


@triton.jit
def whole_tile(
    item, merge, kv_head, inputs, descs, out, block_table, partials, partial_rows, features, qk_scale, strides,
    stride_table, BODY: tl.constexpr, LAYER: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    """Compute one work item for one KV head and, with LAST_MERGES in the tile's last program, merge the tile."""
    tile(
        item, kv_head, inputs, descs, out, block_table, partials, partial_rows, features, qk_scale, strides,
        stride_table, BODY, LAYER, CODE,
    )  # fmt: skip
    if CODE.LAST_MERGES:
        merge_if_last(
            item, merge, kv_head, out, partials, partial_rows, features, strides.o_token, strides.o_head,
            LAYER, BODY.block_m, CODE.WIDEN,
        )  # fmt: skip


@triton.jit
def unit(
    number, kv_head, work, inputs, k_long, v_long, k_short, v_short, out, block_table, partials, partial_rows, features,
    qk_scale, strides, stride_table,
    LAYER: tl.constexpr, LONG: tl.constexpr, SHORT: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    """Compute item `number` for one KV head, in the body of its sequence."""
    item = work.items + number * ITEM
    merge = work.merges + number * MERGE
    if LONG.block_m == SHORT.block_m and LONG.block_n == SHORT.block_n:
        whole_tile(
            item, merge, kv_head, inputs, (k_long, v_long), out, block_table, partials, partial_rows, features,
            qk_scale, strides, stride_table, LONG, LAYER, CODE,
        )  # fmt: skip
    elif tl.load(item + 2) > SHORT_TOKENS * LAYER.GROUP:
        whole_tile(
            item, merge, kv_head, inputs, (k_long, v_long), out, block_table, partials, partial_rows, features,
            qk_scale, strides, stride_table, LONG, LAYER, CODE,
        )  # fmt: skip
    else:
        whole_tile(
            item, merge, kv_head, inputs, (k_short, v_short), out, block_table, partials, partial_rows, features,
            qk_scale, strides, stride_table, SHORT, LAYER, CODE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["partial_rows", "stride_table"])
def attention_kernel(
    work, inputs, k_long, v_long, k_short, v_short, out, block_table, partials, partial_rows, features, qk_scale,
    strides, stride_table,
    LAYER: tl.constexpr, LONG: tl.constexpr, SHORT: tl.constexpr, CODE: tl.constexpr,
    PART: tl.constexpr, HEADS_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the `counts[0]` items of the work list, or a PART of them: the first `counts[2]` ("long") or the others.

    The grid is (items, KV heads), or the other way round with HEADS_FIRST. Programs past the list do nothing, so that a
    captured grid serves shorter lists.
    """
    if PDL:
        # Right at the start: the reduction waits for the end of all programs whenever it is launched. Its launch is
        # then already over, and no program of this grid has to make way for it.
        gdc_launch_dependents()
    if HEADS_FIRST:
        kv_head = tl.program_id(0)
        number = tl.program_id(1)
    else:
        number = tl.program_id(0)
        kv_head = tl.program_id(1)
    if PART == "short":
        number += tl.load(work.counts + 2)
    stop = tl.load(work.counts + 2) if PART == "long" else tl.load(work.counts)
    if number < stop:
        unit(
            number, kv_head, work, inputs, k_long, v_long, k_short, v_short, out, block_table, partials, partial_rows,
            features, qk_scale, strides, stride_table, LAYER, LONG, SHORT, CODE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["partial_rows", "stride_table"])
def persistent_attention_kernel(
    work, inputs, k_long, v_long, k_short, v_short, out, block_table, partials, partial_rows, features, qk_scale,
    strides, stride_table,
    LAYER: tl.constexpr, LONG: tl.constexpr, SHORT: tl.constexpr, CODE: tl.constexpr,
    HEADS: tl.constexpr, HEADS_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the `counts[0]` items of the work list for each of HEADS KV heads, whatever the grid.

    Program p takes units p, p + programs, ... of the (item, KV head) pairs, counted along the items of one head after
    another, or along the heads of one item after another with HEADS_FIRST.
    """
    if PDL:
        gdc_launch_dependents()
    num_items = tl.load(work.counts)
    for index in tl.range(tl.program_id(0), num_items * HEADS, tl.num_programs(0)):
        if HEADS_FIRST:
            kv_head = index % HEADS
            number = index // HEADS
        else:
            kv_head = index // num_items
            number = index % num_items
        unit(
            number, kv_head, work, inputs, k_long, v_long, k_short, v_short, out, block_table, partials, partial_rows,
            features, qk_scale, strides, stride_table, LAYER, LONG, SHORT, CODE,
        )  # fmt: skip
