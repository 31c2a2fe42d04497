"""The plan of a launch: which program computes what. Made once per engine step, used by every layer.

All of it is vectorised over the batch. The keys of a tile of query rows are cut at multiples of its key tile's width.
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

# Where the first partial result of an item's tile stands and how many there are, for the last program of the tile.
MERGE_FIELDS = 2
# An entry of the reduction: of an item's fields where the sequence's tokens start in q, its rows and the entry's first
# row, and what follows: where its first partial result stands, how many there are, and the rows between them.
ENTRY_FIELDS = ITEM_FIELDS + 3
_BASE, _NUM_PARTIALS, _ROWS = range(ITEM_FIELDS, ENTRY_FIELDS)

# Of `whole_rounds`: more rounds are not tried, a further one has to make it so much faster, and programs that are busy
# for this share of the time are busy enough, which they always are where tiles are so many times fewer.
MOST_ROUNDS = 4
WORTH_A_ROUND = 0.95
WELL_FILLED = 0.9
FEW_TILES = 12

# Under the bits of an item's rank there is room for the places of more items than a memory holds.
_PLACE_BITS = 31


class WorkList(NamedTuple):
    """What the kernels read, as `ITEM_FIELDS`, `ENTRY_FIELDS` and `MERGE_FIELDS` say.

    items [n, 8], of which `num_long` are of long sequences; entries [m, 11] of the reduction, or without one
    merges [n, 2], for each item; `partial_rows` rows of partial results per KV head; `num_tokens` query tokens.
    """

    items: FieldArray
    num_long: int
    entries: FieldArray
    merges: FieldArray
    partial_rows: int
    num_tokens: int


def balanced_segments(tiles: Tiles, num_items: float, long_weight: float) -> IntArray:
    """How many segments to cut each tile's keys into, so that about `num_items` items cost the same.

    A key, of those inside the window, costs `long_weight` in a long tile and 1 in a short one. Rounding up makes some
    more items.
    """
    cost = _cost(tiles, long_weight)
    return np.ceil(cost * (num_items / max(cost.sum(), 1.0))).astype(np.int64)


def whole_rounds(tiles: Tiles, rounds: int, per_round: float, long_weight: float) -> IntArray:
    """As `balanced_segments`, but no more items than `rounds` rounds of `per_round`, unless there are more tiles.

    A round is as many items as programs run at once. Where one item more would wait for a round of its own, or tiles
    are too few to be cut evenly, programs would be idle: then up to `most_rounds` rounds of smaller items are taken, or
    the few tiles that fill no round are cut alone, if these are estimated to end earlier.
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
    """Ways to cut tiles of so much cost, the plainest first: the segments of each tile, and the estimated time."""
    for count in range(rounds, most_rounds(len(cost), rounds, per_round) + 1):
        segments, found = _at_most(cost, total, count * per_round, key_tiles)
        yield segments, max(math.ceil(found / per_round) * total / found, float((cost / segments).max()))
        if count == rounds:
            yield _rest_cut(cost, total, per_round, key_tiles)


def _rest_cut(
    cost: NDArray[Any], total: float, per_round: float, key_tiles: IntArray
) -> tuple[NDArray[Any], float]:
    """Segments where only the tiles that fill no round are cut, into about a round of pieces, and the time it takes.

    The pieces, which come last, fill what the rounds of whole tiles leave.
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
    """The most rounds that `whole_rounds` makes of `rounds`: many times more programs than tiles need no more."""
    return rounds if FEW_TILES * num_tiles <= per_round else max(rounds, MOST_ROUNDS)


def _at_most(cost: NDArray[Any], total: float, num_items: float, key_tiles: IntArray) -> tuple[NDArray[Any], float]:
    """Segments of about equal cost, at most `num_items` unless there are more tiles, and how many they are."""
    share = num_items / total
    while True:
        segments = np.minimum(np.ceil(cost * share), key_tiles)
        found = float(segments.sum())
        if found <= num_items or len(cost) > num_items:
            return segments, found
        # A hundredth at least, so that it ends.
        share *= min(num_items / found, 0.99)


def _cost(tiles: Tiles, long_weight: float) -> NDArray[Any]:
    return tiles.keys if long_weight == 1 else tiles.keys * np.where(tiles.cut.is_long, long_weight, 1.0)


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
    return ceil_div(tiles.keys, of_body(tiles.cut.is_long, long_keys, short_keys))


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
        per_segment = of_body(cut.is_long, 1, short_partials)
        num, step = num * per_segment, step * per_segment
    # What is neither cut nor computed by several writes the output, and no partial result.
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
    """The items of tiles in segments of so many keys, tile by tile: the tile of each, its keys, and its fields."""
    tile, number = repeat(num_segments)
    length = length.take(tile)
    offset = number * length
    start, keys = tiles.start.take(tile) + offset, np.minimum(length, tiles.keys.take(tile) - offset)
    items = tiles.fields.take(tile, 0)
    items[:, START], items[:, STOP] = start, start + keys
    items[:, SLOT] = partials.slot.take(tile) + number * partials.step.take(tile)
    return tile, keys, items


def _entries(cut: RowTiles, partials: Partials, combine_rows: int) -> FieldArray:
    """The entries of the tiles that are split, `combine_rows` rows each."""
    tile, offset, blocks = _row_blocks(cut, combine_rows)
    chosen = (partials.num > 1).take(tile).nonzero()[0]
    tile, entries = tile.take(chosen), blocks.take(chosen, 0)
    entries[:, _BASE] = partials.slot.take(tile) + offset.take(chosen)
    entries[:, _NUM_PARTIALS] = partials.num.take(tile)
    return entries


@functools.lru_cache(maxsize=KEPT)
def _row_blocks(cut: RowTiles, combine_rows: int) -> tuple[IntArray, IntArray, FieldArray]:
    """All tiles in blocks of `combine_rows` rows: the tile of each, its first row there, its entry if it is split."""
    tile, number = repeat(ceil_div(cut.rows, combine_rows))
    offset = number * combine_rows
    fields = np.zeros((len(cut.rows), ENTRY_FIELDS), np.int32)
    fields[:, :ITEM_FIELDS], fields[:, _ROWS] = cut.fields, cut.rows
    blocks = fields.take(tile, 0)
    blocks[:, FIRST_ROW] += offset.astype(np.int32)
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
