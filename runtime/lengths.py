"""The lengths of an engine step: from the host, as whatever holds them, and on the device, in buffers that stay."""

# pyright: basic
from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from ..kernel_templates.batch import MAX_TOKENS, Batch
from ..kernel_templates.errors import BatchError
from ..kernel_templates.launch import query_start_locs
from ..kernel_templates.upload import Upload

Lengths = Sequence[int] | NDArray[Any] | torch.Tensor


def batch_of(query_lens: Lengths, context_lens: Lengths, max_tokens: int, max_seqs: int) -> Batch:
    """The batch of sequences with these lengths, within these limits. Raises `BatchError` for any other."""
    queries, contexts = integers("query_lens", query_lens), integers("context_lens", context_lens)
    if len(queries) != len(contexts):
        raise BatchError(f"query_lens are of {len(queries)} sequences and context_lens of {len(contexts)}; they must "
                         "be of as many")
    if len(queries) > max_seqs or sum(queries) > max_tokens:
        raise BatchError(f"{len(queries)} sequences with {sum(queries)} query tokens are more than the {max_seqs} "
                         f"sequences and {max_tokens} query tokens that this attention was made for")
    batch = Batch(tuple(zip(queries, contexts, strict=True)))
    if max(contexts) > MAX_TOKENS - max_tokens:
        raise BatchError(f"a context of {max(contexts)} tokens is too long; accepted are up to "
                         f"{MAX_TOKENS - max_tokens}")
    return batch


def integers(name: str, lengths: Lengths) -> list[int]:
    """`lengths` as a list. Raises `BatchError`, which names them, when they are no row of integers on the host."""
    if isinstance(lengths, torch.Tensor) and lengths.device.type != "cpu":
        raise BatchError(f"{name} must be on the host, not on {lengths.device}: reading them there would wait for it")
    try:
        values = lengths if isinstance(lengths, list | tuple) else lengths.tolist()  # pyright: ignore
        return list(map(operator.index, values))
    except (TypeError, AttributeError) as error:
        raise BatchError(f"{name} must be a row of integers, not {lengths!r:.80}") from error


class LengthBuffers:
    """query_start_loc [max_seqs + 1] and kv_lens [max_seqs], int32 on `device`, at addresses that never change.

    Past the sequences of a batch, query_start_loc says its number of query tokens, and kv_lens 0.
    """

    def __init__(self, max_seqs: int, device: torch.device | str) -> None:
        self._upload = Upload(2 * max_seqs + 1, device)
        self.query_start_loc, self.kv_lens = self._upload.buffer.split((max_seqs + 1, max_seqs))

    def write(self, batch: Batch) -> int:
        """Start copying the lengths of `batch`; returned are the keys of its longest sequence."""
        array, stop = self._upload.array(), len(self.query_start_loc)
        array[: batch.num_seqs + 1] = query_start_locs(batch)
        array[batch.num_seqs + 1 : stop] = batch.num_tokens
        kv_lens = batch.kv_lens
        array[stop : stop + batch.num_seqs] = kv_lens
        array[stop + batch.num_seqs :] = 0
        self._upload.send(len(array))
        return max(kv_lens)
