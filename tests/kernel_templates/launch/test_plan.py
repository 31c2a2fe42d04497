"""The plan is judged by what it covers: every row and every key it sees, once, whatever the cuts."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_tuner.kernel_templates.batch import SHORT_QUERY, TREE_TOKENS, Batch
from attention_tuner.kernel_templates.errors import BatchError
from attention_tuner.kernel_templates.launch.plan import (
    WorkList,
    _row_blocks,  # pyright: ignore
    balanced_by_part,
    balanced_segments,
    equal_segments,
    fixed_segments,
    most_rounds,
    whole_rounds,
    work_list,
)
from attention_tuner.kernel_templates.launch.tiles import _cut_rows, cut_tiles  # pyright: ignore
from attention_tuner.kernel_templates.template import Body

QUERY_LENS = st.integers(1, 40) | st.integers(60, 70)
BATCHES = st.lists(st.tuples(QUERY_LENS, st.integers(0, 3000)), min_size=1, max_size=12).map(
    lambda sequences: Batch(tuple(sequences))
)
BODIES = st.builds(Body, st.sampled_from((16, 32, 64, 128)), st.sampled_from((16, 32, 64, 128)))
SCHEDULES = st.sampled_from(("long_first", "interleaved"))
PARTIALS = st.sampled_from((1, 2))


def lengths(work: WorkList) -> list[int]:
    return (work.items[:, 5] - work.items[:, 4]).tolist()


def of_long(work: WorkList, batch: Batch) -> list[bool]:
    """Whether each item is of a long sequence."""
    return [batch.sequences[seq][0] > SHORT_QUERY for seq in work.items[:, 6].tolist()]


def first_key(window: int | None, has_tree_mask: bool, query_len: int, context_len: int, token: int) -> int:
    """The first key that a query token sees."""
    first = max(0, context_len + token + 1 - window) if window else 0
    return min(first, context_len) if has_tree_mask and 1 < query_len <= TREE_TOKENS else first


def last_key(has_tree_mask: bool, query_len: int, context_len: int, token: int) -> int:
    """The last key that a query token may see."""
    return context_len + (query_len - 1 if has_tree_mask and 1 < query_len <= TREE_TOKENS else token)


def covered(
    work: WorkList, batch: Batch, group: int, long: Body, short: Body,
    window: int | None = None, has_tree_mask: bool = False,
) -> None:  # fmt: skip
    """Assert that the items of `work` cover each (sequence, row, key) that is visible exactly once.

    And of the keys that no row of a tile sees less than a key tile.
    """
    seen: dict[tuple[int, int], list[tuple[int, int]]] = {}
    starts = np.cumsum([0, *(q for q, _ in batch.sequences)])
    assert work.items.dtype == np.int32
    assert sum(of_long(work, batch)) == work.num_long
    for q_start, context, num_rows, first_row, start, stop, seq, _ in work.items.tolist():
        query_len, context_len = batch.sequences[seq]
        assert (q_start, context, num_rows) == (starts[seq], context_len, query_len * group)
        # The kernel tells the kinds apart by this.
        assert (num_rows > SHORT_QUERY * group) == (query_len > SHORT_QUERY)
        body = long if query_len > SHORT_QUERY else short
        assert first_row % body.block_m == 0
        assert start % body.block_n == 0
        last_row = min(first_row + body.block_m, num_rows) - 1
        assert start < stop <= last_key(has_tree_mask, query_len, context_len, last_row // group) + 1
        seen.setdefault((seq, first_row), []).append((start, stop))
    for seq, (query_len, context_len) in enumerate(batch.sequences):
        body = long if query_len > SHORT_QUERY else short
        for first_row in range(0, query_len * group, body.block_m):
            ranges = sorted(seen.pop((seq, first_row)))
            last_row = min(first_row + body.block_m, query_len * group) - 1
            first = first_key(window, has_tree_mask, query_len, context_len, first_row // group)
            assert ranges[0][0] == first // body.block_n * body.block_n
            assert ranges[-1][1] == last_key(has_tree_mask, query_len, context_len, last_row // group) + 1
            assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    assert not seen


@given(BATCHES, st.sampled_from((1, 4, 7, 71)), BODIES, BODIES, st.integers(1, 20), SCHEDULES, PARTIALS)
@settings(deadline=None)
def test_equal_segments_cover_every_key_once(
    batch: Batch, group: int, long: Body, short: Body, segments: int, schedule: str, partials: int
):
    tiles = cut_tiles(batch, group, long, short)
    work = work_list(tiles, equal_segments(tiles, segments), 4, schedule, partials)
    covered(work, batch, group, long, short)


@given(
    BATCHES, BODIES, BODIES, st.integers(1, 9), st.integers(1, 9), SCHEDULES, PARTIALS, st.none() | st.integers(1, 900)
)
@settings(deadline=None)
def test_fixed_segments_cover_every_key_once_and_are_cut_without_regard_to_other_sequences(
    batch: Batch, long: Body, short: Body, short_tiles: int, long_tiles: int, schedule: str, partials: int,
    window: int | None,
):  # fmt: skip
    keys = 128 * short_tiles, 128 * long_tiles

    def planned(batch: Batch) -> WorkList:
        tiles = cut_tiles(batch, 4, long, short, window)
        return work_list(tiles, fixed_segments(tiles, *keys), 4, schedule, partials)

    def cuts(work: WorkList, seq: int) -> list[tuple[int, ...]]:
        # Context, rows, the tile's first row, and the range of keys.
        return sorted(tuple(item[1:6]) for item in work.items.tolist() if item[6] == seq)

    work = planned(batch)
    covered(work, batch, 4, long, short, window)
    for seq, sequence in enumerate(batch.sequences):
        assert cuts(work, seq) == cuts(planned(Batch((sequence,))), 0)
    most = [keys[is_long] for is_long in of_long(work, batch)]
    assert all(length <= limit for length, limit in zip(lengths(work), most, strict=True))


@given(BATCHES, st.sampled_from((1, 4, 7)), BODIES, BODIES, st.floats(0.5, 300), st.sampled_from((1, 2, 4)), SCHEDULES)
@settings(deadline=None)
def test_balanced_segments_cover_every_key_once_and_none_is_longer_than_its_share(
    batch: Batch, group: int, long: Body, short: Body, num_items: float, weight: int, schedule: str
):
    tiles = cut_tiles(batch, group, long, short)
    work = work_list(tiles, balanced_segments(tiles, num_items, weight), 4, schedule)
    covered(work, batch, group, long, short)
    share = (tiles.keys * np.where(tiles.cut.is_long, weight, 1.0)).sum() / num_items
    for length, is_long in zip(lengths(work), of_long(work, batch), strict=True):
        body = long if is_long else short
        assert length <= share / (weight if is_long else 1) + body.block_n


@given(BATCHES, st.sampled_from((1, 4, 71)), BODIES, BODIES, st.integers(1, 3000), st.booleans(), st.integers(1, 300))
@settings(deadline=None)
def test_a_window_is_covered_once_and_balanced_by_the_keys_inside_it(
    batch: Batch, group: int, long: Body, short: Body, window: int, has_tree_mask: bool, num_items: int
):
    tiles = cut_tiles(batch, group, long, short, window, has_tree_mask)
    work = work_list(tiles, balanced_segments(tiles, num_items, 1), 4)
    covered(work, batch, group, long, short, window, has_tree_mask)
    assert sum(lengths(work)) == tiles.keys.sum()
    assert max(lengths(work)) <= tiles.keys.sum() / num_items + max(long.block_n, short.block_n)
    work = work_list(tiles, equal_segments(tiles, 4), 4)
    covered(work, batch, group, long, short, window, has_tree_mask)


def test_what_is_kept_of_earlier_query_lengths_is_of_the_same_tiles_and_does_not_change():
    texts = ("1x30@100,2x1@9", "1x30@7,2x1@50", "2x1@9,1x30@100")
    bodies = ((Body(16, 16), Body(16, 16)), (Body(32, 16), Body(16, 16)))
    cases = list(itertools.product(texts, (4, 7), bodies, (4, 8)))

    def plan(text: str, group: int, bodies: tuple[Body, Body], combine_rows: int) -> list[list[list[int]]]:
        tiles = cut_tiles(Batch.parse(text), group, *bodies)
        work = work_list(tiles, equal_segments(tiles, 3), combine_rows)
        return [work.items.tolist(), work.entries.tolist()]

    planned: list[list[list[list[int]]]] = []
    for case in cases:
        _cut_rows.cache_clear()
        _row_blocks.cache_clear()
        planned.append(plan(*case))
        assert plan(*case) == planned[-1]
    assert [plan(*case) for case in cases] == planned


def test_more_rows_of_partial_results_than_kernels_can_count_are_refused():
    body = Body(128, 16)
    tiles = cut_tiles(Batch.parse("64x4096@1000000"), 4, body, body)
    with pytest.raises(BatchError, match="2118942720 rows of partial results; accepted are up to 1073741823"):
        work_list(tiles, equal_segments(tiles, 2048), 4)


def test_the_longest_items_come_first_however_long():
    batch = Batch.parse("1x1@9,1x1@1073741822,1x100@200,1x1@1073741822,1x9@0")
    tiles = cut_tiles(batch, 1, Body(128, 16), Body(16, 16))
    assert work_list(tiles, equal_segments(tiles, 1), 4).items[:, 6].tolist() == [2, 4, 1, 3, 0]


@given(BATCHES, BODIES, BODIES, st.integers(1, 20), PARTIALS, st.sampled_from((0, 4)))
@settings(deadline=None)
def test_the_schedules_are_orders_of_the_same_items(
    batch: Batch, long: Body, short: Body, segments: int, partials: int, combine_rows: int
):
    tiles = cut_tiles(batch, 4, long, short)
    first, mixed = (
        work_list(tiles, equal_segments(tiles, segments), combine_rows, schedule, partials)
        for schedule in ("long_first", "interleaved")
    )
    for work in (first, mixed):
        # Of each kind, the most keys come first.
        for kind in (True, False):
            of_kind = [n for n, is_long in zip(lengths(work), of_long(work, batch), strict=True) if is_long is kind]
            assert of_kind == sorted(of_kind, reverse=True)
    parts = ((work.items,) if combine_rows else (work.items, work.merges) for work in (first, mixed))
    rows = [sorted(map(tuple, np.hstack(matrices).tolist())) for matrices in parts]
    assert rows[0] == rows[1]
    assert first.entries.tolist() == mixed.entries.tolist()
    assert of_long(first, batch) == sorted(of_long(first, batch), reverse=True)
    # Any beginning of the list has its share of both kinds.
    for count in range(1, len(mixed.items) + 1):
        share = count * mixed.num_long / len(mixed.items)
        assert abs(sum(of_long(mixed, batch)[:count]) - share) <= 1


@given(BATCHES, BODIES, BODIES, st.integers(1, 20), st.sampled_from((0, 4, 16)), SCHEDULES, PARTIALS)
@settings(deadline=None)
def test_partial_results_do_not_overlap_and_all_are_merged(
    batch: Batch, long: Body, short: Body, segments: int, combine_rows: int, schedule: str, partials: int
):
    group = 4
    tiles = cut_tiles(batch, group, long, short)
    work = work_list(tiles, equal_segments(tiles, segments), combine_rows, schedule, partials)
    written: dict[int, tuple[int, int]] = {}
    merged: list[int] = []
    to_merge: set[tuple[int, ...]] = set()
    merges = [[]] * len(work.items) if combine_rows else work.merges.tolist()
    for item, merge, is_long in zip(work.items.tolist(), merges, of_long(work, batch), strict=True):
        _, _, num_rows, first_row, _, _, seq, slot = item
        rows = min((long if is_long else short).block_m, num_rows - first_row)
        # Those that are neither cut nor of several partial results write the output.
        assert slot >= 0 or (partials == 1 or is_long)
        for part in range((1 if is_long else partials) if slot >= 0 else 0):
            for row in range(rows):
                assert slot + part * rows + row not in written
                written[slot + part * rows + row] = (seq, first_row + row)
        if slot >= 0:
            to_merge.add((item[0], num_rows, first_row, *merge, rows, seq))
    assert sorted(written) == list(range(work.partial_rows))
    if combine_rows:
        assert len(work.merges) == 0
        starts = np.cumsum([0, *(q for q, _ in batch.sequences)]).tolist()
        columns = work.entries[:, [0, 2, 3, 8, 9, 10]].tolist()
        entries = [(*entry, starts.index(entry[0])) for entry in columns]
    else:
        assert len(work.entries) == 0
        assert work.merges.dtype == np.int32
        entries = sorted(to_merge)
    for _, num_rows, first_row, slot, num_partials, stride, seq in entries:
        block_m = (long if batch.sequences[seq][0] > SHORT_QUERY else short).block_m
        tile_end = min((first_row // block_m + 1) * block_m, num_rows)
        for row in range(first_row, min(first_row + (combine_rows or block_m), tile_end)):
            for part in range(num_partials):
                place = slot + row - first_row + part * stride
                assert written[place] == (seq, row)
                merged.append(place)
    assert sorted(merged) == sorted(written)


def test_balanced_items_cost_about_the_same_and_are_about_as_many_as_asked():
    batch = Batch.parse("1x512@16384,15x1@1000,16x1@30000,1x1@120000")
    long, short = Body(128, 128), Body(16, 32)
    tiles = cut_tiles(batch, 4, long, short)
    work = work_list(tiles, balanced_segments(tiles, 400, 2), 4)
    costs = np.array(lengths(work)) * np.where(of_long(work, batch), 2.0, 1.0)
    assert 400 <= len(costs) <= 400 + len(tiles.cut.rows)
    target = (tiles.stop * np.where(tiles.cut.is_long, 2, 1)).sum() / 400
    assert costs.max() <= target + 2 * 128


@given(BATCHES, BODIES, BODIES, st.integers(1, 2), st.floats(1, 200))
@settings(deadline=None)
def test_there_are_no_more_items_than_fill_whole_rounds(
    batch: Batch, long: Body, short: Body, rounds: int, per_round: float
):
    tiles = cut_tiles(batch, 4, long, short)
    count = len(tiles.cut.rows)
    work = work_list(tiles, whole_rounds(tiles, rounds, per_round, 2), 4)
    most = most_rounds(count, rounds, per_round) * per_round
    assert len(work.items) <= (most if count <= rounds * per_round else most + count)


@pytest.mark.parametrize(("num_seqs", "items"), [(1, 16), (2, 16), (8, 16), (9, 45), (12, 48), (16, 16), (24, 48)])
def test_programs_that_would_be_idle_get_smaller_items(num_seqs: int, items: int):
    # 132 multiprocessors and eight KV heads: 16.5 programs for each.
    tiles = cut_tiles(Batch(((1, 32_767),) * num_seqs), 4, Body(128, 128), Body(64, 128))
    segments = whole_rounds(tiles, 1, 132 / 8, 1)
    assert segments.sum() == items
    assert len(set(segments)) == 1


@pytest.mark.parametrize(("num_seqs", "whole", "pieces"), [(17, 16, 17), (18, 16, 18), (34, 33, 17), (40, 33, 21)])
def test_tiles_that_fill_no_round_are_cut_alone(num_seqs: int, whole: int, pieces: int):
    # As above: 33 tiles of each head are two rounds.
    tiles = cut_tiles(Batch(((1, 32_767),) * num_seqs), 4, Body(128, 128), Body(64, 128))
    segments = whole_rounds(tiles, 1, 132 / 8, 1)
    assert np.count_nonzero(segments == 1) == whole
    assert segments[segments > 1].sum() == pieces


@given(BATCHES, st.floats(1, 200))
@settings(deadline=None)
def test_each_part_alone_is_balanced_into_so_many_items(batch: Batch, num_items: float):
    tiles = cut_tiles(batch, 4, Body(64, 16), Body(16, 16))
    segments = balanced_by_part(tiles, num_items)
    for part in (tiles.cut.is_long, ~tiles.cut.is_long):
        stop = tiles.stop[part]
        if len(stop):
            asked = np.ceil(stop * (num_items / stop.sum()))
            assert np.abs(segments[part] - asked).max() <= 1


@pytest.mark.parametrize("num_segments", [1, 3])
def test_short_sequences_are_split_no_finer_than_a_key_tile(num_segments: int):
    tiles = cut_tiles(Batch.parse("1x1@20"), 4, Body(16, 32), Body(16, 32))
    assert len(work_list(tiles, equal_segments(tiles, num_segments), 4).items) == 1
