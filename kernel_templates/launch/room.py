"""How much room the work lists of all batches up to a size can take, whatever the lengths of their sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..batch import SHORT_QUERY
from ..template import Body


@dataclass(frozen=True, slots=True)
class Room:
    """Items, entries of the reduction, and rows of partial results for each KV head."""

    items: int
    entries: int
    partial_rows: int

    def holds(self, needed: Room) -> bool:
        """Whether there is room for `needed`."""
        return (self.items >= needed.items and self.entries >= needed.entries
                and self.partial_rows >= needed.partial_rows)


@dataclass(frozen=True, slots=True)
class Limit:
    """Batches of at most `num_seqs` sequences and `num_tokens` query tokens, cut into tiles of these bodies.

    An item of a short sequence writes `short_partials` partial results; the reduction merges `combine_rows` rows in one
    program, and there is none with 0.
    """

    num_seqs: int
    num_tokens: int
    group_size: int
    long: Body
    short: Body
    combine_rows: int
    short_partials: int = 1

    @property
    def rows(self) -> int:
        """The most rows."""
        return self.num_tokens * self.group_size

    @property
    def tile_rows(self) -> tuple[int, int]:
        """The most rows of a tile of a long and of a short sequence."""
        long = min(self.rows, self.long.block_m) if self.num_tokens > SHORT_QUERY else 0
        return long, min(self.rows, self.short.block_m, SHORT_QUERY * self.group_size)

    @property
    def tiles(self) -> int:
        """The most tiles: each sequence has one, and one more for each tile's rows past the first token's.

        Low tiles are more than tall ones.
        """
        low, tall = sorted((self.short.block_m, self.long.block_m))
        group, num_seqs = self.group_size, min(self.num_seqs, self.num_tokens)
        in_low = self.num_tokens
        if self.short.block_m == low:
            in_low = min(in_low, SHORT_QUERY * num_seqs)
        # Where no token straddles two tiles, the first one's rows are all in the first tile; else its first row is.
        first = group if low % group == tall % group == 0 else 1
        past_in_low, in_tall = in_low * group - num_seqs * first, (self.num_tokens - in_low) * group
        return num_seqs + (past_in_low * tall + in_tall * low) // (low * tall)

    def balanced(self, num_items: float) -> Room:
        """The room for `plan.balanced_segments` with so many items: each tile may have one more than its share.

        Partial results that most batches need are a few times fewer: here one sequence may be as long as all the
        others together, and its tall tiles have nearly all of the items.
        """
        whole = math.ceil(num_items)
        long, short = self.tile_rows
        shares = whole * max(long, self.short_partials * short)
        # Only what costs more than an item's share is cut, so there are fewer such tiles than items asked for.
        cut = min(whole, self.tiles)
        if self.short_partials == 1:
            entries, of_one_more = self._entries(cut, self.rows), min(self.rows, cut * max(long, short))
        else:
            of_short = min(self.rows, SHORT_QUERY * self.num_seqs * self.group_size)
            of_long = self.rows - of_short
            entries = self._entries(min(of_short, self.tiles), of_short) + self._entries(cut, of_long)
            of_one_more = self.short_partials * of_short + min(of_long, cut * long)
        return Room(whole + self.tiles, entries, shares + of_one_more)

    def equal(self, num_segments: int) -> Room:
        """The room for `plan.equal_segments` with so many segments."""
        num_partials = num_segments * self.short_partials
        if num_partials == 1:
            return Room(self.tiles, 0, 0)
        return Room(num_segments * self.tiles, self._entries(self.tiles, self.rows), num_partials * self.rows)

    def fixed(self, short_segments: int, long_segments: int) -> Room:
        """The room for `plan.fixed_segments` with at most so many segments for tiles of short and long sequences."""
        short_partials = short_segments * self.short_partials
        if short_partials == 1 and long_segments == 1:
            return Room(self.tiles, 0, 0)
        short_rows = min(self.rows, SHORT_QUERY * self.num_seqs * self.group_size)
        short_tiles = self.num_seqs + short_rows // self.short.block_m
        long_tiles = min(self.num_seqs, self.num_tokens // (SHORT_QUERY + 1)) + self.rows // self.long.block_m
        return Room(short_segments * short_tiles + long_segments * long_tiles, self._entries(self.tiles, self.rows),
                    short_partials * short_rows + long_segments * self.rows)

    def _entries(self, merged: int, rows: int) -> int:
        """The most entries, where up to `merged` tiles of `rows` rows together have partial results."""
        if not self.combine_rows:
            return 0
        return min(merged * math.ceil(max(self.tile_rows) / self.combine_rows), merged + rows // self.combine_rows)
