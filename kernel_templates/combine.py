"""Merges the partial results of tiles whose keys were split: in a kernel of its own, or in a tile's last program."""

# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
import triton
import triton.language as tl

from .arithmetic import LOWEST, narrow
from .plan import ENTRY_FIELDS, MERGE_FIELDS

ENTRY: tl.constexpr = tl.constexpr(ENTRY_FIELDS)
MERGE: tl.constexpr = tl.constexpr(MERGE_FIELDS)


@triton.jit
def merge_rows(
    row, num_rows, q_start, kv_head, slot, num_partials, stride, out, partial_out, partial_max, partial_sum,
    partial_rows, stride_o_token, stride_o_head,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, PARTIALS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of ROWS rows from `row` on, PARTIALS at a time in their order, and write the output.

    The first partial results of these rows begin at row `slot`; `stride` rows lie between one and the next. The merge
    of two softmaxes by their maxima and sums: FlashAttention (arXiv:2205.14135), section 3.1.
    """
    rows = row + tl.arange(0, ROWS)
    valid = rows < num_rows
    dims = tl.arange(0, HEAD_DIM)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    row_max = tl.full([ROWS], LOWEST, tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    base = kv_head.to(tl.int64) * partial_rows + slot + tl.arange(0, ROWS)
    for first in range(0, num_partials, PARTIALS):
        number = first + tl.arange(0, PARTIALS)
        partial = base[:, None] + number[None, :] * stride
        present = valid[:, None] & (number < num_partials)[None, :]
        # From L2, where the programs that wrote them put them: another multiprocessor's L1 may hold what was there.
        maxima = tl.load(partial_max + partial, mask=present, other=LOWEST, cache_modifier=".cg")
        sums = tl.load(partial_sum + partial, mask=present, other=0.0, cache_modifier=".cg")
        values = tl.load(
            partial_out + partial[:, :, None] * HEAD_DIM + dims[None, None, :], mask=present[:, :, None], other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        new_max = tl.maximum(row_max, tl.max(maxima, 1))
        shrink = tl.exp2(row_max - new_max)
        weight = tl.exp2(maxima - new_max[:, None])
        row_sum = row_sum * shrink + tl.sum(sums * weight, 1)
        acc = acc * shrink[:, None] + tl.sum(values.to(tl.float32) * weight[:, :, None], 1)
        row_max = new_max
    offset = (q_start + rows // GROUP).to(tl.int64) * stride_o_token
    offset += (kv_head * GROUP + rows % GROUP) * stride_o_head
    result = narrow(acc / row_sum[:, None], out.dtype.element_ty, WIDEN)
    tl.store(out + offset[:, None] + dims[None, :], result, mask=valid[:, None])


@triton.jit(do_not_specialize=["partial_rows"])
def combine_kernel(
    entries, counts, out, partial_out, partial_max, partial_sum, partial_rows, stride_o_token, stride_o_head,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, PARTIALS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Merge ROWS rows of one entry and KV head; `counts[1]` entries."""
    index = tl.program_id(0)
    kv_head = tl.program_id(1)
    if index < tl.load(counts + 1):
        entry = entries + index * ENTRY
        merge_rows(
            tl.load(entry + 3), tl.load(entry + 2), tl.load(entry), kv_head, tl.load(entry + 8), tl.load(entry + 9),
            tl.load(entry + 10), out, partial_out, partial_max, partial_sum, partial_rows, stride_o_token,
            stride_o_head, GROUP, HEAD_DIM, ROWS, PARTIALS, WIDEN,
        )  # fmt: skip


@triton.jit
def merge_if_last(
    item, merge, kv_head, out, partial_out, partial_max, partial_sum, counters, partial_rows,
    stride_o_token, stride_o_head,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Called by each program of a tile after its partial results are written: the last one merges all of them.

    The counter of a tile and KV head stands where its first partial result does. Who is last makes no difference: the
    partial results are merged in their order.
    """
    if tl.load(item + 7) >= 0:
        base = tl.load(merge)
        num_partials = tl.load(merge + 1)
        counter = counters + kv_head.to(tl.int64) * partial_rows + base
        # One thread does the atomic. The barrier puts the partial results of all threads before it, so that its release
        # makes all of them visible; its acquire, and the barrier with which its value reaches the other threads, put
        # their loads after what the other programs released.
        tl.debug_barrier()
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_partials - 1:
            # Ready for the next launch, which sees all that this one wrote.
            tl.store(counter, 0)
            num_rows = tl.load(item + 2)
            first_row = tl.load(item + 3)
            tile_rows = tl.minimum(num_rows - first_row, BLOCK_M)
            # Few rows and many partial results of short tiles, the other way round of tall ones: as many loads in
            # flight, with registers for them.
            ROWS: tl.constexpr = 4 if BLOCK_M <= 32 else 16
            for offset in range(0, tile_rows, ROWS):
                merge_rows(
                    first_row + offset, num_rows, tl.load(item), kv_head, base + offset, num_partials, tile_rows,
                    out, partial_out, partial_max, partial_sum, partial_rows, stride_o_token, stride_o_head,
                    GROUP, HEAD_DIM, ROWS, 32 // ROWS, WIDEN,
                )  # fmt: skip
