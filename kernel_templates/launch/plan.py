"""The plan of a launch: the work of each program. Made once per engine step, used by every layer.

Everything is vectorised over the batch. The keys of a tile of query rows are cut at multiples of its key tile's width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..batch import IntArray
from ..errors import BatchError
from .tiles import (
    FIRST_ROW,
    ITEM_FIELDS,
    KEPT,
    MAX_ROWS,
    SLOT,
    START,
    STOP,
    FieldArray,
    RowTiles,
    Tiles,
    ceil_div,
    of_body,
    repeat,
)

# For the last program of an item's tile: the row of the tile's first partial result, and their number.
MERGE_FIELDS = 2
# An entry of the reduction has an item's fields, then the row of its first partial result, their number, and the rows
# from one to the next. Of an item's fields the kernel uses the first token in q, the rows, and the entry's first row.
ENTRY_FIELDS = ITEM_FIELDS + 3
_BASE, _NUM_PARTIALS, _ROWS = range(ITEM_FIELDS, ENTRY_FIELDS)

# Limits of `whole_rounds`: the most rounds tried; the share of the time that a further round must fall below; the share
# of the time that programs must be busy for no further round to be tried; and the programs per tile from which more
# rounds cannot help.
MOST_ROUNDS = 4
WORTH_A_ROUND = 0.95
WELL_FILLED = 0.9
FEW_TILES = 12

# Bits below an item's rank for its index: enough for more items than any memory holds.
_PLACE_BITS = 31


class WorkList(NamedTuple):
    """The arrays that the kernels read, and their sizes."""

    # [n, 8], the fields of `ITEM_FIELDS`.
    items: FieldArray
    # Items of long sequences.
    num_long: int
    # [m, 11], the fields of `ENTRY_FIELDS`; empty without a reduction kernel.
    entries: FieldArray
    # [n, 2], the fields of `MERGE_FIELDS`; empty with a reduction kernel.
    merges: FieldArray
    # Rows of partial results per KV head.
    partial_rows: int
    # Query tokens of the batch.
    num_tokens: int


def balanced_segments(tiles: Tiles, num_items: float, long_weight: float) -> IntArray:
    """The number of segments for each tile's keys, so that about `num_items` items cost the same.

    A key inside the window costs `long_weight` in a long tile and 1 in a short one. Rounding up makes a few more items.
    """
    cost = _cost(tiles, long_weight)
    return np.ceil(cost * (num_items / max(cost.sum(), 1.0))).astype(np.int64)


def whole_rounds(tiles: Tiles, rounds: int, per_round: float, long_weight: float) -> IntArray:
    """Segments as `balanced_segments` gives, but at most `rounds` rounds of `per_round` items, unless tiles are more.

    A round is the items that run at once. Programs are idle where one item more would need a round of its own, and
    where tiles are too few to be cut evenly. Then up to `most_rounds` rounds of smaller items are tried, and cutting
    only the tiles that fill no round; the cut with the shortest estimated time is taken.
    """
    cost = _cost(tiles, long_weight)
    total = max(float(cost.sum()), 1.0)
    best, best_time = None, math.inf
    for segments, time in _cuts(cost, total, rounds, per_round, tiles.key_tiles):
        if time < WORTH_A_ROUND * best_time:
            best, best_time = segments, time
        if total >= WELL_FILLED * per_round * best_time:
            break
    assert best is not None
    return best.astype(np.int64)


def _cuts(
    cost: NDArray[Any], total: float, rounds: int, per_round: float, key_tiles: IntArray
) -> Iterator[tuple[NDArray[Any], float]]:
    """Cuts of tiles with these costs, the plainest first: the segments of each tile, and the estimated time."""
    for count in range(rounds, most_rounds(len(cost), rounds, per_round) + 1):
        segments, found = _at_most(cost, total, count * per_round, key_tiles)
        yield segments, max(math.ceil(found / per_round) * total / found, float((cost / segments).max()))
        if count == rounds:
            yield _rest_cut(cost, total, per_round, key_tiles)


def _rest_cut(
    cost: NDArray[Any], total: float, per_round: float, key_tiles: IntArray
) -> tuple[NDArray[Any], float]:
    """Segments where only tiles that fill no round are cut, into about a round of pieces, and the estimated time.

    The pieces come last, and fill the time that the rounds of whole tiles leave.
    """
    segments = np.ones_like(key_tiles)
    num_rounds = int(len(cost) // per_round)
    num_whole = int(num_rounds * per_round)
    if not num_whole or num_whole == len(cost):
        return segments, math.inf
    order = np.argsort(-cost, kind="stable")
    whole, rest = cost[order[:num_whole]], order[num_whole:]
    segments[rest] = np.minimum(np.ceil(cost[rest] * (per_round / cost[rest].sum())), key_tiles[rest])
    longest = whole[(np.arange(num_rounds) * per_round).astype(np.int64)]
    return segments, max(float(longest.sum()), total / per_round + float((cost[rest] / segments[rest]).max()))


def most_rounds(num_tiles: int, rounds: int, per_round: float) -> int:
    """The most rounds that `whole_rounds` tries; with many programs per tile, more than `rounds` cannot help."""
    return rounds if FEW_TILES * num_tiles <= per_round else max(rounds, MOST_ROUNDS)


def _at_most(cost: NDArray[Any], total: float, num_items: float, key_tiles: IntArray) -> tuple[NDArray[Any], float]:
    """Segments of about equal cost, at most `num_items` in all unless there are more tiles, and their total."""
    share = num_items / total
    while True:
        segments = np.minimum(np.ceil(cost * share), key_tiles)
        found = float(segments.sum())
        if found <= num_items or len(cost) > num_items:
            return segments, found
        # Shrink by at least a hundredth, so that the loop ends.
        share *= min(num_items / found, 0.99)


def _cost(tiles: Tiles, long_weight: float) -> NDArray[Any]:
    return tiles.keys if long_weight == 1 else tiles.keys * np.where(tiles.cut.is_long, long_weight, 1.0)


def balanced_by_part(tiles: Tiles, num_items: float) -> IntArray:
    """Segments for about `num_items` items of long sequences, and as many of short ones, all of a part alike."""
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
    """The fewest segments for each tile of at most `short_keys` or `long_keys` keys, by the kind of its sequence.

    Both are multiples of the key tiles' widths. The cuts of a tile depend on no other sequence.
    """
    return ceil_div(tiles.keys, of_body(tiles.cut.is_long, long_keys, short_keys))


def work_list(
    tiles: Tiles, num_segments: IntArray, combine_rows: int, schedule: str = "long_first", short_partials: int = 1
) -> WorkList:
    """The work list of `tiles`, whose keys are cut into `num_segments`, or fewer where there are no more key tiles.

    An entry of the reduction has `combine_rows` rows; 0 means no reduction. `schedule` "long_first" puts items of long
    sequences first, and within a kind those with the most keys; "interleaved" spreads the two kinds evenly. An item of
    a short sequence writes `short_partials` partial results, one after the other. Raises `BatchError` for more than
    `MAX_ROWS` rows of partial results.
    """
    cut = tiles.cut
    is_cut = num_segments.max() > 1
    if not is_cut and short_partials == 1:
        order, num_long = _order(tiles.keys, cut.rank, schedule)
        merges = _NO_MERGES if combine_rows else np.zeros((len(order), MERGE_FIELDS), np.int32)
        return WorkList(tiles.fields.take(order, 0), num_long, _NO_ENTRIES, merges, 0, cut.num_tokens)
    length = tiles.keys
    if is_cut:
        key_tiles = tiles.key_tiles
        per_segment = ceil_div(key_tiles, num_segments)
        num_segments, length = ceil_div(key_tiles, per_segment), per_segment * cut.block_n
    partials = _partials(cut, num_segments, short_partials)
    tile, keys, items = _cut_keys(tiles, num_segments, length, partials)
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
    """The partial results of each tile; each column is [n]."""

    # Partial results of the tile.
    num: IntArray
    # The row of the first one; -1 where there is only one, which is written to the output instead.
    slot: IntArray
    # Rows from a segment's first partial result to the next segment's.
    step: IntArray
    # Rows of all tiles.
    num_rows: int


def _partials(cut: RowTiles, num_segments: IntArray, short_partials: int) -> Partials:
    """The partial results of tiles in `num_segments` segments. Raises `BatchError` for more than `MAX_ROWS` rows."""
    num, step = num_segments, cut.rows
    if short_partials > 1:
        per_segment = of_body(cut.is_long, 1, short_partials)
        num, step = num * per_segment, step * per_segment
    # A tile with a single result writes the output, and no partial result.
    is_split = num > 1
    taken = num_segments * step * is_split
    ends = np.add.accumulate(taken)
    num_rows = int(ends[-1])
    if num_rows > MAX_ROWS:
        raise BatchError(f"cannot plan {num_rows} rows of partial results; accepted are up to {MAX_ROWS}")
    return Partials(num, np.where(is_split, ends - taken, -1), step, num_rows)


def _cut_keys(
    tiles: Tiles, num_segments: IntArray, length: IntArray, partials: Partials
) -> tuple[IntArray, IntArray, FieldArray]:
    """The items of tiles in segments of `length` keys, tile by tile: each item's tile, keys and fields."""
    tile, number = repeat(num_segments)
    length = length.take(tile)
    offset = number * length
    start, keys = tiles.start.take(tile) + offset, np.minimum(length, tiles.keys.take(tile) - offset)
    items = tiles.fields.take(tile, 0)
    items[:, START], items[:, STOP] = start, start + keys
    items[:, SLOT] = partials.slot.take(tile) + number * partials.step.take(tile)
    return tile, keys, items


def _entries(cut: RowTiles, partials: Partials, combine_rows: int) -> FieldArray:
    """The reduction's entries of split tiles, `combine_rows` rows each."""
    tile, offset, blocks = _row_blocks(cut, combine_rows)
    chosen = (partials.num > 1).take(tile).nonzero()[0]
    tile, entries = tile.take(chosen), blocks.take(chosen, 0)
    entries[:, _BASE] = partials.slot.take(tile) + offset.take(chosen)
    entries[:, _NUM_PARTIALS] = partials.num.take(tile)
    return entries


@functools.lru_cache(maxsize=KEPT)
def _row_blocks(cut: RowTiles, combine_rows: int) -> tuple[IntArray, IntArray, FieldArray]:
    """All tiles in blocks of `combine_rows` rows: each block's tile, first row, and entry if the tile is split."""
    tile, number = repeat(ceil_div(cut.rows, combine_rows))
    offset = number * combine_rows
    fields = np.zeros((len(cut.rows), ENTRY_FIELDS), np.int32)
    fields[:, :ITEM_FIELDS], fields[:, _ROWS] = cut.fields, cut.rows
    blocks = fields.take(tile, 0)
    blocks[:, FIRST_ROW] += offset.astype(np.int32)
    return tile, offset, blocks


def _order(keys: IntArray, rank: IntArray, schedule: str) -> tuple[IntArray, int]:
    """The order of items by `schedule`, and the number of items of long sequences, whose `rank` is not 0."""
    # Sorting plain numbers is several times faster than a stable argsort, so each number has its index below its rank.
    order = np.sort(((rank - keys) << _PLACE_BITS) | np.arange(len(keys))) & ((1 << _PLACE_BITS) - 1)
    num_long = int(np.count_nonzero(rank))
    num_short = len(keys) - num_long
    if num_long and num_short and schedule == "interleaved":
        # Item i of the n of a kind belongs in the middle of the i-th of n equal parts of the list.
        place = np.concatenate((np.arange(0.5, num_long) / num_long, np.arange(0.5, num_short) / num_short))
        order = order.take(place.argsort(kind="stable"))
    return order, num_long
