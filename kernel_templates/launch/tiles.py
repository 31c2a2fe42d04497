"""The tiles that a batch's query rows are cut into, and the keys that each reads.

All of it is vectorised over the batch. Columns are computed in 64 bits, where nothing overflows, and one by one, which
numpy does fastest; what the kernels read is a matrix of 32-bit rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..batch import MAX_TOKENS, SHORT_QUERY, TREE_TOKENS, Batch, IntArray, Lengths
from ..errors import BatchError
from ..template import Body

FieldArray = NDArray[np.int32]

# Many steps of an engine have the query lengths of the step before: those of decode are all one, and a long prompt's
# chunks are of one size. What follows from these alone is kept, for a few variants.
KEPT = 4

# The fields of an item, as the kernels' int32 read them: where the sequence's tokens start in q, its context length,
# its rows, the tile's first row, the first key, the key after the last, the sequence, and the tile's first row in the
# partial results (negative: the item covers all its keys and writes the output).
ITEM_FIELDS = 8
Q_START, CONTEXT_LEN, NUM_ROWS, FIRST_ROW, START, STOP, SEQ, SLOT = range(ITEM_FIELDS)

# What the kernels number in 32 bits: rows of a batch, and rows of partial results. As for tokens, there is room above
# for the tile that the last one is in.
MAX_ROWS = MAX_TOKENS

# The rank of an item in the work list is minus its keys, and this more for one of a long sequence, which is below any
# short one's.
LONG_FIRST = -MAX_TOKENS - 1


@dataclass(frozen=True, slots=True, eq=False)
class RowTiles:
    """The tiles of a batch's query rows, sequence by sequence, whatever the contexts; each column is [n].

    They are kept for later steps, and never written again. fields [n, 8]: an item each that writes the output, without
    what depends on the context. seq: its sequence. is_long: whether that is a long one. rank: as `LONG_FIRST` says.
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
        return ceil_div(self.keys, self.cut.block_n)


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
    fields[:, CONTEXT_LEN], fields[:, START], fields[:, STOP] = context_len, start, stop
    return Tiles(cut, fields, start, stop - start)


@functools.lru_cache(maxsize=KEPT)
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
    num_tiles = ceil_div(num_rows, of_body(query_len > SHORT_QUERY, long.block_m, short.block_m))
    seq, number = repeat(num_tiles)
    is_long = query_len.take(seq) > SHORT_QUERY
    block_m = of_body(is_long, long.block_m, short.block_m)
    first_row = number * block_m
    stop_row = np.minimum(first_row + block_m, num_rows.take(seq))
    fields = np.zeros((len(seq), ITEM_FIELDS), np.int32)
    fields[:, Q_START] = (ends - query_len).take(seq)
    fields[:, NUM_ROWS], fields[:, FIRST_ROW], fields[:, SEQ] = num_rows.take(seq), first_row, seq
    fields[:, SLOT] = -1
    rows, seen = stop_row - first_row, ceil_div(stop_row, group_size)
    block_n = of_body(is_long, long.block_n, short.block_n)
    rank = is_long * LONG_FIRST
    return RowTiles(fields, seq, is_long, rank, first_row, rows, seen, block_n, num_tokens)


def repeat(counts: IntArray) -> tuple[IntArray, IntArray]:
    """The number of each row as many times as its count says, and the number of each copy among them: 0, 1, ..."""
    row = np.arange(len(counts)).repeat(counts)
    return row, np.arange(len(row)) - (np.add.accumulate(counts) - counts).take(row)


def of_body(is_long: NDArray[np.bool_], long: int, short: int) -> IntArray | int:
    """What is `long` where a sequence is long, and `short` elsewhere; one number where both are equal."""
    return long if long == short else np.where(is_long, long, short)


def ceil_div(a: IntArray, b: IntArray | int) -> IntArray:
    """`a` / `b`, rounded up."""
    return -(a // -b)
