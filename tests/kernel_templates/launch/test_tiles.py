"""That tiles cover every row, and every key it sees, is shown with the plan's tests."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_tuner.kernel_templates.batch import SHORT_QUERY, Batch, Lengths
from attention_tuner.kernel_templates.errors import BatchError
from attention_tuner.kernel_templates.launch.tiles import ceil_div, cut_tiles, repeat
from attention_tuner.kernel_templates.template import Body


@given(st.lists(st.tuples(st.integers(1, 70), st.integers(0, 999)), min_size=1, max_size=9), st.sampled_from((1, 4, 7)))
def test_tiles_are_those_of_a_loop_over_the_sequences(sequences: list[tuple[int, int]], group: int):
    long, short = Body(32, 64), Body(16, 16)
    expected: list[tuple[int, ...]] = []
    for seq, (query_len, context_len) in enumerate(sequences):
        is_long = query_len > SHORT_QUERY
        body = long if is_long else short
        for first_row in range(0, query_len * group, body.block_m):
            rows = min(body.block_m, query_len * group - first_row)
            keys = context_len + (first_row + rows - 1) // group + 1
            expected.append((seq, is_long, first_row, rows, keys, -(-keys // body.block_n)))
    tiles = cut_tiles(Batch(tuple(sequences)), group, long, short)
    cut = tiles.cut
    columns = (cut.seq, cut.is_long, cut.first_row, cut.rows, tiles.keys, tiles.key_tiles)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected
    assert tiles.fields[:, [6, 3, 5]].tolist() == [[seq, first_row, keys] for seq, _, first_row, _, keys, _ in expected]
    assert np.array_equal(tiles.stop, tiles.keys)


def test_rows_are_repeated_and_their_copies_numbered():
    row, number = repeat(np.array([2, 0, 3]))
    assert (row.tolist(), number.tolist()) == ([0, 0, 2, 2, 2], [0, 1, 0, 1, 2])
    assert ceil_div(np.array([0, 1, 64, 65]), 64).tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize("window", [2**31 - 1, 2**40])
def test_a_window_longer_than_any_sequence_is_none(window: int):
    batch, body = Batch.parse("1x30@1000000000,2x1@9"), Body(16, 16)
    assert np.array_equal(cut_tiles(batch, 4, body, body, window).fields, cut_tiles(batch, 4, body, body).fields)


def test_lengths_in_arrays_are_planned_as_the_batch_of_them():
    batch, body = Batch.parse("1x30@100,2x1@9"), Body(16, 16)
    lengths = Lengths.of(np.array([30, 1, 1], np.int32), np.array([100, 9, 9]))
    assert np.array_equal(cut_tiles(lengths, 4, body, body).fields, cut_tiles(batch, 4, body, body).fields)


def test_sequences_without_query_tokens_have_no_tiles():
    body = Body(16, 16)
    for text, kept in (("2x0@50,1x1@9,1x0@0", "1x1@9"), ("1x0@7,1x40@9,3x0@0,1x1@4", "1x40@9,1x1@4")):
        tiles, others = (cut_tiles(Batch.parse(one), 4, body, body) for one in (text, kept))
        columns = [0, 1, 2, 3, 4, 5]
        assert np.array_equal(tiles.fields[:, columns], others.fields[:, columns])
        assert tiles.cut.num_tokens == others.cut.num_tokens
    assert tiles.fields[:, 6].tolist() == [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 5]


@pytest.mark.parametrize("batch", ["1x1073741823@0", "65536x8192@0"])
def test_more_rows_than_kernels_can_count_are_refused(batch: str):
    with pytest.raises(BatchError, match=r"of 4 query heads to a KV head .* accepted are up to 1073741823 rows"):
        cut_tiles(Batch.parse(batch), 4, Body(16, 16), Body(16, 16))


def test_lengths_without_any_query_token_are_refused():
    with pytest.raises(BatchError, match="at least one query token"):
        cut_tiles(Lengths.of([0, 0], [9, 0]), 4, Body(16, 16), Body(16, 16))
