from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from attention_tuner.kernel_templates.batch import Lengths
from attention_tuner.kernel_templates.errors import BatchError
from attention_tuner.runtime.lengths import LengthBuffers, check_fits, read_lengths


@pytest.mark.parametrize("holder", [list, tuple, np.array, torch.tensor, lambda x: np.array(x, np.int32)])
def test_lengths_are_read_from_whatever_holds_integers_on_the_host(holder: Callable[[list[int]], Any]):
    found = read_lengths(holder([3, 1]), holder([0, 9]), 2, 4)
    assert [column.tolist() for column in found[:3]] == [[3, 1], [0, 9], [3, 10]]


@pytest.mark.parametrize(("query_lens", "context_lens", "message"), [
    ([1, 1], [5], "needs a query length and a context length for each of one sequence or more, not 2 and 1 lengths"),
    ([1], torch.tensor(3), "context_lens must be integers"),
    ([1], torch.empty(1, dtype=torch.int32, device="meta"), "context_lens must be on the host, not on meta"),
    ([1] * 3, [5] * 3, "3 sequences with 3 query tokens are more than the 2 sequences and 8 query tokens that this"),
    ([9], [5], "1 sequences with 9 query tokens are more than the 2 sequences and 8 query tokens that this attention"),
])  # fmt: skip
def test_other_lengths_and_more_than_the_limits_are_refused(query_lens: Any, context_lens: Any, message: str):
    with pytest.raises(BatchError, match=message):
        read_lengths(query_lens, context_lens, 2, 8)


@pytest.mark.parametrize("hold", [np.array, torch.tensor])
def test_lengths_are_copies_of_what_the_caller_holds(hold: Callable[[list[int]], Any]):
    query_lens, context_lens = hold([3, 1]), hold([0, 9])
    lengths = read_lengths(query_lens, context_lens, 9, 9)
    query_lens[:], context_lens[:] = 7, 7
    assert [column.tolist() for column in lengths[:3]] == [[3, 1], [0, 9], [3, 10]]


def test_tensors_with_too_little_room_are_refused():
    lengths = Lengths.of([3, 1], [0, 9])
    check_fits(lengths, 4, 2, 10)
    for room in ((3, 2, 10), (4, 1, 10)):
        with pytest.raises(BatchError, match=f"4 query tokens need .* not {room[0]}; 2 sequences .*, not {room[1]}"):
            check_fits(lengths, *room)
    with pytest.raises(BatchError, match="the longest sequence has 10 keys, but a row of block_table has pages for 9"):
        check_fits(lengths, 4, 2, 9)


def test_lengths_are_written_to_buffers_that_stay_in_place():
    buffers = LengthBuffers(4, "cpu")
    addresses = buffers.query_start_loc.data_ptr(), buffers.kv_lens.data_ptr()
    buffers.write(Lengths.of([3, 0, 1, 2], [0, 5, 9, 1]))
    assert buffers.query_start_loc.tolist() == [0, 3, 3, 4, 6]
    buffers.write(Lengths.of([3, 1], [0, 9]))
    assert buffers.query_start_loc.tolist() == [0, 3, 4, 4, 4]
    assert buffers.kv_lens.tolist() == [3, 10, 0, 0]
    assert addresses == (buffers.query_start_loc.data_ptr(), buffers.kv_lens.data_ptr())
