from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from attention_tuner.kernel_templates.errors import BatchError
from attention_tuner.runtime.lengths import LengthBuffers, StepLengths


@pytest.mark.parametrize("holder", [list, tuple, np.array, torch.tensor, lambda x: np.array(x, np.int32)])
def test_lengths_come_in_whatever_holds_integers_on_the_host(holder: Callable[[list[int]], Any]):
    found = StepLengths.of(holder([3, 1]), holder([0, 9]))
    assert [column.tolist() for column in found.lengths] == [[3, 1], [0, 9]]
    assert (found.kv.tolist(), found.num_tokens, found.longest_kv, found.num_seqs) == ([3, 10], 4, 10, 2)


@pytest.mark.parametrize(("query_lens", "context_lens", "message"), [
    ([1, 1], [5], "needs a query length and a context length for each of one sequence or more, not 2 and 1 lengths"),
    ([1.5], [0], "query_lens must be integers"),
    ([1], [[0]], "context_lens must be integers"),
    (3, [0], "query_lens must be integers"),
    ([1], torch.tensor(3), "context_lens must be integers"),
    ([-1], [0], "a sequence has no negative lengths"),
    ([0], [4], "a batch needs at least one query token"),
    ([1], [2**31 - 2], "cannot use a sequence of 1 query tokens at 2147483646; accepted are up to 1073741823 tokens"),
    ([1], torch.empty(1, dtype=torch.int32, device="meta"), "context_lens must be on the host, not on meta"),
])  # fmt: skip
def test_other_lengths_are_refused_in_a_sentence(query_lens: Any, context_lens: Any, message: str):
    with pytest.raises(BatchError, match=message):
        StepLengths.of(query_lens, context_lens)


@pytest.mark.parametrize(("query_lens", "message"), [
    ([1] * 3, "3 sequences with 3 query tokens are more than the 2 sequences and 8 query tokens that this attention"),
    ([9], "1 sequences with 9 query tokens are more than the 2 sequences and 8 query tokens that this attention was"),
])  # fmt: skip
def test_more_than_there_is_room_for_is_refused(query_lens: list[int], message: str):
    step = StepLengths.of(query_lens, [5] * len(query_lens))
    assert step.check(9, 3) is step
    with pytest.raises(BatchError, match=message):
        step.check(8, 2)


@pytest.mark.parametrize("hold", [np.array, torch.tensor])
def test_lengths_are_copies_of_what_the_caller_holds(hold: Callable[[list[int]], Any]):
    query_lens, context_lens = hold([3, 1]), hold([0, 9])
    step = StepLengths.of(query_lens, context_lens)
    query_lens[:], context_lens[:] = 7, 7
    assert [column.tolist() for column in step.lengths] == [[3, 1], [0, 9]]


def test_tensors_with_too_little_room_are_refused():
    step = StepLengths.of([3, 1], [0, 9])
    assert step.check_fits(4, 2, 10) is step
    for room in ((3, 2, 10), (4, 1, 10)):
        with pytest.raises(BatchError, match=f"4 query tokens of 2 sequences need .*, not {room[0]} and {room[1]}"):
            step.check_fits(*room)
    with pytest.raises(BatchError, match="the longest sequence has 10 keys, and a row of block_table pages for 9"):
        step.check_fits(4, 2, 9)


def test_lengths_are_written_to_buffers_that_stay():
    buffers = LengthBuffers(4, "cpu")
    places = buffers.query_start_loc.data_ptr(), buffers.kv_lens.data_ptr()
    buffers.write(StepLengths.of([3, 0, 1, 2], [0, 5, 9, 1]))
    assert buffers.query_start_loc.tolist() == [0, 3, 3, 4, 6]
    buffers.write(StepLengths.of([3, 1], [0, 9]))
    assert buffers.query_start_loc.tolist() == [0, 3, 4, 4, 4]
    assert buffers.kv_lens.tolist() == [3, 10, 0, 0]
    assert places == (buffers.query_start_loc.data_ptr(), buffers.kv_lens.data_ptr())
