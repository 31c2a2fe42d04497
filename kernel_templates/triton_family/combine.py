"""Merges the partial results of tiles whose keys were split: in a reduction kernel, or in a tile's last program.

The kernels' arguments `partials`, `features`, `strides` and `LAYER` are the records of `launch.arguments`.
"""

# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ..launch.plan import ENTRY_FIELDS, MERGE_FIELDS
from .arithmetic import LOG2_E, LOWEST, narrow

ENTRY: tl.constexpr = tl.constexpr(ENTRY_FIELDS)
MERGE: tl.constexpr = tl.constexpr(MERGE_FIELDS)


@triton.jit
def write_rows(
    acc, row_max, row_sum, token, head, valid, out, features, stride_token, stride_head,
    LAYER: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Write the output, and the log-sum-exp if asked for, of the rows of `token` and `head` that are `valid`."""
    DIM: tl.constexpr = triton.next_power_of_2(LAYER.VALUE_DIM)
    dims = tl.arange(0, DIM)
    offset = token.to(tl.int64) * stride_token + head.to(tl.int64) * stride_head
    if features.tree_mask is not None:
        # A mask may hide every key: then the output is 0.
        acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    else:
        acc = acc / row_sum[:, None]
    result = narrow(acc, out.dtype.element_ty, WIDEN)
    if DIM == LAYER.VALUE_DIM:
        tl.store(out + offset[:, None] + dims[None, :], result, mask=valid[:, None])
    else:
        mask = valid[:, None] & (dims < LAYER.VALUE_DIM)[None, :]
        tl.store(out + offset[:, None] + dims[None, :], result, mask=mask)
    if features.lse is not None:
        lse = (row_max + tl.log2(row_sum)) / LOG2_E
        tl.store(features.lse + token.to(tl.int64) * features.stride_lse + head, lse, mask=valid)


@triton.jit
def merge_rows(
    row, num_rows, q_start, kv_head, slot, num_partials, step, out, partials, partial_rows, features,
    stride_token, stride_head,
    LAYER: tl.constexpr, ROWS: tl.constexpr, PARTIALS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of ROWS rows from `row` on, PARTIALS at a time in their order, and write the output.

    The first partial results of these rows begin at row `slot`; from one to the next it is `step` rows. Two softmaxes
    are merged by their maxima and sums: FlashAttention (arXiv:2205.14135), section 3.1.
    """
    rows = row + tl.arange(0, ROWS)
    valid = rows < num_rows
    DIM: tl.constexpr = triton.next_power_of_2(LAYER.VALUE_DIM)
    dims = tl.arange(0, DIM)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    row_max = tl.full([ROWS], LOWEST, tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    base = kv_head.to(tl.int64) * partial_rows + slot + tl.arange(0, ROWS)
    for first in range(0, num_partials, PARTIALS):
        number = first + tl.arange(0, PARTIALS)
        partial = base[:, None] + number[None, :] * step
        present = valid[:, None] & (number < num_partials)[None, :]
        # Load from L2, where other programs wrote them: this SM's L1 may hold older values.
        maxima = tl.load(partials.max + partial, mask=present, other=LOWEST, cache_modifier=".cg")
        sums = tl.load(partials.sum + partial, mask=present, other=0.0, cache_modifier=".cg")
        stored = present[:, :, None]
        if DIM != LAYER.VALUE_DIM:
            stored = stored & (dims < LAYER.VALUE_DIM)[None, None, :]
        values = tl.load(
            partials.out + partial[:, :, None] * LAYER.VALUE_DIM + dims[None, None, :], mask=stored, other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        new_max = tl.maximum(row_max, tl.max(maxima, 1))
        shrink = tl.exp2(row_max - new_max)
        weight = tl.exp2(maxima - new_max[:, None])
        row_sum = row_sum * shrink + tl.sum(sums * weight, 1)
        acc = acc * shrink[:, None] + tl.sum(values.to(tl.float32) * weight[:, :, None], 1)
        row_max = new_max
    write_rows(
        acc, row_max, row_sum, q_start + rows // LAYER.GROUP, kv_head * LAYER.GROUP + rows % LAYER.GROUP, valid, out,
        features, stride_token, stride_head, LAYER, WIDEN,
    )  # fmt: skip


@triton.jit(do_not_specialize=["partial_rows"])
def combine_kernel(
    entries, counts, out, partials, partial_rows, features, stride_token, stride_head,
    LAYER: tl.constexpr, ROWS: tl.constexpr, PARTIALS: tl.constexpr, WIDEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge ROWS rows of one entry and KV head; `counts[1]` entries, whose rows the grid's third axis shares out.

    With PDL the kernel is launched while the attention kernel still runs, reads its entry, and waits.
    """
    index = tl.program_id(0)
    kv_head = tl.program_id(1)
    offset = tl.program_id(2) * ROWS
    num_entries = tl.load(counts + 1)
    # A program past the list reads an older list's entry here, and does not use it.
    entry = entries + index * ENTRY
    q_start = tl.load(entry)
    num_rows = tl.load(entry + 2)
    first_row = tl.load(entry + 3) + offset
    slot = tl.load(entry + 8) + offset
    num_partials = tl.load(entry + 9)
    step = tl.load(entry + 10)
    if PDL:
        # Programs past the list wait too: the next launch relies on this kernel ending after the attention kernel.
        gdc_wait()
    if (index < num_entries) & (first_row < num_rows):
        merge_rows(
            first_row, num_rows, q_start, kv_head, slot, num_partials, step, out, partials, partial_rows, features,
            stride_token, stride_head, LAYER, ROWS, PARTIALS, WIDEN,
        )  # fmt: skip


@triton.jit
def merge_if_last(
    item, merge, kv_head, out, partials, partial_rows, features, stride_token, stride_head,
    LAYER: tl.constexpr, BLOCK_M: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Merge a tile's partial results in the last of its programs; each program calls this after writing its own.

    The counter of a tile and KV head has the index of the tile's first partial result. Any program may be the last: the
    partial results are merged in their order, so the result is the same.
    """
    if tl.load(item + 7) >= 0:
        base = tl.load(merge)
        num_partials = tl.load(merge + 1)
        counter = partials.counters + kv_head.to(tl.int64) * partial_rows + base
        # One thread does the atomic. The barrier orders the partial results of all threads before it, so its release
        # makes all of them visible. Its acquire, and the barrier by which its value reaches the other threads, order
        # their loads after the releases of the other programs.
        tl.debug_barrier()
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_partials - 1:
            # Ready for the next launch, which sees everything this one wrote.
            tl.store(counter, 0)
            num_rows = tl.load(item + 2)
            first_row = tl.load(item + 3)
            tile_rows = tl.minimum(num_rows - first_row, BLOCK_M)
            # Short tiles have many partial results: load few rows of many. Tall tiles the other way round. Either way
            # as many loads are in flight as there are registers for.
            ROWS: tl.constexpr = 4 if BLOCK_M <= 32 else 16
            for offset in range(0, tile_rows, ROWS):
                merge_rows(
                    first_row + offset, num_rows, tl.load(item), kv_head, base + offset, num_partials, tile_rows,
                    out, partials, partial_rows, features, stride_token, stride_head,
                    LAYER, ROWS, 32 // ROWS, WIDEN,
                )  # fmt: skip
