"""Lengths of an engine step: checked on the host, then copied to GPU buffers with fixed addresses."""

# pyright: basic
from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from ..kernel_templates.batch import Lengths
from ..kernel_templates.errors import BatchError
from ..kernel_templates.launch.memory import Upload


def read_lengths(query_lens: ArrayLike, context_lens: ArrayLike, max_seqs: int, max_tokens: int) -> Lengths:
    """Copy the lengths of a step from lists, arrays or tensors of integers on the host [num_seqs].

    Raises `BatchError` for anything else, and for more than `max_seqs` sequences or `max_tokens` query tokens.
    """
    lengths = Lengths.of(_on_host("query_lens", query_lens), _on_host("context_lens", context_lens))
    if lengths.num_seqs > max_seqs or lengths.num_tokens > max_tokens:
        raise BatchError(f"{lengths.num_seqs} sequences with {lengths.num_tokens} query tokens are more than the "
                         f"{max_seqs} sequences and {max_tokens} query tokens that this attention was made for")
    return lengths


def check_fits(lengths: Lengths, rows: int, seqs: int, keys: int) -> None:
    """Raise `BatchError` if tensors are too small for a step.

    The tensors have `rows` rows of query tokens, and a block table of `seqs` rows with pages for `keys` keys each.
    """
    if rows < lengths.num_tokens or seqs < len(lengths.query):
        raise BatchError(f"{lengths.num_tokens} query tokens need as many rows of q, out and tree_mask, not {rows}; "
                         f"{lengths.num_seqs} sequences as many rows of block_table, not {seqs}")
    if keys < lengths.longest_kv:
        raise BatchError(f"the longest sequence has {lengths.longest_kv} keys, but a row of block_table has pages for "
                         f"{keys} only")


def _on_host(name: str, lengths: Any) -> ArrayLike:
    if not isinstance(lengths, torch.Tensor):
        return lengths
    if not lengths.is_cpu:
        raise BatchError(f"{name} must be on the host, not on {lengths.device}: reading them would wait for the GPU")
    return lengths.numpy()


class LengthBuffers:
    """query_start_loc [max_seqs + 1] and kv_lens [max_seqs], int32 on `device`, at fixed addresses.

    After the sequences of a step, query_start_loc repeats the number of query tokens, and kv_lens is 0.
    """

    def __init__(self, max_seqs: int, device: torch.device | str) -> None:
        self._upload = Upload(2 * max_seqs + 1, device)
        self.query_start_loc, self.kv_lens = self._upload.buffer.split((max_seqs + 1, max_seqs))

    def write(self, lengths: Lengths) -> None:
        """Start copying `lengths`."""
        array, stop = self._upload.array(), len(self.query_start_loc)
        starts, kv_lens, num_seqs = array[:stop], array[stop:], len(lengths.query)
        starts[0] = 0
        np.add.accumulate(lengths.query, out=starts[1 : num_seqs + 1], dtype=np.int32)
        starts[num_seqs + 1 :] = lengths.num_tokens
        kv_lens[:num_seqs] = lengths.kv
        kv_lens[num_seqs:] = 0
        self._upload.send(len(array))
