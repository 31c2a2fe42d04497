"""The plan of a launch: which program computes what. Made once per engine step, used by every layer.

All of it is vectorised over the batch. The keys of a tile of query rows are cut at multiples of its key tile's width.
Columns are computed in 64 bits, where nothing overflows, and one by one, which numpy does fastest; what the kernels
read is one matrix of 32-bit rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .batch import MAX_TOKENS, SHORT_QUERY, TREE_TOKENS, Batch
from .errors import BatchError
from .lengths import IntArray, Lengths
from .limits import Body

# The fields of an item, as the kernels' int32 read them: where the sequence's tokens start in q, its context length,
# its rows, the tile's first row, the first key, the key after the last, the sequence, and the tile's first row in the
# partial results (negative: the item covers all its keys and writes the output).
ITEM_FIELDS = 8
_Q_START, _CONTEXT_LEN, _NUM_ROWS, _FIRST_ROW, _START, _STOP, _SEQ, _SLOT = range(ITEM_FIELDS)

# Where the first partial result of an item's tile stands and how many there are, for the last program of the tile.
MERGE_FIELDS = 2
# An entry of the reduction: of an item's fields where the sequence's tokens start in q, its rows and the entry's first
# row, and what follows: where its first partial result stands, how many there are, and the rows between them.
ENTRY_FIELDS = ITEM_FIELDS + 3
_BASE, _NUM_PARTIALS, _ROWS = range(ITEM_FIELDS, ENTRY_FIELDS)

# What the kernels number in 32 bits: rows of a batch, and rows of partial results. As for tokens, there is room above
# for the tile that the last one is in.
MAX_ROWS = MAX_TOKENS

# The rank of an item is minus its keys, and this more for one of a long sequence, which is below any short one's. Under
# the bits of the rank there is room for the places of more items than a memory holds.
_LONG_FIRST = -MAX_TOKENS - 1
_PLACE_BITS = 31

FieldArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class RowTiles:
    """The tiles of a batch's query rows, sequence by sequence, whatever the contexts; each column is [n].

    They are kept for later steps, and never written again. fields [n, 8]: an item each that writes the output, without
    what depends on the context. seq: its sequence. is_long: whether that is a long one. rank: as `_LONG_FIRST` says.
    first_row, rows: of the tile. seen: query tokens that its last row sees. block_n: the keys of its key tiles, one
    number where all agree. `num_tokens` are the query tokens of the batch.
    """

    fields: FieldArray
    seq: IntArray
    is_long: NDArray[np.bool_]
    rank: IntArray
    first_row: IntArray
    rows: IntArray
    seen: IntArray
    block_n: IntArray | int
    num_tokens: int


class Tiles(NamedTuple):
    """The tiles of a batch with their keys; each column is [n].

    cut: their rows. fields [n, 8]: an item each, of all its keys, that writes the output. start: the first key that its
    first row sees, or a few before. keys: how many there are from it to the last that any row sees.
    """

    cut: RowTiles
    fields: FieldArray
    start: IntArray
    keys: IntArray

    @property
    def stop(self) -> IntArray:
        """The key after the last that any row of each tile sees."""
        return self.start + self.keys

    @property
    def key_tiles(self) -> IntArray:
        """How many key tiles each tile reads."""
        return _ceil_div(self.keys, self.cut.block_n)


class WorkList(NamedTuple):
    """What the kernels read, as `ITEM_FIELDS`, `ENTRY_FIELDS` and `MERGE_FIELDS` say.

    items [n, 8], of which `num_long` are of long sequences; entries [m, 11] of the reduction, or without
    one merges [n, 2], for each item; `partial_rows` rows of partial results per KV head; `num_tokens` query tokens.
    """

    items: FieldArray
    num_long: int
    entries: FieldArray
    merges: FieldArray
    partial_rows: int
    num_tokens: int


def cut_tiles(
    batch: Batch | Lengths, group_size: int, long: Body, short: Body, window: int | None = None,
    has_tree_mask: bool = False,
) -> Tiles:  # fmt: skip
    """Cut the rows of each sequence (query tokens times `group_size`) into tiles of its body's `block_m` rows.

    With a sliding `window` a tile's keys start where its first row's window does, at a multiple of the body's
    `block_n`. With a tree mask tiles of the sequences that heed it read all of the sequence's own keys: what hides them
    is not causality, nor the window. Raises `BatchError` for a batch of more than `MAX_ROWS` rows.
    """
    lengths = Lengths.of_batch(batch)
    cut = _cut_rows(lengths.query.tobytes(), group_size, long, short)
    context_len = lengths.context.take(cut.seq)
    stop = context_len + cut.seen
    start = np.zeros(len(stop), np.int64)
    if window is not None:
        first_position = context_len + cut.first_row // group_size
        start = np.maximum(first_position + 1 - window, 0)
    if has_tree_mask:
        query_len = lengths.query.take(cut.seq)
        has_words = (query_len > 1) & (query_len <= TREE_TOKENS)
        start = np.where(has_words, np.minimum(start, context_len), start)
        stop = np.where(has_words, context_len + query_len, stop)
    if window is not None:
        start = start // cut.block_n * cut.block_n
    fields = cut.fields.copy()
    fields[:, _CONTEXT_LEN], fields[:, _START], fields[:, _STOP] = context_len, start, stop
    return Tiles(cut, fields, start, stop - start)


# Most steps of an engine have the query lengths of the step before, for each of a few variants: those of decode are all
# one, and a long prompt's chunks are of one size.
_KEPT = 4


@functools.lru_cache(maxsize=_KEPT)
def _cut_rows(query_lens: bytes, group_size: int, long: Body, short: Body) -> RowTiles:
    """The tiles of sequences of so many query tokens, the bytes of an int64 array."""
    query_len = np.frombuffer(query_lens, np.int64)
    ends = np.add.accumulate(query_len)
    num_tokens = int(ends[-1])
    if not num_tokens:
        raise BatchError("a batch needs at least one query token")
    if num_tokens * group_size > MAX_ROWS:
        raise BatchError(f"cannot plan {num_tokens} query tokens of {group_size} query heads to a KV head in one "
                         f"batch; accepted are up to {MAX_ROWS} rows, their product")
    num_rows = query_len * group_size
    num_tiles = _ceil_div(num_rows, _of_body(query_len > SHORT_QUERY, long.block_m, short.block_m))
    seq, number = _repeat(num_tiles)
    is_long = query_len.take(seq) > SHORT_QUERY
    block_m = _of_body(is_long, long.block_m, short.block_m)
    first_row = number * block_m
    stop_row = np.minimum(first_row + block_m, num_rows.take(seq))
    fields = np.zeros((len(seq), ITEM_FIELDS), np.int32)
    fields[:, _Q_START] = (ends - query_len).take(seq)
    fields[:, _NUM_ROWS], fields[:, _FIRST_ROW], fields[:, _SEQ] = num_rows.take(seq), first_row, seq
    fields[:, _SLOT] = -1
    rows, seen = stop_row - first_row, _ceil_div(stop_row, group_size)
    block_n = _of_body(is_long, long.block_n, short.block_n)
    rank = is_long * _LONG_FIRST
    return RowTiles(fields, seq, is_long, rank, first_row, rows, seen, block_n, num_tokens)


def balanced_segments(tiles: Tiles, num_items: float, long_weight: float, is_most: bool = False) -> IntArray:
    """How many segments to cut each tile's keys into, so that about `num_items` items cost the same.

    A key, of those inside the window, costs `long_weight` in a long tile and 1 in a short one. Rounding up makes some
    more items; with `is_most` there are at most `num_items`, unless there are more tiles.
    """
    cost = tiles.keys if long_weight == 1 else tiles.keys * np.where(tiles.cut.is_long, long_weight, 1.0)
    share = num_items / max(cost.sum(), 1.0)
    segments = np.ceil(cost * share)
    while is_most and len(segments) <= num_items < (found := np.minimum(segments, tiles.key_tiles).sum()):
        # A hundredth at least, so that it ends.
        share *= min(num_items / found, 0.99)
        segments = np.ceil(cost * share)
    return segments.astype(np.int64)


def balanced_by_part(tiles: Tiles, num_items: float) -> IntArray:
    """As `balanced_segments`, but with about `num_items` items for the long and as many for the short sequences."""
    keys = tiles.keys
    long = int((keys * tiles.cut.is_long).sum())
    short = int(keys.sum()) - long
    if not long or not short:
        return balanced_segments(tiles, num_items, 1)
    # At this weight both parts cost the same.
    return balanced_segments(tiles, 2 * num_items, short / long)


def equal_segments(tiles: Tiles, num_segments: int) -> IntArray:
    """`num_segments` segments for each tile."""
    return np.full(len(tiles.keys), num_segments)


def fixed_segments(tiles: Tiles, short_keys: int, long_keys: int) -> IntArray:
    """The fewest segments for each tile that have at most so many keys, multiples of its key tile's width.

    `short_keys` for tiles of short and `long_keys` for those of long sequences: where a tile is cut depends on no other
    sequence.
    """
    return _ceil_div(tiles.keys, _of_body(tiles.cut.is_long, long_keys, short_keys))


def work_list(
    tiles: Tiles, num_segments: IntArray, combine_rows: int, schedule: str = "long_first", short_partials: int = 1
) -> WorkList:
    """The work list of `tiles`, each with its keys cut into `num_segments`, or fewer where there are no more key tiles.

    The reduction merges `combine_rows` rows in one program; with 0 there is none. `schedule`: "long_first" puts items
    of long sequences first and, of each kind, those with the most keys; "interleaved" spreads the two kinds evenly. An
    item of a short sequence writes `short_partials` partial results, one after the other. Raises `BatchError` for more
    than `MAX_ROWS` rows of partial results.
    """
    cut = tiles.cut
    if short_partials == 1 and num_segments.max() == 1:
        order, num_long = _order(tiles.keys, cut.rank, schedule)
        merges = _NO_MERGES if combine_rows else np.zeros((len(order), MERGE_FIELDS), np.int32)
        return WorkList(tiles.fields.take(order, 0), num_long, _NO_ENTRIES, merges, 0, cut.num_tokens)
    key_tiles = tiles.key_tiles
    per_segment = _ceil_div(key_tiles, num_segments)
    num_segments = _ceil_div(key_tiles, per_segment)
    partials = _partials(cut, num_segments, short_partials)
    tile, number = _repeat(num_segments)
    length = (per_segment * cut.block_n).take(tile)
    offset = number * length
    start, keys = tiles.start.take(tile) + offset, np.minimum(length, tiles.keys.take(tile) - offset)
    items = tiles.fields.take(tile, 0)
    items[:, _START], items[:, _STOP] = start, start + keys
    items[:, _SLOT] = partials.slot.take(tile) + number * partials.step.take(tile)
    order, num_long = _order(keys, cut.rank.take(tile), schedule)
    entries, merges = _NO_ENTRIES, _NO_MERGES
    if combine_rows:
        entries = _entries(cut, partials, combine_rows)
    else:
        merges = np.stack((partials.slot, partials.num), 1, dtype=np.int32).take(tile.take(order), 0)
    return WorkList(items.take(order, 0), num_long, entries, merges, partials.num_rows, cut.num_tokens)


_NO_ENTRIES = np.empty((0, ENTRY_FIELDS), np.int32)
_NO_MERGES = np.empty((0, MERGE_FIELDS), np.int32)


class Partials(NamedTuple):
    """The partial results of each tile, `num_rows` rows in all; each column is [n].

    num: how many. slot: the first row of the first one, or -1 where there is one only, which is written to the output
    instead. step: the rows from the first one of a segment to the first one of the next.
    """

    num: IntArray
    slot: IntArray
    step: IntArray
    num_rows: int


def _partials(cut: RowTiles, num_segments: IntArray, short_partials: int) -> Partials:
    """The partial results of tiles in so many segments. Raises `BatchError` for more than `MAX_ROWS` rows."""
    num, step = num_segments, cut.rows
    if short_partials > 1:
        per_segment = _of_body(cut.is_long, 1, short_partials)
        num, step = num * per_segment, step * per_segment
    # What is neither cut nor computed by several writes the output, and no partial result.
    is_split = num > 1
    taken = num_segments * step * is_split
    ends = np.add.accumulate(taken)
    num_rows = int(ends[-1])
    if num_rows > MAX_ROWS:
        raise BatchError(f"cannot plan {num_rows} rows of partial results; accepted are up to {MAX_ROWS}")
    return Partials(num, np.where(is_split, ends - taken, -1), step, num_rows)


def _entries(cut: RowTiles, partials: Partials, combine_rows: int) -> FieldArray:
    """The entries of the tiles that are split, `combine_rows` rows each."""
    tile, offset, blocks = _row_blocks(cut, combine_rows)
    chosen = (partials.num > 1).take(tile).nonzero()[0]
    tile, entries = tile.take(chosen), blocks.take(chosen, 0)
    entries[:, _BASE] = partials.slot.take(tile) + offset.take(chosen)
    entries[:, _NUM_PARTIALS] = partials.num.take(tile)
    return entries


@functools.lru_cache(maxsize=_KEPT)
def _row_blocks(cut: RowTiles, combine_rows: int) -> tuple[IntArray, IntArray, FieldArray]:
    """All tiles in blocks of `combine_rows` rows: the tile of each, its first row there, its entry if it is split."""
    tile, number = _repeat(_ceil_div(cut.rows, combine_rows))
    offset = number * combine_rows
    fields = np.zeros((len(cut.rows), ENTRY_FIELDS), np.int32)
    fields[:, :ITEM_FIELDS], fields[:, _ROWS] = cut.fields, cut.rows
    blocks = fields.take(tile, 0)
    blocks[:, _FIRST_ROW] += offset.astype(np.int32)
    return tile, offset, blocks


def _order(keys: IntArray, rank: IntArray, schedule: str) -> tuple[IntArray, int]:
    """The order of items of so many `keys`, as `schedule` says, and how many are of long sequences, as `rank` says."""
    # A stable sort by rank, but of numbers, which numpy does several times faster: below its rank each has its place.
    order = np.sort(((rank - keys) << _PLACE_BITS) | np.arange(len(keys))) & ((1 << _PLACE_BITS) - 1)
    num_long = int(np.count_nonzero(rank))
    num_short = len(keys) - num_long
    if num_long and num_short and schedule == "interleaved":
        # Item i of the n of a kind belongs in the middle of the i-th of n equal parts of the list.
        place = np.concatenate((np.arange(0.5, num_long) / num_long, np.arange(0.5, num_short) / num_short))
        order = order.take(place.argsort(kind="stable"))
    return order, num_long


def _repeat(counts: IntArray) -> tuple[IntArray, IntArray]:
    """The number of each row as many times as its count says, and the number of each copy among them: 0, 1, ..."""
    row = np.arange(len(counts)).repeat(counts)
    return row, np.arange(len(row)) - (np.add.accumulate(counts) - counts).take(row)


def _of_body(is_long: NDArray[np.bool_], long: int, short: int) -> IntArray | int:
    """What is `long` where a sequence is long, and `short` elsewhere; one number where both are equal."""
    return long if long == short else np.where(is_long, long, short)


def _ceil_div(a: IntArray, b: IntArray | int) -> IntArray:
    return -(a // -b)
