"""The plan of a launch: which program computes what. Made once per engine step, used by every layer.

All of it is vectorised over the batch. The keys of a tile of query rows are cut at multiples of its key tile's width.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .batch import MAX_TOKENS, SHORT_QUERY, TREE_TOKENS, Batch
from .limits import Body

IntArray = NDArray[np.int32]

# The fields of an item, as the kernels' int32 read them: where the sequence's tokens start in q, its context length,
# its rows, the tile's first row, the first key, the key after the last, the sequence, and the tile's first row in the
# partial results (negative: the item covers all its keys and writes the output).
ITEM_FIELDS = 8
_Q_START, _CONTEXT_LEN, _NUM_ROWS, _FIRST_ROW, _START, _STOP, _SEQ, _SLOT = range(ITEM_FIELDS)

# What follows in the plan's own rows: where the first partial result of the tile stands and how many there are (its
# `MERGE_FIELDS`); the tile's rows, which are those from one partial result to the next; the rows from one segment's
# partial results to the next one's; the keys of a segment; the tile's key tiles; what is added to minus its keys for
# its rank in the list; the tile shape of its body; and a place for `_repeat`.
MERGE_FIELDS = 2
(_BASE, _NUM_PARTIALS, _ROWS, _STEP, _LENGTH, _KEY_TILES, _COPY, _RANK, _BLOCK_M, _BLOCK_N) = range(
    ITEM_FIELDS, ITEM_FIELDS + 10
)
TILE_FIELDS = ITEM_FIELDS + 10

# An entry of the reduction is such a row up to _ROWS, of which its kernel reads where the sequence's tokens start in q,
# its rows, the entry's first row, the first partial result's row, how many there are, and the rows between them.
ENTRY_FIELDS = _ROWS + 1

# The rank of long sequences: below minus any number of keys that a memory holds.
_LONG_FIRST = -(2**30)


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of query rows of a batch, sequence by sequence: `fields` [n, 18], each as an item of all its keys.

    One matrix, so that tiles are repeated and taken in one step, which is most of what planning costs. `num_tokens` are
    the query tokens of the batch.
    """

    fields: IntArray
    num_tokens: int

    @property
    def rows(self) -> IntArray:
        """The rows of each tile."""
        return self.fields[:, _ROWS]

    @property
    def is_long(self) -> NDArray[np.bool_]:
        """Whether each tile is of a long sequence."""
        return self.fields[:, _RANK] < 0

    @property
    def stop(self) -> IntArray:
        """The key after the last that any row of each tile sees."""
        return self.fields[:, _STOP]

    @property
    def keys(self) -> IntArray:
        """How many keys each tile reads: from the first that its first row sees, or a few before, to the last."""
        return self.fields[:, _STOP] - self.fields[:, _START]

    @property
    def key_tiles(self) -> IntArray:
        """How many key tiles each tile reads."""
        return self.fields[:, _KEY_TILES]


@dataclass(frozen=True, slots=True)
class WorkList:
    """What the kernels read, as `ITEM_FIELDS`, `ENTRY_FIELDS` and `MERGE_FIELDS` say.

    items [n, 8], of which `num_long` are of long sequences; entries [m, 11] of the reduction; merges [n, 2], for each
    item; `partial_rows` rows of partial results per KV head; `num_tokens` query tokens.
    """

    items: IntArray
    num_long: int
    entries: IntArray
    merges: IntArray
    partial_rows: int
    num_tokens: int


def cut_tiles(
    batch: Batch, group_size: int, long: Body, short: Body, window: int | None = None, has_tree_mask: bool = False
) -> Tiles:
    """Cut the rows of each sequence (query tokens times `group_size`) into tiles of its body's `block_m` rows.

    With a sliding `window` a tile's keys start where its first row's window does, at a multiple of the body's
    `block_n`. With a tree mask tiles of the sequences that heed it read all of the sequence's own keys: what hides them
    is not causality, nor the window.
    """
    num_seqs = len(batch.sequences)
    # Half the time that np.array takes for the same.
    flat = np.fromiter(itertools.chain.from_iterable(batch.sequences), np.int32, 2 * num_seqs)
    query_len, context_len = flat[::2], flat[1::2]
    group = np.int32(group_size)
    bodies = np.array(((0, short.block_m, short.block_n), (_LONG_FIRST, long.block_m, long.block_n)), np.int32)
    fields = np.zeros((num_seqs, TILE_FIELDS), np.int32)
    fields[:, _RANK:] = bodies.take(query_len > SHORT_QUERY, 0)
    tokens = query_len.cumsum(dtype=np.int32)
    fields[:, _Q_START] = tokens - query_len
    fields[:, _CONTEXT_LEN] = context_len
    fields[:, _NUM_ROWS] = num_rows = query_len * group
    fields[:, _SEQ] = np.arange(num_seqs, dtype=np.int32)
    fields[:, _SLOT] = -1
    num_tiles = _ceil_div(num_rows, fields[:, _BLOCK_M])
    if (num_tiles == 1).all():
        fields[:, _ROWS] = num_rows
        fields[:, _STOP] = stop = context_len + query_len
    else:
        fields, number = _repeat(fields, num_tiles)
        block_m = fields[:, _BLOCK_M]
        fields[:, _FIRST_ROW] = first_row = number * block_m
        stop_row = np.minimum(first_row + block_m, fields[:, _NUM_ROWS])
        fields[:, _ROWS] = stop_row - first_row
        fields[:, _STOP] = stop = fields[:, _CONTEXT_LEN] + (stop_row - 1) // group + 1
    if window is not None or has_tree_mask:
        stop = _clip(fields, group, window, has_tree_mask)
    fields[:, _KEY_TILES] = _ceil_div(stop, fields[:, _BLOCK_N])
    return Tiles(fields, int(tokens[-1]))


def _clip(fields: IntArray, group: np.int32, window: int | None, has_tree_mask: bool) -> IntArray:
    """Set the first key of each tile, and the last of those that heed a tree mask. Returned is how many they read."""
    context_len, num_rows, block_n = fields[:, _CONTEXT_LEN], fields[:, _NUM_ROWS], fields[:, _BLOCK_N]
    start = np.zeros(len(fields), np.int32)
    if window is not None:
        first_position = context_len + fields[:, _FIRST_ROW] // group
        start = np.maximum(first_position + 1 - np.int32(min(window, MAX_TOKENS)), 0)
    if has_tree_mask:
        has_words = (num_rows > group) & (num_rows <= TREE_TOKENS * group)
        start = np.where(has_words, np.minimum(start, context_len), start)
        fields[:, _STOP] = np.where(has_words, context_len + num_rows // group, fields[:, _STOP])
    fields[:, _START] = start = start // block_n * block_n
    return fields[:, _STOP] - start


def balanced_segments(tiles: Tiles, num_items: float, long_weight: float, is_most: bool = False) -> IntArray:
    """How many segments to cut each tile's keys into, so that about `num_items` items cost the same.

    A key, of those inside the window, costs `long_weight` in a long tile and 1 in a short one. No segment is shorter
    than a key tile. Rounding up makes some more items; with `is_most` there are at most `num_items`, unless there are
    more tiles.
    """
    cost = tiles.keys * np.where(tiles.is_long, np.float64(long_weight), 1.0)
    share = num_items / max(cost.sum(), 1.0)
    segments = np.minimum(np.ceil(cost * share), tiles.key_tiles)
    while is_most and len(segments) <= num_items < (found := segments.sum()):
        # A hundredth at least, so that it ends.
        share *= min(num_items / found, 0.99)
        segments = np.minimum(np.ceil(cost * share), tiles.key_tiles)
    return segments.astype(np.int32)


def balanced_by_part(tiles: Tiles, num_items: float) -> IntArray:
    """As `balanced_segments`, but with about `num_items` items for the long and as many for the short sequences."""
    keys = tiles.keys
    long = int((keys * tiles.is_long).sum(dtype=np.int64))
    short = int(keys.sum(dtype=np.int64)) - long
    if not long or not short:
        return balanced_segments(tiles, num_items, 1)
    # At this weight both parts cost the same.
    return balanced_segments(tiles, 2 * num_items, short / long)


def equal_segments(tiles: Tiles, num_segments: int) -> IntArray:
    """`num_segments` segments for each tile, fewer where its keys are few."""
    return np.minimum(np.int32(num_segments), tiles.key_tiles)


def fixed_segments(tiles: Tiles, short_keys: int, long_keys: int) -> tuple[Tiles, IntArray]:
    """Tiles like these, and how many segments `work_list` cuts each into, so that all but the last have as many keys.

    `short_keys` for tiles of short and `long_keys` for those of long sequences, rounded down to key tiles, one at
    least, from the tile's first key on: where a tile is cut depends on no other tile.
    """
    fields = tiles.fields.copy()
    most = np.where(tiles.is_long, np.int32(long_keys), np.int32(short_keys))
    per_segment = np.maximum(most // fields[:, _BLOCK_N], 1)
    segments = _ceil_div(tiles.key_tiles, per_segment)
    # As if the last segment were full: then none is evened out with the others.
    fields[:, _KEY_TILES] = segments * per_segment
    return Tiles(fields, tiles.num_tokens), segments


def work_list(
    tiles: Tiles, num_segments: IntArray, combine_rows: int, schedule: str = "long_first", short_partials: int = 1
) -> WorkList:
    """The work list of `tiles`, each with its keys cut into `num_segments`.

    The reduction merges `combine_rows` rows in one program; with 0 there is none. `schedule`: "long_first" puts items
    of long sequences first and, of each kind, those with the most keys; "interleaved" spreads the two kinds evenly. An
    item of a short sequence writes `short_partials` partial results, one after the other.
    """
    fields = tiles.fields
    if not len(fields) or (short_partials == 1 and num_segments.max() == 1):
        return _scheduled(tiles, fields, schedule, _NO_ENTRIES, 0)
    fields = fields.copy()
    key_tiles, rows = tiles.key_tiles, tiles.rows
    per_segment = _ceil_div(key_tiles, num_segments)
    num_segments = _ceil_div(key_tiles, per_segment)
    num_partials, step = num_segments, rows
    if short_partials > 1:
        per_item = np.where(tiles.is_long, np.int32(1), np.int32(short_partials))
        num_partials, step = num_segments * per_item, rows * per_item
    # What is neither cut nor computed by several writes the output, and no partial result.
    is_split = num_partials > 1
    step = step * is_split
    partial_rows = num_segments * step
    ends = partial_rows.cumsum(dtype=np.int32)
    fields[:, _BASE] = base = ends - partial_rows
    fields[:, _SLOT] = np.where(is_split, base, -1)
    fields[:, _NUM_PARTIALS], fields[:, _STEP] = num_partials, step
    fields[:, _LENGTH] = per_segment * fields[:, _BLOCK_N]
    items, number = _repeat(fields, num_segments)
    length = items[:, _LENGTH]
    items[:, _START] = start = items[:, _START] + number * length
    items[:, _STOP] = np.minimum(start + length, items[:, _STOP])
    items[:, _SLOT] += number * items[:, _STEP]
    entries = _entries(fields, is_split, combine_rows) if combine_rows else _NO_ENTRIES
    return _scheduled(tiles, items, schedule, entries, int(ends[-1]))


_NO_ENTRIES = np.empty((0, ENTRY_FIELDS), np.int32)


def _entries(fields: IntArray, is_split: NDArray[np.bool_], combine_rows: int) -> IntArray:
    """The entries of the tiles that have partial results, `combine_rows` rows each."""
    count = _ceil_div(fields[:, _ROWS], np.int32(combine_rows)) * is_split
    entries, number = _repeat(fields, count)
    offset = number * np.int32(combine_rows)
    entries[:, _FIRST_ROW] += offset
    entries[:, _BASE] += offset
    return entries[:, :ENTRY_FIELDS]


def _scheduled(
    tiles: Tiles, items: IntArray, schedule: str, entries: IntArray, partial_rows: int
) -> WorkList:
    """The work list of `items`, cut from `tiles`, in the order of `schedule`."""
    rank = items[:, _RANK]
    num_long = int(np.count_nonzero(rank))
    num_short = len(items) - num_long
    order = (rank + items[:, _START] - items[:, _STOP]).argsort(kind="stable")
    if schedule == "interleaved" and num_long and num_short:
        # Item i of the n of a kind belongs in the middle of the i-th of n equal parts of the list.
        place = np.concatenate((np.arange(0.5, num_long) / num_long, np.arange(0.5, num_short) / num_short))
        order = order.take(place.argsort(kind="stable"))
    items = items.take(order, 0)
    return WorkList(items[:, :ITEM_FIELDS], num_long, entries, items[:, _BASE:_ROWS], partial_rows,
                    tiles.num_tokens)


def _repeat(fields: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
    """Each row of `fields` as many times as its count says, and the number of each copy among them: 0, 1, ..."""
    fields[:, _COPY] = counts - counts.cumsum(dtype=np.int32)
    copies = fields.repeat(counts, 0)
    return copies, copies[:, _COPY] + np.arange(len(copies), dtype=np.int32)


def _ceil_div(a: IntArray, b: IntArray | np.int32) -> IntArray:
    return (a + (b - 1)) // b
