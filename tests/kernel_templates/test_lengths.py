from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_tuner.kernel_templates.batch import MAX_TOKENS, Batch
from attention_tuner.kernel_templates.errors import BatchError
from attention_tuner.kernel_templates.lengths import Lengths

EDGES = st.sampled_from((-(2**63), -(2**31), -1, 0, 1, 2**29, MAX_TOKENS - 1, MAX_TOKENS, MAX_TOKENS + 1, 2**31, 2**62))


@given(st.lists(st.tuples(EDGES, EDGES), min_size=1, max_size=3))
def test_arrays_are_refused_where_the_batch_of_them_is(sequences: list[tuple[int, int]]):
    queries, contexts = zip(*sequences, strict=True)
    of_batch = answer(lambda: Lengths.of_batch(Batch((*sequences, (1, 0)))))
    assert answer(lambda: Lengths.of(np.array((*queries, 1)), np.array((*contexts, 0)))) == of_batch


def answer(make: Callable[[], Lengths]) -> str | list[object]:
    """The lengths and how they lie in memory, or what is said in place of them."""
    try:
        return [(column.tolist(), column.dtype, column.flags.c_contiguous) for column in make()]
    except BatchError as error:
        return str(error)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
def test_integers_of_any_width_and_strides_are_taken(dtype: type):
    both = np.array([[3, 4], [1, 7]], dtype)
    assert [column.tolist() for column in Lengths.of(*both.T)] == [[3, 1], [4, 7]]
    assert Lengths.of([3, 1], [4, 7]).num_seqs == 2


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_lengths_are_copies_that_a_caller_who_fills_its_arrays_anew_does_not_change(dtype: type):
    query, context = np.array([3, 1], dtype), np.array([4, 7], dtype)
    lengths = Lengths.of(query, context)
    query[:], context[:] = 9, 9
    assert [column.tolist() for column in lengths] == [[3, 1], [4, 7]]


def test_lengths_without_a_query_token_are_refused():
    with pytest.raises(BatchError, match="a batch needs at least one query token"):
        Lengths.of([0, 0], [4, 7])


def test_lengths_are_their_own():
    lengths = Lengths.of([1], [5])
    assert Lengths.of_batch(lengths) is lengths


@pytest.mark.parametrize(("query", "context", "message"), [
    (np.array([], int), np.array([], int), "one sequence or more, not 0 and 0 lengths"),
    ([1, 1], [5], "one sequence or more, not 2 and 1 lengths"),
    ([1.0], [5], r"query_lens must be integers \[num_seqs\], not float64 \[1\]"),
    ([1], [[5]], r"context_lens must be integers \[num_seqs\], not int64 \[1, 1\]"),
    (3, [5], r"query_lens must be integers \[num_seqs\], not int64 \[\]"),
])  # fmt: skip
def test_what_is_no_pair_of_integers_for_each_sequence_is_refused(query: object, context: object, message: str):
    with pytest.raises(BatchError, match=message):
        Lengths.of(query, context)  # pyright: ignore
