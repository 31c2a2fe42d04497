from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from attention_tuner.kernel_templates.errors import BatchError
from attention_tuner.runtime.lengths import LengthBuffers, batch_of


@pytest.mark.parametrize("holder", [list, tuple, np.array, torch.tensor, lambda x: np.array(x, np.int32)])
def test_lengths_come_in_whatever_holds_integers_on_the_host(holder: Callable[[list[int]], Any]):
    assert batch_of(holder([3, 1]), holder([0, 9]), 4, 2).sequences == ((3, 0), (1, 9))


@pytest.mark.parametrize(("query_lens", "context_lens", "message"), [
    ([1, 1], [5], "query_lens are of 2 sequences and context_lens of 1; they must be of as many"),
    ([1] * 3, [5] * 3, "3 sequences with 3 query tokens are more than the 2 sequences and 8 query tokens that"),
    ([9], [0], "1 sequences with 9 query tokens are more than the 2 sequences and 8 query tokens"),
    ([1.5], [0], r"query_lens must be a row of integers, not \[1.5\]"),
    ([1], [[0]], r"context_lens must be a row of integers, not \[\[0\]\]"),
    (3, [0], "query_lens must be a row of integers, not 3"),
    ([1], torch.tensor(3), "context_lens must be a row of integers"),
    ([-1], [0], "a sequence has no negative lengths"),
    ([0], [4], "a batch needs at least one query token"),
    ([], [], "a batch needs at least one sequence"),
    ([1], [2**31 - 2], "a context of 2147483646 tokens is too long; accepted are up to 2147483639"),
    ([1], torch.empty(1, dtype=torch.int32, device="meta"), "context_lens must be on the host, not on meta"),
])  # fmt: skip
def test_other_lengths_are_refused_in_a_sentence(query_lens: Any, context_lens: Any, message: str):
    with pytest.raises(BatchError, match=message):
        batch_of(query_lens, context_lens, 8, 2)


def test_lengths_are_written_to_buffers_that_stay():
    buffers = LengthBuffers(4, "cpu")
    places = buffers.query_start_loc.data_ptr(), buffers.kv_lens.data_ptr()
    buffers.write(batch_of([3, 0, 1, 2], [0, 5, 9, 1], 8, 4))
    buffers.write(batch_of([3, 1], [0, 9], 8, 4))
    assert buffers.query_start_loc.tolist() == [0, 3, 4, 4, 4]
    assert buffers.kv_lens.tolist() == [3, 10, 0, 0]
    assert places == (buffers.query_start_loc.data_ptr(), buffers.kv_lens.data_ptr())
