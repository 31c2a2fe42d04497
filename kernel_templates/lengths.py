"""The lengths of a batch's sequences as arrays, which is how an engine holds them and what is planned from."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .batch import MAX_TOKENS, Batch
from .errors import BatchError

# Columns are computed in 64 bits, where nothing overflows, and written in the kernels' 32.
IntArray = NDArray[np.int64]


class Lengths(NamedTuple):
    """The query tokens and the context tokens of each sequence, both [num_seqs], as `of` and `of_batch` check them."""

    query: IntArray
    context: IntArray

    @classmethod
    def of(cls, query_lens: ArrayLike, context_lens: ArrayLike) -> Lengths:
        """Copies of two arrays of integers on the host [num_seqs]. Raises `BatchError` as `Batch` does."""
        query, context = _integers(query_lens, "query_lens"), _integers(context_lens, "context_lens")
        if not len(query) or len(query) != len(context):
            raise BatchError("a batch needs a query length and a context length for each of one sequence or more, not "
                             f"{len(query)} and {len(context)} lengths")
        # MAX_TOKENS is all ones: what has a bit above it, a sign or a carry, is negative or too long.
        bits = query | context | (query + context)
        if bits.view(np.uint64).max() > MAX_TOKENS or not np.count_nonzero(query):
            # The same rule, which finds the sequence and says what is wrong.
            Batch(tuple(zip(query.tolist(), context.tolist(), strict=True)))
        return cls(query, context)

    @classmethod
    def of_batch(cls, batch: Batch | Lengths) -> Lengths:
        """Those of `batch`."""
        if isinstance(batch, Lengths):
            return batch
        # Half the time that np.array takes for the same.
        flat = np.fromiter(itertools.chain.from_iterable(batch.sequences), np.int64, 2 * len(batch.sequences))
        return cls(flat[::2].copy(), flat[1::2].copy())

    @property
    def num_seqs(self) -> int:
        """Sequences in the batch."""
        return len(self.query)


def _integers(lengths: ArrayLike, name: str) -> IntArray:
    """A copy of `lengths` [n] in 64 bits, one after the other in memory."""
    array: NDArray[Any] = np.asarray(lengths)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise BatchError(f"{name} must be integers [num_seqs], not {array.dtype} {list(array.shape)}")
    # An engine fills its arrays anew while what is planned from them is still in use.
    return np.array(array, np.int64, order="C")
