"""A consumer's work on the key tiles of a unit in `gluon_hopper`: scores, softmax and the product with values.

For a long sequence the two consumers take turns, so that the softmax of one runs during the products of the other
(FlashAttention-3's ping-pong, arXiv:2407.08608). For a short one each consumer takes every second tile.
"""

# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..triton_family.arithmetic import ANY_NAN, HALF_SLACK, LOWEST, shift_of
from .compat import barrier

# Rows of one consumer, which one warpgroup product takes.
ROWS: gl.constexpr = gl.constexpr(64)
# Threads of one consumer.
THREADS: gl.constexpr = gl.constexpr(128)
# The first of two hardware barriers that Triton does not use.
FREE_BARRIER: gl.constexpr = gl.constexpr(8)


@gluon.constexpr_function
def product_layout(columns: int) -> gl.NVMMADistributedLayout:
    """The layout of a product of 64 rows in the registers of a warpgroup."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.jit
def mask(scores, first, position, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr):
    """Scores of keys from `first` on, minus infinity where a row must not see the key."""
    key = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
    return gl.where(key[None, :] <= position[:, None], scores, float("-inf"))


@gluon.jit
def sums_of_threads(p, BLOCK_N: gl.constexpr):
    """Four sums for each row, over the columns that one thread has; they are added up after the last tile."""
    return gl.sum(gl.sum(p.reshape([ROWS, BLOCK_N // 8, 4, 2]), 3), 1)


@gluon.jit
def no_tiles(BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr):
    """The state before any tile: the accumulator, and each row's maximum and four sums of exponentials."""
    score_layout: gl.constexpr = product_layout(BLOCK_N)
    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, layout=product_layout(HEAD_DIM))
    row_max = gl.full([ROWS], LOWEST, gl.float32, layout=gl.SliceLayout(1, score_layout))
    return acc, row_max, sums_of_threads(gl.zeros([ROWS, BLOCK_N], gl.float32, layout=score_layout), BLOCK_N)


@gluon.jit
def softmax(scores, row_max, row_sums, qk_scale, DTYPE: gl.constexpr, BLOCK_N: gl.constexpr):
    """The probabilities, each row's new maximum and sums, and the factor by which the accumulator shrinks.

    DTYPE is that of the values. The maximum may be smaller by a constant, as in `kernel.attend`.
    """
    SHIFT: gl.constexpr = shift_of(DTYPE)
    new_max = gl.maximum(row_max, gl.max(scores, 1) * qk_scale - SHIFT)
    shrink = gl.exp2(row_max - new_max)
    exponents = scores * qk_scale - new_max[:, None]
    if SHIFT > 0.0:
        # The same bound as in `arithmetic.weights`.
        exponents = gl.minimum(exponents, SHIFT + HALF_SLACK, propagate_nan=ANY_NAN)
    p = gl.exp2(exponents)
    row_sums = row_sums * gl.convert_layout(shrink, gl.SliceLayout(1, row_sums.type.layout))[:, None]
    return p, new_max, row_sums + sums_of_threads(p, BLOCK_N), shrink


@gluon.jit
def pass_tile(count, ring, STAGES: gl.constexpr):
    """Pass a tile that the other consumer uses, so that no later phase of its barriers is mistaken for this one."""
    stage = count % STAGES
    phase = (count // STAGES) & 1
    mbarrier.wait(ring.k_full.index(stage), phase)
    mbarrier.arrive(ring.k_empty.index(stage), count=1)
    mbarrier.wait(ring.v_full.index(stage), phase)
    mbarrier.arrive(ring.v_empty.index(stage), count=1)


@gluon.jit
def scores_of(stage, phase, q_tile, ring, BLOCK_N: gl.constexpr):
    """The product of q and the keys of a stage; frees the stage."""
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=product_layout(BLOCK_N))
    mbarrier.wait(ring.k_full.index(stage), phase)
    scores = warpgroup_mma(q_tile, ring.k.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(ring.k_empty.index(stage), count=1)
    return scores


@gluon.jit
def shrunk(acc, shrink, p, DTYPE: gl.constexpr, HEAD_DIM: gl.constexpr):
    """The accumulator relative to the new maxima, and the probabilities as an operand of a product."""
    layout: gl.constexpr = product_layout(HEAD_DIM)
    p = gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2))
    return acc * gl.convert_layout(shrink, gl.SliceLayout(1, layout))[:, None], p


@gluon.jit
def add_values(acc, p, stage, phase, ring):
    """`acc` plus the product of probabilities and the values of a stage; frees the stage."""
    mbarrier.wait(ring.v_full.index(stage), phase)
    next_acc = warpgroup_mma(p, ring.v.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[next_acc])
    mbarrier.arrive(ring.v_empty.index(stage), count=1)
    return acc


@gluon.jit
def clear_unwritten(v_tile, full, phase, num_written, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Zero the values of slots that were never written, because a probability of 0 does not cancel a NaN.

    Both consumers of a long sequence write the same zeros.
    """
    mbarrier.wait(full, phase)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    key = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
    v = v_tile.load(layout)
    v_tile.store(gl.where((key < num_written)[:, None], v, 0.0).to(v.dtype))
    fence_async_shared()
    # Without this barrier Triton puts one into each turn of a loop, before the product that reads the stored values.
    barrier()


@gluon.jit
def fold(
    state, j, q_tile, ring, count, num_masked, unwritten, top, position, qk_scale,
    BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fold tile j into `state` (see `no_tiles`), one step after the other."""
    acc, row_max, row_sums = state
    stage = (count + j) % STAGES
    phase = ((count + j) // STAGES) & 1
    scores = scores_of(stage, phase, q_tile, ring, BLOCK_N)
    if j < num_masked:
        scores = mask(scores, top - j * BLOCK_N, position, BLOCK_N, product_layout(BLOCK_N))
    p, row_max, row_sums, shrink = softmax(scores, row_max, row_sums, qk_scale, ring.v.dtype, BLOCK_N)
    acc, p = shrunk(acc, shrink, p, ring.v.dtype, HEAD_DIM)
    if (j == 0) & (unwritten > 0):
        clear_unwritten(ring.v.index(stage), ring.v_full.index(stage), phase, BLOCK_N - unwritten, BLOCK_N, HEAD_DIM)
    return add_values(acc, p, stage, phase, ring), row_max, row_sums


@gluon.jit
def attend_short(
    state, q_tile, ring, count, num_tiles, num_masked, unwritten, top, position, qk_scale,
    WARPGROUP: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fold every second tile, from tile WARPGROUP on, into `state`.

    The other consumer's products run during this one's softmax. `count` tiles have gone through the ring before.
    """
    if WARPGROUP == 1:
        pass_tile(count, ring, STAGES)
    for j in range(WARPGROUP, num_tiles, 2):
        state = fold(
            state, j, q_tile, ring, count, num_masked, unwritten, top,
            position, qk_scale, BLOCK_N, HEAD_DIM, STAGES,
        )  # fmt: skip
        if j + 1 < num_tiles:
            pass_tile(count + j + 1, ring, STAGES)
    return state


@gluon.constexpr_function
def turning(action: str, number: int, threads: int) -> str:
    """PTX for a barrier of `threads` threads: "sync" arrives and waits, "arrive" only arrives."""
    return f"bar.{action} {number}, {threads}; mov.b32 $0, $1;"


@gluon.jit
def turn(ACTION: gl.constexpr, WARPGROUP: gl.constexpr):
    """Wait for a consumer's turn to start its products ("sync"), or give it that turn ("arrive").

    Turns alternate, over all units. A consumer that gave two turns in a row would count as the waiting one, and both
    would hang.
    """
    token = gl.full([THREADS], 0, gl.int32, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(turning(ACTION, FREE_BARRIER + WARPGROUP, 2 * THREADS), "=r,r", [token],
                              dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def attend_long(
    state, q_tile, ring, count, num_tiles, num_masked, unwritten, top, position, qk_scale,
    WARPGROUP: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fold every tile into `state`, the products of one tile's values together with those of the next one's keys.

    While one consumer's products run, the other does its softmax. Both take equally many tiles in turns. Without turns
    nothing would overlap, because ptxas moves a softmax past the wait for any product of its own warpgroup.
    """
    # The first tiles are folded one step after the other. The tile after them may be masked too, no later one is.
    ahead = gl.maximum(num_masked - 1, 0)
    for j in range(ahead):
        state = fold(
            state, j, q_tile, ring, count, num_masked, unwritten, top,
            position, qk_scale, BLOCK_N, HEAD_DIM, STAGES,
        )  # fmt: skip
    acc, row_max, row_sums = state
    stage = (count + ahead) % STAGES
    phase = ((count + ahead) // STAGES) & 1
    scores = scores_of(stage, phase, q_tile, ring, BLOCK_N)
    scores = mask(scores, top - ahead * BLOCK_N, position, BLOCK_N, product_layout(BLOCK_N))
    p, row_max, row_sums, shrink = softmax(scores, row_max, row_sums, qk_scale, ring.v.dtype, BLOCK_N)
    acc, p = shrunk(acc, shrink, p, ring.v.dtype, HEAD_DIM)
    if (ahead == 0) & (unwritten > 0):
        clear_unwritten(ring.v.index(stage), ring.v_full.index(stage), phase, BLOCK_N - unwritten, BLOCK_N, HEAD_DIM)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=product_layout(BLOCK_N))
    for j in range(ahead + 1, num_tiles):
        last_stage = stage
        last_phase = phase
        stage = (count + j) % STAGES
        phase = ((count + j) // STAGES) & 1
        mbarrier.wait(ring.k_full.index(stage), phase)
        turn("sync", WARPGROUP)
        next_scores = warpgroup_mma(q_tile, ring.k.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(ring.v_full.index(last_stage), last_phase)
        next_acc = warpgroup_mma(p, ring.v.index(last_stage), acc, is_async=True)
        turn("arrive", 1 - WARPGROUP)
        scores = warpgroup_mma_wait(1, deps=[next_scores])
        mbarrier.arrive(ring.k_empty.index(stage), count=1)
        p, row_max, row_sums, shrink = softmax(scores, row_max, row_sums, qk_scale, ring.v.dtype, BLOCK_N)
        acc = warpgroup_mma_wait(0, deps=[next_acc])
        mbarrier.arrive(ring.v_empty.index(last_stage), count=1)
        acc, p = shrunk(acc, shrink, p, ring.v.dtype, HEAD_DIM)
    return add_values(acc, p, stage, phase, ring), row_max, row_sums
