"""The tiles that a batch's query rows are cut into, and the keys that each reads.

Everything is vectorised over the batch. Columns are computed one by one, which is fastest in numpy, and in 64 bits, so
that nothing overflows. The kernels read a matrix of 32-bit rows.
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

# Many steps of an engine have the query lengths of the step before: in decode all are 1, and the chunks of a long
# prompt have one size. Results that depend on query lengths alone are therefore kept, for a few variants.
KEPT = 4

# The fields of an item, int32 in the kernels: the sequence's first token in q, its context length and its rows; the
# tile's first row; the first key, and the key after the last; the sequence; and the tile's first row of partial results
# (negative: the item covers all its keys and writes the output).
ITEM_FIELDS = 8
Q_START, CONTEXT_LEN, NUM_ROWS, FIRST_ROW, START, STOP, SEQ, SLOT = range(ITEM_FIELDS)

# The most rows of a batch, and of partial results, because kernels number them in 32 bits. Like for tokens, the limit
# leaves room for the rest of the last one's tile.
MAX_ROWS = MAX_TOKENS

# An item's rank in the work list is minus its keys, plus this for a long sequence, whose rank is then below any short
# one's.
LONG_FIRST = -MAX_TOKENS - 1


@dataclass(frozen=True, slots=True, eq=False)
class RowTiles:
    """The tiles of a batch's query rows, sequence by sequence, whatever the contexts; each column is [n].

    They are kept for later steps, so no array may be written to.
    """

    # [n, 8]: for each tile an item that writes the output, without the fields that depend on the context.
    fields: FieldArray
    # The tile's sequence.
    seq: IntArray
    # True where the sequence is long.
    is_long: NDArray[np.bool_]
    # `LONG_FIRST` for tiles of long sequences, else 0.
    rank: IntArray
    # The tile's first row in its sequence.
    first_row: IntArray
    # The tile's rows.
    rows: IntArray
    # Query tokens that the tile's last row sees.
    seen: IntArray
    # The width of the tile's key tiles; one number where all are equal.
    block_n: IntArray | int
    # Query tokens of the batch.
    num_tokens: int


class Tiles(NamedTuple):
    """The tiles of a batch with their keys; each column is [n]."""

    # The tiles' rows.
    cut: RowTiles
    # [n, 8]: for each tile an item over all its keys that writes the output.
    fields: FieldArray
    # The first key that the tile's first row sees, or a few before.
    start: IntArray
    # Keys from `start` to the last that any row of the tile sees.
    keys: IntArray

    @property
    def stop(self) -> IntArray:
        """The key after the last that any row of each tile sees."""
        return self.start + self.keys

    @property
    def key_tiles(self) -> IntArray:
        """The key tiles that each tile reads."""
        return ceil_div(self.keys, self.cut.block_n)


def cut_tiles(
    batch: Batch | Lengths, group_size: int, long: Body, short: Body, window: int | None = None,
    has_tree_mask: bool = False,
) -> Tiles:  # fmt: skip
    """Cut the rows of each sequence (query tokens times `group_size`) into tiles of its body's `block_m` rows.

    With a sliding `window` a tile's keys start where its first row's window does, rounded down to a multiple of the
    body's `block_n`. With a tree mask, tiles of sequences that use it read all of the sequence's own keys, because only
    the mask hides them. Raises `BatchError` for a batch of more than `MAX_ROWS` rows.
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
    """The tiles of sequences with these query lengths, given as the bytes of an int64 array."""
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
    """Each row's number, repeated `counts` times, and the number of each repetition: 0, 1, ..."""
    row = np.arange(len(counts)).repeat(counts)
    return row, np.arange(len(row)) - (np.add.accumulate(counts) - counts).take(row)


def of_body(is_long: NDArray[np.bool_], long: int, short: int) -> IntArray | int:
    """`long` where a sequence is long, `short` elsewhere; one number where both are equal."""
    return long if long == short else np.where(is_long, long, short)


def ceil_div(a: IntArray, b: IntArray | int) -> IntArray:
    """`a` / `b`, rounded up."""
    return -(a // -b)
