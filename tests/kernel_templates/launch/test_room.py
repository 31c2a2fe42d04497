"""What is reserved is enough for every batch within the limit, whatever its lengths."""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.launch.plan import (
    WorkList,
    balanced_by_part,
    balanced_segments,
    equal_segments,
    fixed_segments,
    work_list,
)
from attention_tuner.kernel_templates.launch.room import Limit, Room
from attention_tuner.kernel_templates.launch.tiles import cut_tiles
from attention_tuner.kernel_templates.template import Body

BATCHES = st.lists(
    st.tuples(st.one_of(st.integers(0, 9), st.integers(1, 300)), st.integers(0, 9000)), min_size=1, max_size=20
).filter(lambda sequences: any(q for q, _ in sequences)).map(lambda sequences: Batch(tuple(sequences)))
BODIES = st.builds(Body, st.sampled_from((16, 32, 64, 128)), st.sampled_from((16, 64, 128)))


def needed(work: WorkList) -> Room:
    return Room(len(work.items), len(work.entries), work.partial_rows)


@given(
    BATCHES, st.integers(0, 5), st.integers(0, 50), st.sampled_from((1, 4, 8, 71)), BODIES, BODIES,
    st.sampled_from((0, 4, 16)), st.sampled_from((1, 2)), st.floats(0.5, 600), st.sampled_from((1, 4)),
    st.integers(1, 64), st.none() | st.integers(1, 4000), st.booleans(),
)  # fmt: skip
@settings(deadline=None, max_examples=300)
def test_there_is_room_for_every_batch_within_the_limit(
    batch: Batch, more_seqs: int, more_tokens: int, group: int, long: Body, short: Body, combine_rows: int,
    partials: int, num_items: float, weight: int, num_segments: int, window: int | None, has_tree_mask: bool,
):  # fmt: skip
    limit = Limit(
        batch.num_seqs + more_seqs, batch.num_tokens + more_tokens, group, long, short, combine_rows, partials
    )
    tiles = cut_tiles(batch, group, long, short, window, has_tree_mask)
    assert len(tiles.cut.rows) <= limit.tiles
    assert tiles.cut.rows.max() <= max(limit.tile_rows)
    short_keys, long_keys = 128 * num_segments, 128 * (1 + num_segments // 3)
    longest = max(batch.kv_lens)
    for room, segments in (
        (limit.balanced(num_items), balanced_segments(tiles, num_items, weight)),
        (limit.balanced(2 * num_items), balanced_by_part(tiles, num_items)),
        (limit.equal(num_segments), equal_segments(tiles, num_segments)),
        (limit.fixed(-(-longest // short_keys), -(-longest // long_keys)),
         fixed_segments(tiles, short_keys, long_keys)),
    ):
        work = work_list(tiles, segments, combine_rows, "long_first", partials)
        assert room.holds(needed(work)), (room, needed(work))


def test_the_room_for_a_served_batch_is_no_more_than_a_few_times_what_it_takes():
    batch, long, short = Batch.parse("1x512@16384,255x1@1024"), Body(128, 64), Body(16, 64)
    tiles = cut_tiles(batch, 4, long, short)
    work = needed(work_list(tiles, balanced_segments(tiles, 66, 2), 4))
    room = Limit(256, 767, 4, long, short, 4).balanced(66)
    assert room.holds(work)
    assert not Room(room.items, room.entries, work.partial_rows - 1).holds(work)
    assert room.items <= 3 * work.items
    assert room.entries <= 4 * work.entries
    assert room.partial_rows <= 6 * work.partial_rows


def test_partial_results_of_many_tokens_take_what_the_items_can_write_and_not_what_the_tokens_could():
    limit = Limit(256, 8192, 4, Body(128, 64), Body(16, 64), 4)
    # 66 shares of a tall tile, and one more of each tile that is cut.
    assert limit.balanced(66).partial_rows == 2 * 66 * 128
    assert dataclasses.replace(limit, num_tokens=767).balanced(66).partial_rows == 66 * 128 + 767 * 4
