"""The reduction kernel: merges the partial results of tiles whose keys were split into segments."""

# pyright: basic
import triton
import triton.language as tl

from .attention import LOWEST, narrow

# An entry of the reduction list, as int32: where the sequence's tokens start in q, its rows, the entry's first row, the
# first segment's row in the partial results, the segments, and the rows from one segment to the next.
ENTRY_FIELDS = 6


@triton.jit(do_not_specialize=["partial_rows"])
def combine_kernel(
    entries, counts, out, partial_out, partial_max, partial_sum, partial_rows, stride_o_token, stride_o_head,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, SEGMENTS: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Merge ROWS rows of one entry and KV head, SEGMENTS segments at a time; `counts[2]` entries.

    The merge of two softmaxes by their maxima and sums: FlashAttention (arXiv:2205.14135), section 3.1.
    """
    index = tl.program_id(0)
    kv_head = tl.program_id(1)
    if index < tl.load(counts + 2):
        entry = entries + index * 6
        q_start = tl.load(entry)
        num_rows = tl.load(entry + 1)
        row = tl.load(entry + 2) + tl.arange(0, ROWS)
        slot = tl.load(entry + 3)
        num_segments = tl.load(entry + 4)
        stride = tl.load(entry + 5)
        valid = row < num_rows
        dims = tl.arange(0, HEAD_DIM)
        acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
        row_max = tl.full([ROWS], LOWEST, tl.float32)
        row_sum = tl.zeros([ROWS], tl.float32)
        base = kv_head.to(tl.int64) * partial_rows + slot + tl.arange(0, ROWS)
        for first in range(0, num_segments, SEGMENTS):
            segment = first + tl.arange(0, SEGMENTS)
            partial = base[:, None] + segment[None, :] * stride
            present = valid[:, None] & (segment < num_segments)[None, :]
            maxima = tl.load(partial_max + partial, mask=present, other=LOWEST)
            sums = tl.load(partial_sum + partial, mask=present, other=0.0)
            values = tl.load(
                partial_out + partial[:, :, None] * HEAD_DIM + dims[None, None, :], mask=present[:, :, None], other=0.0
            )
            new_max = tl.maximum(row_max, tl.max(maxima, 1))
            shrink = tl.exp2(row_max - new_max)
            weight = tl.exp2(maxima - new_max[:, None])
            row_sum = row_sum * shrink + tl.sum(sums * weight, 1)
            acc = acc * shrink[:, None] + tl.sum(values * weight[:, :, None], 1)
            row_max = new_max
        token = row // GROUP
        head = kv_head * GROUP + row % GROUP
        offset = (q_start + token).to(tl.int64) * stride_o_token + head * stride_o_head
        result = narrow(acc / row_sum[:, None], out.dtype.element_ty, WIDEN)
        tl.store(out + offset[:, None] + dims[None, :], result, mask=valid[:, None])
