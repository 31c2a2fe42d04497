"""The attention kernel for Hopper, warp-specialised: one warp loads, two warpgroups of 64 rows compute.

K and V tiles go through a ring of stages in shared memory; each stage has one barrier for full and one for empty. For
a long sequence each consumer computes half of the rows. For a short one, whose rows fit in one half, the consumers take
key tiles alternately and write a partial result each. A program computes unit after unit; a unit is an item of the work
list for one KV head. The ring runs on across units, so that the next unit's keys are loading while the last unit is
finished. Units are dealt beforehand, or drawn: then the loading warp draws a ticket for the unit after the one that it
loads, and announces it to the consumers through shared memory.
"""

# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from ..batch import SHORT_QUERY
from ..launch.arguments import Ring, Tickets, Units
from ..launch.plan import ITEM_FIELDS, MERGE_FIELDS
from .compat import barrier, copy_to_shared, load_to_shared
from .merge import merge_if_last
from .tiles import ROWS, attend_long, attend_short, no_tiles, product_layout, turn

ITEM: gl.constexpr = gl.constexpr(ITEM_FIELDS)
MERGE: gl.constexpr = gl.constexpr(MERGE_FIELDS)
SHORT_TOKENS: gl.constexpr = gl.constexpr(SHORT_QUERY)
# The sum of the registers per thread of three warpgroups. The loading one gets what the two computing ones leave.
REGISTERS_OF_ALL: gl.constexpr = gl.constexpr(504)


@gluon.jit
def unit_of(index, units, HEADS_FIRST: gl.constexpr):
    """A unit's item, the item's number, and the KV head."""
    if HEADS_FIRST:
        kv_head = index % units.num_heads
        number = index // units.num_heads
    else:
        kv_head = index // units.num_items
        number = index % units.num_items
    return units.items + number * ITEM, number, kv_head


@gluon.jit
def dealt(round):
    """This program's unit in a round, dealt in reverse every second round, because units come longest first."""
    programs = gl.num_programs(0)
    return round * programs + gl.where(round % 2 == 0, gl.program_id(0), programs - 1 - gl.program_id(0))


@gluon.jit
def announce(ticket, round, tickets):
    """Tell the consumers the unit that follows a round's."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.wait(tickets.empty.index(round % 2), ((round // 2) & 1) ^ 1)
    tickets.ring.index(round % 2).store(gl.full([1], ticket, gl.int32, layout=layout))
    mbarrier.arrive(tickets.full.index(round % 2), count=1)


@gluon.jit
def announced(round, tickets):
    """The unit announced in a round."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(tickets.full.index(round % 2), (round // 2) & 1)
    ticket = gl.sum(tickets.ring.index(round % 2).load(layout), 0)
    # One thread arrives for all, so it must wait until the last has read.
    barrier()
    mbarrier.arrive(tickets.empty.index(round % 2), count=1)
    return ticket


@gluon.jit
def tile_rows(pages, first, stop, view, row_base, BLOCK_N: gl.constexpr, PAGE_SIZE: gl.constexpr,
              CHUNK: gl.constexpr):  # fmt: skip
    """The cache rows at which runs of CHUNK keys start, for a tile of BLOCK_N; keys before 0 are not looked up."""
    rows = ()
    for run in gl.static_range(BLOCK_N // CHUNK):
        key = first + run * CHUNK
        page = gl.load(pages + key // PAGE_SIZE, mask=(key >= 0) & (key < stop), other=0)
        rows = rows + (page * view.rows_per_page + row_base + key % PAGE_SIZE,)  # noqa: RUF005
    return rows


@gluon.jit
def load_tile(desc, rows, column, full, tile, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, CHUNK: gl.constexpr):
    """Start loading a tile in runs of CHUNK keys; each run lies in one page."""
    mbarrier.expect(full, BLOCK_N * HEAD_DIM * 2)
    for run in gl.static_range(BLOCK_N // CHUNK):
        load_to_shared(desc, [rows[run], column], full, tile.slice(run * CHUNK, CHUNK))


@gluon.jit
def produce(
    units, k_desc, v_desc, block_table, stride_table, view, ring, drawn, tickets,
    BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, CHUNK: gl.constexpr,
    STAGES: gl.constexpr, HEADS_FIRST: gl.constexpr, DYNAMIC: gl.constexpr,
):  # fmt: skip
    """Load the key tiles of each unit from the last to the first, so that the masked ones come first.

    With DYNAMIC a program that begins a unit draws the next free one; else units are dealt beforehand.
    """
    count = 0
    round = 0
    index = gl.program_id(0)
    while index < units.num_items * units.num_heads:
        item, _, kv_head = unit_of(index, units, HEADS_FIRST)
        # Drawn early: a ticket takes a while, and is needed once this unit is loaded.
        index = gl.atomic_add(drawn, 1) + gl.num_programs(0) if DYNAMIC else dealt(round + 1)
        start = gl.load(item + 4)
        stop = gl.load(item + 5)
        num_tiles = (stop - start + BLOCK_N - 1) // BLOCK_N
        pages = block_table + gl.load(item + 6).to(gl.int64) * stride_table
        row_base = kv_head * view.rows_per_head
        column = kv_head * view.columns_per_head
        first = start + (num_tiles - 1) * BLOCK_N
        # Pages are looked up before the wait for a stage, so that the two latencies overlap.
        rows = tile_rows(pages, first, stop, view, row_base, BLOCK_N, PAGE_SIZE, CHUNK)
        for _ in range(num_tiles):
            stage = count % STAGES
            phase = (count // STAGES) & 1
            mbarrier.wait(ring.k_empty.index(stage), phase ^ 1)
            load_tile(k_desc, rows, column, ring.k_full.index(stage), ring.k.index(stage), BLOCK_N, HEAD_DIM, CHUNK)
            first -= BLOCK_N
            next_rows = tile_rows(pages, first, stop, view, row_base, BLOCK_N, PAGE_SIZE, CHUNK)
            mbarrier.wait(ring.v_empty.index(stage), phase ^ 1)
            load_tile(v_desc, rows, column, ring.v_full.index(stage), ring.v.index(stage), BLOCK_N, HEAD_DIM, CHUNK)
            rows = next_rows
            count += 1
        if DYNAMIC:
            announce(index, round, tickets)
        round += 1
    if DYNAMIC:  # noqa: SIM102 - a branch at compile time, and one at run time
        if gl.atomic_add(drawn + 1, 1) == gl.num_programs(0) - 1:
            # All programs have drawn their last ticket: reset for the next launch.
            gl.store(drawn, 0)
            gl.store(drawn + 1, 0)


@gluon.jit
def share_of(item, WARPGROUP: gl.constexpr, GROUP: gl.constexpr):
    """True for an item of a short sequence, and the first row of it that this consumer computes."""
    is_short = gl.load(item + 2) <= SHORT_TOKENS * GROUP
    return is_short, gl.load(item + 3) + gl.where(is_short, 0, WARPGROUP * ROWS)


@gluon.jit
def copy_q(
    q, q_tile, item, kv_head, strides,
    WARPGROUP: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Start copying this consumer's rows of q of a unit to shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    q_start = gl.load(item)
    num_rows = gl.load(item + 2)
    _, first_row = share_of(item, WARPGROUP, GROUP)
    row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, layout))
    offset = (q_start + row // GROUP).to(gl.int64) * strides.q_token + (kv_head * GROUP + row % GROUP) * strides.q_head
    copy_to_shared(q_tile, q + offset[:, None] + dims[None, :], mask=(row < num_rows)[:, None])
    async_copy.commit_group()


@gluon.jit
def write(
    state, kv_head, q_start, first_row, num_rows, slot, skip, out, partials, partial_rows, strides,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Write the output, or with a `slot` the partial results, `skip` rows after it."""
    layout: gl.constexpr = product_layout(HEAD_DIM)
    acc, row_max, row_sums = state
    local = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    row = first_row + local
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, layout))
    valid = row < num_rows
    row_max = gl.convert_layout(row_max, gl.SliceLayout(1, layout))
    row_sum = gl.convert_layout(gl.sum(row_sums, 1), gl.SliceLayout(1, layout))
    if slot < 0:
        head = kv_head * GROUP + row % GROUP
        offset = (q_start + row // GROUP).to(gl.int64) * strides.o_token + head * strides.o_head
        result = (acc / row_sum[:, None]).to(out.dtype.element_ty)
        gl.store(out + offset[:, None] + dims[None, :], result, mask=valid[:, None])
    else:
        partial = kv_head.to(gl.int64) * partial_rows + slot + skip + local
        narrowed = acc.to(partials.out.dtype.element_ty)
        gl.store(partials.out + partial[:, None] * HEAD_DIM + dims[None, :], narrowed, mask=valid[:, None])
        gl.store(partials.max + partial, row_max, mask=valid)
        gl.store(partials.sum + partial, row_sum, mask=valid)


@gluon.jit
def consume(
    units, q, out, q_tile, ring, tickets, partials, partial_rows, qk_scale, strides,
    WARPGROUP: gl.constexpr, GROUP: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr, HEADS_FIRST: gl.constexpr, DYNAMIC: gl.constexpr, LAST_MERGES: gl.constexpr,
):  # fmt: skip
    """Compute this consumer's share of each unit: its half of the rows, or every second tile of keys."""
    score_layout: gl.constexpr = product_layout(BLOCK_N)
    # Tiles that went through the ring before this unit.
    count = 0
    num_units = units.num_items * units.num_heads
    round = 0
    index = gl.program_id(0)
    if WARPGROUP == 1:
        # The first turn is the other consumer's.
        turn("arrive", 0)
    if index < num_units:
        item, number, kv_head = unit_of(index, units, HEADS_FIRST)
        copy_q(q, q_tile, item, kv_head, strides, WARPGROUP, GROUP, HEAD_DIM)
    while index < num_units:
        item, number, kv_head = unit_of(index, units, HEADS_FIRST)
        q_start = gl.load(item)
        context_len = gl.load(item + 1)
        num_rows = gl.load(item + 2)
        tile_row = gl.load(item + 3)
        start = gl.load(item + 4)
        stop = gl.load(item + 5)
        slot = gl.load(item + 7)
        num_tiles = (stop - start + BLOCK_N - 1) // BLOCK_N
        is_short, first_row = share_of(item, WARPGROUP, GROUP)
        # In a long tile the second half of the rows follows the first; in a short one the second partial result does.
        skip = WARPGROUP * gl.where(is_short, gl.minimum(num_rows - tile_row, ROWS), ROWS)
        # The last tiles, in which some row must not see some key; both consumers count the same.
        visible = gl.maximum(context_len + tile_row // GROUP + 1 - start, 0) // BLOCK_N
        num_masked = num_tiles - gl.minimum(visible, num_tiles)
        position = context_len + (first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, score_layout))) // GROUP
        unwritten = num_tiles * BLOCK_N - (stop - start)
        top = start + (num_tiles - 1) * BLOCK_N
        state = no_tiles(BLOCK_N, HEAD_DIM)
        async_copy.wait_group(0)
        fence_async_shared()
        if is_short:
            state = attend_short(
                state, q_tile, ring, count, num_tiles, num_masked, unwritten, top, position, qk_scale,
                WARPGROUP, BLOCK_N, HEAD_DIM, STAGES,
            )  # fmt: skip
        else:
            state = attend_long(
                state, q_tile, ring, count, num_tiles, num_masked, unwritten, top, position, qk_scale,
                WARPGROUP, BLOCK_N, HEAD_DIM, STAGES,
            )  # fmt: skip
        count += num_tiles
        index = announced(round, tickets) if DYNAMIC else dealt(round + 1)
        round += 1
        # The next unit's rows are loading while this unit's results are written.
        if index < num_units:
            next_item, _, next_head = unit_of(index, units, HEADS_FIRST)
            copy_q(q, q_tile, next_item, next_head, strides, WARPGROUP, GROUP, HEAD_DIM)
        write(
            state, kv_head, q_start, first_row, num_rows, slot, skip, out, partials, partial_rows, strides,
            GROUP, HEAD_DIM,
        )  # fmt: skip
        if LAST_MERGES:
            merge_if_last(
                item, units.merges + number * MERGE, kv_head, is_short, WARPGROUP, out, partials, partial_rows, strides,
                GROUP, HEAD_DIM, ROWS,
            )  # fmt: skip
    if WARPGROUP == 0:
        # Take the turn that the other consumer gave last, so that no barrier is left half full.
        turn("sync", 0)


@gluon.jit(do_not_specialize=["num_heads", "partial_rows", "stride_table"])
def gluon_attention_kernel(
    work, drawn, num_heads, q, k_desc, v_desc, out, block_table, partials, partial_rows, qk_scale, strides,
    stride_table, view,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, CHUNK: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, HEADS_FIRST: gl.constexpr,
    DYNAMIC: gl.constexpr, LAST_MERGES: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Compute the work list of `counts[0]` items for each of the KV heads."""
    if PDL:
        # At the start, for the reason in `kernel.attention_kernel`.
        gdc_launch_dependents()
    num_items = gl.load(work.counts)
    dtype: gl.constexpr = q.dtype.element_ty
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], tile_layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], tile_layout)
    q_upper = gl.allocate_shared_memory(dtype, [ROWS, HEAD_DIM], tile_layout)
    q_lower = gl.allocate_shared_memory(dtype, [ROWS, HEAD_DIM], tile_layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    ticket_ring = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    ticket_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ticket_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(ticket_full.index(slot), count=1)
        mbarrier.init(ticket_empty.index(slot), count=2)
    fence_async_shared()
    ring = Ring(k_ring, v_ring, k_full, k_empty, v_full, v_empty)
    tickets = Tickets(ticket_ring, ticket_full, ticket_empty)
    units = Units(work.items, work.merges, num_items, num_heads)
    # The loading warp merges nothing, and would only carry the pointer.
    to_load = Units(work.items, None, num_items, num_heads)
    gl.warp_specialize([
        (consume, (units, q, out, q_upper, ring, tickets, partials, partial_rows, qk_scale, strides,
                   0, GROUP, BLOCK_N, HEAD_DIM, STAGES, HEADS_FIRST, DYNAMIC, LAST_MERGES)),
        (consume, (units, q, out, q_lower, ring, tickets, partials, partial_rows, qk_scale, strides,
                   1, GROUP, BLOCK_N, HEAD_DIM, STAGES, HEADS_FIRST, DYNAMIC, LAST_MERGES)),
        (produce, (to_load, k_desc, v_desc, block_table, stride_table, view, ring, drawn, tickets,
                   BLOCK_N, HEAD_DIM, PAGE_SIZE, CHUNK, STAGES, HEADS_FIRST, DYNAMIC)),
    ], [4, 1], [REGISTERS, REGISTERS_OF_ALL - 2 * REGISTERS])  # fmt: skip
    for stage in gl.static_range(STAGES):
        mbarrier.invalidate(k_full.index(stage))
        mbarrier.invalidate(v_full.index(stage))
        mbarrier.invalidate(k_empty.index(stage))
        mbarrier.invalidate(v_empty.index(stage))
    for slot in gl.static_range(2):
        mbarrier.invalidate(ticket_full.index(slot))
        mbarrier.invalidate(ticket_empty.index(slot))
