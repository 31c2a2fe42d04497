"""Merges the partial results of tiles whose keys were split: in a kernel of its own, or in a tile's last program."""

# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ..launch.plan import ENTRY_FIELDS, MERGE_FIELDS
from .arithmetic import LOG2_E, LOWEST, narrow

ENTRY: tl.constexpr = tl.constexpr(ENTRY_FIELDS)
MERGE: tl.constexpr = tl.constexpr(MERGE_FIELDS)


@triton.jit
def write_rows(
    acc, row_max, row_sum, token, head, valid, out, features, stride_o_token, stride_o_head,
    VALUE_DIM: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Write the output, and the log-sum-exp if asked for, of the rows of `token` and `head` that are `valid`."""
    DIM: tl.constexpr = triton.next_power_of_2(VALUE_DIM)
    dims = tl.arange(0, DIM)
    offset = token.to(tl.int64) * stride_o_token + head.to(tl.int64) * stride_o_head
    if features.tree_mask is not None:
        # A mask may hide every key: then the output is 0.
        acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    else:
        acc = acc / row_sum[:, None]
    result = narrow(acc, out.dtype.element_ty, WIDEN)
    if DIM == VALUE_DIM:
        tl.store(out + offset[:, None] + dims[None, :], result, mask=valid[:, None])
    else:
        mask = valid[:, None] & (dims < VALUE_DIM)[None, :]
        tl.store(out + offset[:, None] + dims[None, :], result, mask=mask)
    if features.lse is not None:
        lse = (row_max + tl.log2(row_sum)) / LOG2_E
        tl.store(features.lse + token.to(tl.int64) * features.stride_lse + head, lse, mask=valid)


@triton.jit
def merge_rows(
    row, num_rows, q_start, kv_head, slot, num_partials, stride, out, partial_out, partial_max, partial_sum,
    partial_rows, features, stride_o_token, stride_o_head,
    GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, ROWS: tl.constexpr, PARTIALS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of ROWS rows from `row` on, PARTIALS at a time in their order, and write the output.

    The first partial results of these rows begin at row `slot`; `stride` rows lie between one and the next. The merge
    of two softmaxes by their maxima and sums: FlashAttention (arXiv:2205.14135), section 3.1.
    """
    rows = row + tl.arange(0, ROWS)
    valid = rows < num_rows
    DIM: tl.constexpr = triton.next_power_of_2(VALUE_DIM)
    dims = tl.arange(0, DIM)
    acc = tl.zeros([ROWS, DIM], tl.float32)
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
        stored = present[:, :, None]
        if DIM != VALUE_DIM:
            stored = stored & (dims < VALUE_DIM)[None, None, :]
        values = tl.load(
            partial_out + partial[:, :, None] * VALUE_DIM + dims[None, None, :], mask=stored, other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        new_max = tl.maximum(row_max, tl.max(maxima, 1))
        shrink = tl.exp2(row_max - new_max)
        weight = tl.exp2(maxima - new_max[:, None])
        row_sum = row_sum * shrink + tl.sum(sums * weight, 1)
        acc = acc * shrink[:, None] + tl.sum(values.to(tl.float32) * weight[:, :, None], 1)
        row_max = new_max
    write_rows(
        acc, row_max, row_sum, q_start + rows // GROUP, kv_head * GROUP + rows % GROUP, valid, out, features,
        stride_o_token, stride_o_head, VALUE_DIM, WIDEN,
    )  # fmt: skip


@triton.jit(do_not_specialize=["partial_rows"])
def combine_kernel(
    entries, counts, out, partial_out, partial_max, partial_sum, partial_rows, features, stride_o_token, stride_o_head,
    GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, ROWS: tl.constexpr, PARTIALS: tl.constexpr, WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Merge ROWS rows of one entry and KV head; `counts[1]` entries, whose rows the grid's third axis shares out.

    With PDL it is launched while the attention kernel still runs, reads what was planned, and waits.
    """
    index = tl.program_id(0)
    kv_head = tl.program_id(1)
    offset = tl.program_id(2) * ROWS
    num_entries = tl.load(counts + 1)
    # Of a program past the list these are of an older one, and not used.
    entry = entries + index * ENTRY
    q_start = tl.load(entry)
    num_rows = tl.load(entry + 2)
    first_row = tl.load(entry + 3) + offset
    slot = tl.load(entry + 8) + offset
    num_partials = tl.load(entry + 9)
    stride = tl.load(entry + 10)
    if PDL:
        # Programs past the list too: what is launched next relies on this kernel's end being after the other's.
        gdc_wait()
    if (index < num_entries) & (first_row < num_rows):
        merge_rows(
            first_row, num_rows, q_start, kv_head, slot, num_partials, stride, out, partial_out, partial_max,
            partial_sum, partial_rows, features, stride_o_token, stride_o_head, GROUP, VALUE_DIM, ROWS, PARTIALS, WIDEN,
        )  # fmt: skip


@triton.jit
def merge_if_last(
    item, merge, kv_head, out, partial_out, partial_max, partial_sum, counters, partial_rows,
    features, stride_o_token, stride_o_head,
    GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, WIDEN: tl.constexpr,
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
                    out, partial_out, partial_max, partial_sum, partial_rows, features, stride_o_token, stride_o_head,
                    GROUP, VALUE_DIM, ROWS, 32 // ROWS, WIDEN,
                )  # fmt: skip
