"""The room that work lists of all batches up to a size can need, whatever the lengths of their sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..batch import SHORT_QUERY
from ..template import Body


@dataclass(frozen=True, slots=True)
class Room:
    """Room for a work list and its partial results."""

    items: int
    # Entries of the reduction.
    entries: int
    # Rows of partial results for each KV head.
    partial_rows: int

    def holds(self, needed: Room) -> bool:
        """True if there is room for `needed`."""
        return (self.items >= needed.items and self.entries >= needed.entries
                and self.partial_rows >= needed.partial_rows)


@dataclass(frozen=True, slots=True)
class Limit:
    """Batches up to a size, cut into tiles of two bodies."""

    # The most sequences.
    num_seqs: int
    # The most query tokens.
    num_tokens: int
    # Query heads per KV head.
    group_size: int
    # The tile shapes for long and for short sequences.
    long: Body
    short: Body
    # Rows of an entry of the reduction; 0 without one.
    combine_rows: int
    # Partial results that an item of a short sequence writes.
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
        """The most tiles: one for each sequence, and one more for every tile's height of rows past the first token's.

        Rows make the most tiles in the lower of the two bodies.
        """
        low, tall = sorted((self.short.block_m, self.long.block_m))
        group, num_seqs = self.group_size, min(self.num_seqs, self.num_tokens)
        in_low = self.num_tokens
        if self.short.block_m == low:
            in_low = min(in_low, SHORT_QUERY * num_seqs)
        # If no token straddles two tiles, the first tile has all rows of the first token; else it has at least one.
        first = group if low % group == tall % group == 0 else 1
        past_in_low, in_tall = in_low * group - num_seqs * first, (self.num_tokens - in_low) * group
        return num_seqs + (past_in_low * tall + in_tall * low) // (low * tall)

    def balanced(self, num_items: float) -> Room:
        """The room for `plan.balanced_segments` with `num_items`: each tile may have one item more than its share.

        Most batches need a few times fewer partial results. In the worst case one sequence is as long as all others
        together, and its tall tiles have nearly all items.
        """
        whole = math.ceil(num_items)
        long, short = self.tile_rows
        shares = whole * max(long, self.short_partials * short)
        # Only tiles that cost more than an item's share are cut, so they are fewer than the items asked for.
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
        """The room for `plan.equal_segments` with `num_segments`."""
        num_partials = num_segments * self.short_partials
        if num_partials == 1:
            return Room(self.tiles, 0, 0)
        return Room(num_segments * self.tiles, self._entries(self.tiles, self.rows), num_partials * self.rows)

    def fixed(self, short_segments: int, long_segments: int) -> Room:
        """The room for `plan.fixed_segments` with at most these segments for tiles of short and long sequences."""
        short_partials = short_segments * self.short_partials
        if short_partials == 1 and long_segments == 1:
            return Room(self.tiles, 0, 0)
        short_rows = min(self.rows, SHORT_QUERY * self.num_seqs * self.group_size)
        short_tiles = self.num_seqs + short_rows // self.short.block_m
        long_tiles = min(self.num_seqs, self.num_tokens // (SHORT_QUERY + 1)) + self.rows // self.long.block_m
        return Room(short_segments * short_tiles + long_segments * long_tiles, self._entries(self.tiles, self.rows),
                    short_partials * short_rows + long_segments * self.rows)

    def _entries(self, merged: int, rows: int) -> int:
        """The most entries if up to `merged` tiles, with `rows` rows together, have partial results."""
        if not self.combine_rows:
            return 0
        return min(merged * math.ceil(max(self.tile_rows) / self.combine_rows), merged + rows // self.combine_rows)
