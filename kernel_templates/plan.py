"""The plan of a launch: which program computes what. Made once per engine step, used by every layer.

All of it is vectorised over the batch. The keys of a tile of query rows are cut at multiples of its key tile's width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .batch import SHORT_QUERY, Batch
from .limits import Body

IntArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of query rows of a batch, those of long sequences first, and what each has to read.

    Per tile: `q_start`, where its sequence's tokens start in q; `context_len` and `num_rows` of its sequence; its
    `first_row` and the number of rows `rows` it has; `stop`, the key after the last that any row sees; `seq`; and
    `block_n`, the width of its key tiles.
    """

    q_start: IntArray
    context_len: IntArray
    num_rows: IntArray
    first_row: IntArray
    rows: IntArray
    stop: IntArray
    seq: IntArray
    block_n: IntArray
    num_long: int

    @property
    def is_long(self) -> NDArray[np.bool_]:
        """Whether each tile is of a long sequence."""
        return np.arange(len(self.seq)) < self.num_long


@dataclass(frozen=True, slots=True)
class WorkList:
    """What the kernels read, as their `ITEM_FIELDS` and `ENTRY_FIELDS` say.

    items [n, 8], the first `num_long` of them in long tiles; entries [m, 6] of the reduction; `partial_rows` rows of
    partial results per KV head.
    """

    items: IntArray
    num_long: int
    entries: IntArray
    partial_rows: int


def cut_tiles(batch: Batch, group_size: int, long: Body, short: Body) -> Tiles:
    """Cut the rows of each sequence (query tokens times `group_size`) into tiles of its body's `block_m` rows."""
    sequences = np.array(batch.sequences, dtype=np.int64)
    query_len, context_len = sequences[:, 0], sequences[:, 1]
    is_long = query_len > SHORT_QUERY
    order = np.argsort(~is_long, kind="stable")
    num_rows = query_len * group_size
    per_tile = np.where(is_long, long.block_m, short.block_m)
    num_tiles = -(-num_rows // per_tile)
    q_start = np.cumsum(query_len) - query_len

    seq = np.repeat(order, num_tiles[order])
    first_row = _counter(num_tiles[order]) * per_tile[seq]
    rows = np.minimum(per_tile[seq], num_rows[seq] - first_row)
    stop = context_len[seq] + (first_row + rows - 1) // group_size + 1
    block_n = np.where(is_long, long.block_n, short.block_n)[seq]
    columns = (q_start[seq], context_len[seq], num_rows[seq], first_row, rows, stop, seq, block_n)
    return Tiles(*(column.astype(np.int32) for column in columns), num_long=int(num_tiles[is_long].sum()))


def balanced_segments(tiles: Tiles, num_items: float, long_weight: float) -> IntArray:
    """How many segments to cut each tile's keys into, so that about `num_items` items cost the same.

    A key costs `long_weight` in a long tile and 1 in a short one. No segment is shorter than a key tile.
    """
    weight = np.where(tiles.is_long, long_weight, 1.0)
    cost = tiles.stop * weight
    target = cost.sum() / num_items
    return _at_most(np.ceil(cost / target), tiles)


def equal_segments(tiles: Tiles, num_segments: int) -> IntArray:
    """`num_segments` segments for each tile, fewer where its keys are few."""
    return _at_most(np.full(len(tiles.seq), num_segments), tiles)


def work_list(tiles: Tiles, num_segments: IntArray, combine_rows: int) -> WorkList:
    """The work list of `tiles`, each with its keys cut into `num_segments`; the items with most keys come first.

    The reduction merges `combine_rows` rows in one program.
    """
    length = -(-tiles.stop // (num_segments * tiles.block_n)) * tiles.block_n
    num_segments = -(-tiles.stop // length)
    tile = np.repeat(np.arange(len(tiles.seq)), num_segments)
    start = _counter(num_segments) * length[tile]
    stop = np.minimum(start + length[tile], tiles.stop[tile])

    is_split = num_segments > 1
    needed = np.where(is_split, num_segments * tiles.rows, 0)
    base = np.cumsum(needed) - needed
    slot = np.where(is_split[tile], base[tile] + start // length[tile] * tiles.rows[tile], -1)
    fields = (tiles.q_start, tiles.context_len, tiles.num_rows, tiles.first_row)
    items = np.stack([*(field[tile] for field in fields), start, stop, tiles.seq[tile], slot], axis=1)
    is_long = tile < tiles.num_long
    items = items[np.lexsort((start - stop, ~is_long))]

    split = np.flatnonzero(is_split)
    blocks = -(-tiles.rows[split] // combine_rows)
    owner = np.repeat(split, blocks)
    offset = _counter(blocks) * combine_rows
    entries = np.stack(
        [tiles.q_start[owner], tiles.num_rows[owner], tiles.first_row[owner] + offset, base[owner] + offset,
         num_segments[owner], tiles.rows[owner]], axis=1
    )  # fmt: skip
    return WorkList(items.astype(np.int32), int(is_long.sum()), entries.astype(np.int32), int(needed.sum()))


def _at_most(num_segments: NDArray[np.float64] | IntArray, tiles: Tiles) -> IntArray:
    return np.clip(num_segments, 1, -(-tiles.stop // tiles.block_n)).astype(np.int32)


def _counter(counts: NDArray[np.int64] | IntArray) -> NDArray[np.int64]:
    """0, 1, ... up to each count, one after another: [2, 3] gives [0, 1, 0, 1, 2]."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
