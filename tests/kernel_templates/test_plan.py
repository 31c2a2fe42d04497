"""The plan is judged by what it covers: every row and every key it sees, once, whatever the cuts."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_tuner.kernel_templates.batch import SHORT_QUERY, Batch
from attention_tuner.kernel_templates.limits import Body
from attention_tuner.kernel_templates.plan import WorkList, balanced_segments, cut_tiles, equal_segments, work_list

BATCHES = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3000)), min_size=1, max_size=12).map(
    lambda sequences: Batch(tuple(sequences))
)
BODIES = st.builds(Body, st.sampled_from((16, 32, 64, 128)), st.sampled_from((16, 32, 64, 128)))


def covered(work: WorkList, batch: Batch, group: int, long: Body, short: Body) -> None:
    """Assert that the items of `work` cover each (sequence, row, key) that is visible exactly once."""
    seen: dict[tuple[int, int], list[tuple[int, int]]] = {}
    starts = np.cumsum([0, *(q for q, _ in batch.sequences)])
    for index, (q_start, context, num_rows, first_row, start, stop, seq, _) in enumerate(work.items.tolist()):
        query_len, context_len = batch.sequences[seq]
        assert (q_start, context, num_rows) == (starts[seq], context_len, query_len * group)
        assert (index < work.num_long) == (query_len > SHORT_QUERY)
        body = long if index < work.num_long else short
        assert first_row % body.block_m == 0
        assert start % body.block_n == 0
        last_row = min(first_row + body.block_m, num_rows) - 1
        assert start < stop <= context_len + last_row // group + 1
        seen.setdefault((seq, first_row), []).append((start, stop))
    for seq, (query_len, context_len) in enumerate(batch.sequences):
        body = long if query_len > SHORT_QUERY else short
        for first_row in range(0, query_len * group, body.block_m):
            ranges = sorted(seen.pop((seq, first_row)))
            last_row = min(first_row + body.block_m, query_len * group) - 1
            assert ranges[0][0] == 0
            assert ranges[-1][1] == context_len + last_row // group + 1
            assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    assert not seen


@given(BATCHES, st.sampled_from((1, 4, 7, 71)), BODIES, BODIES, st.integers(1, 20))
@settings(deadline=None)
def test_equal_segments_cover_every_key_once(batch: Batch, group: int, long: Body, short: Body, segments: int):
    tiles = cut_tiles(batch, group, long, short)
    work = work_list(tiles, equal_segments(tiles, segments), 4)
    covered(work, batch, group, long, short)


@given(BATCHES, st.sampled_from((1, 4, 7)), BODIES, BODIES, st.floats(0.5, 300), st.sampled_from((1, 2, 4)))
@settings(deadline=None)
def test_balanced_segments_cover_every_key_once(
    batch: Batch, group: int, long: Body, short: Body, num_items: float, weight: int
):
    tiles = cut_tiles(batch, group, long, short)
    work = work_list(tiles, balanced_segments(tiles, num_items, weight), 4)
    covered(work, batch, group, long, short)


@given(BATCHES, BODIES, BODIES, st.integers(1, 20), st.sampled_from((4, 16)))
@settings(deadline=None)
def test_partial_results_do_not_overlap_and_all_are_merged(
    batch: Batch, long: Body, short: Body, segments: int, combine_rows: int
):
    group = 4
    tiles = cut_tiles(batch, group, long, short)
    work = work_list(tiles, equal_segments(tiles, segments), combine_rows)
    written: dict[int, tuple[int, int]] = {}
    for index, (_, _, num_rows, first_row, _, _, seq, slot) in enumerate(work.items.tolist()):
        body = long if index < work.num_long else short
        if slot >= 0:
            for row in range(first_row, min(first_row + body.block_m, num_rows)):
                assert slot + row - first_row not in written
                written[slot + row - first_row] = (seq, row)
    assert sorted(written) == list(range(work.partial_rows))
    merged: set[int] = set()
    starts = np.cumsum([0, *(q for q, _ in batch.sequences)]).tolist()
    for q_start, num_rows, first_row, slot, num_segments, stride in work.entries.tolist():
        seq = starts.index(q_start)
        body = long if batch.sequences[seq][0] > SHORT_QUERY else short
        tile_end = min((first_row // body.block_m + 1) * body.block_m, num_rows)
        for row in range(first_row, min(first_row + combine_rows, tile_end)):
            for segment in range(num_segments):
                place = slot + row - first_row + segment * stride
                assert written[place] == (seq, row)
                merged.add(place)
    assert merged == set(written)


def test_balanced_items_cost_about_the_same_and_are_about_as_many_as_asked():
    batch = Batch.parse("1x512@16384,15x1@1000,16x1@30000,1x1@120000")
    long, short = Body(128, 128), Body(16, 32)
    tiles = cut_tiles(batch, 4, long, short)
    work = work_list(tiles, balanced_segments(tiles, 400, 2), 4)
    lengths = (work.items[:, 5] - work.items[:, 4]).astype(float)
    lengths[: work.num_long] *= 2
    assert 400 <= len(lengths) <= 400 + len(tiles.seq)
    target = (tiles.stop * np.where(tiles.is_long, 2, 1)).sum() / 400
    assert lengths.max() <= target + 2 * 128
    assert np.all(np.diff(lengths[: work.num_long]) <= 0)
    assert np.all(np.diff(lengths[work.num_long :]) <= 0)


@pytest.mark.parametrize("num_segments", [1, 3])
def test_short_sequences_are_split_no_finer_than_a_key_tile(num_segments: int):
    tiles = cut_tiles(Batch.parse("1x1@20"), 4, Body(16, 32), Body(16, 32))
    assert len(work_list(tiles, equal_segments(tiles, num_segments), 4).items) == 1
