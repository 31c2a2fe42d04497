"""Merges a tile's partial results in the last consumer of `gluon_hopper` that has written one."""

# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..triton_family.arithmetic import LOWEST
from .compat import barrier


@gluon.jit
def merge_rows(
    row, num_rows, q_start, kv_head, slot, num_partials, step, out, partials, partial_rows, strides,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, ROWS: gl.constexpr, PARTIALS: gl.constexpr,
):  # fmt: skip
    """Do what `combine.merge_rows` does, with the four warps of a consumer.

    Each warp has its own rows, and each lane some columns of all their partial results, so no lanes exchange values.
    """
    layout: gl.constexpr = gl.BlockedLayout([ROWS // 4, 1, HEAD_DIM // 32], [1, 1, 32], [4, 1, 1], [2, 1, 0])
    rows_and_partials: gl.constexpr = gl.SliceLayout(2, layout)
    rows_and_dims: gl.constexpr = gl.SliceLayout(1, layout)
    local = gl.arange(0, ROWS, layout=gl.SliceLayout(1, rows_and_partials))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, rows_and_dims))
    base = kv_head.to(gl.int64) * partial_rows + slot + local
    valid = row + local < num_rows
    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, layout=rows_and_dims)
    row_max = gl.full([ROWS], LOWEST, gl.float32, layout=gl.SliceLayout(1, rows_and_partials))
    row_sum = gl.full([ROWS], 0.0, gl.float32, layout=gl.SliceLayout(1, rows_and_partials))
    for first in range(0, num_partials, PARTIALS):
        number = first + gl.arange(0, PARTIALS, layout=gl.SliceLayout(0, rows_and_partials))
        partial = base[:, None] + number[None, :] * step
        present = valid[:, None] & (number < num_partials)[None, :]
        # Load from L2, for the reason in `combine.merge_rows`.
        maxima = gl.load(partials.max + partial, mask=present, other=LOWEST, cache_modifier=".cg")
        sums = gl.load(partials.sum + partial, mask=present, other=0.0, cache_modifier=".cg")
        places = partials.out + partial[:, :, None] * HEAD_DIM + dims[None, None, :]
        values = gl.load(places, mask=present[:, :, None], other=0.0, cache_modifier=".cg").to(gl.float32)
        new_max = gl.maximum(row_max, gl.max(maxima, 1))
        shrink = gl.exp2(row_max - new_max)
        weight = gl.exp2(maxima - new_max[:, None])
        row_sum = row_sum * shrink + gl.sum(sums * weight, 1)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, rows_and_dims))[:, None]
        acc = acc + gl.sum(values * weight[:, :, None], 1)
        row_max = new_max
    rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, rows_and_dims))
    offset = (
        (q_start + rows // GROUP).to(gl.int64) * strides.o_token + (kv_head * GROUP + rows % GROUP) * strides.o_head
    )
    result = acc / gl.convert_layout(row_sum, gl.SliceLayout(1, rows_and_dims))[:, None]
    gl.store(out + offset[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=(rows < num_rows)[:, None])


@gluon.jit
def merge_if_last(
    item, merge, kv_head, is_short, half, out, partials, partial_rows, strides,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, HALF_ROWS: gl.constexpr,
):  # fmt: skip
    """Merge rows of a tile in the last consumer that has written them; each calls this after writing its own.

    In a long tile each consumer computes one `half` of the rows, which has its own counter. In a short tile both write
    partial results of all rows. Either way a counter expects as many results as a row has. For the counter and the
    order see `combine.merge_if_last`.
    """
    if gl.load(item + 7) >= 0:
        num_rows = gl.load(item + 2)
        tile_row = gl.load(item + 3)
        skip = gl.where(is_short, 0, half * HALF_ROWS)
        stride = gl.minimum(num_rows - tile_row, gl.where(is_short, HALF_ROWS, 2 * HALF_ROWS))
        stop = gl.minimum(stride, skip + HALF_ROWS)
        if skip < stop:
            base = gl.load(merge)
            num_partials = gl.load(merge + 1)
            counter = partials.counters + kv_head.to(gl.int64) * partial_rows + base + skip
            barrier()
            if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_partials - 1:
                gl.store(counter, 0)
                q_start = gl.load(item)
                # Few rows of many partial results, or the other way round, for the reason in `combine.merge_if_last`.
                if is_short:
                    for offset in range(skip, stop, 4):
                        merge_rows(
                            tile_row + offset, num_rows, q_start, kv_head, base + offset, num_partials, stride, out,
                            partials, partial_rows, strides, GROUP, HEAD_DIM, 4, 2048 // HEAD_DIM,
                        )  # fmt: skip
                else:
                    for offset in range(skip, stop, 16):
                        merge_rows(
                            tile_row + offset, num_rows, q_start, kv_head, base + offset, num_partials, stride, out,
                            partials, partial_rows, strides, GROUP, HEAD_DIM, 16, 512 // HEAD_DIM,
                        )  # fmt: skip
