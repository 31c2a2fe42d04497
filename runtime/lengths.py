"""The lengths of an engine step: from the host, as whatever holds them, and on the device, in buffers that stay."""

# pyright: basic
from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike

from ..kernel_templates.errors import BatchError
from ..kernel_templates.launch.upload import Upload
from ..kernel_templates.lengths import IntArray, Lengths


class StepLengths(NamedTuple):
    """The lengths of a step's sequences, their keys [num_seqs], and how many query tokens and keys there are at most.

    `num_tokens` over all sequences, `longest_kv` of one.
    """

    lengths: Lengths
    kv: IntArray
    num_tokens: int
    longest_kv: int

    @property
    def num_seqs(self) -> int:
        """Sequences of the step."""
        return len(self.kv)

    @classmethod
    def of(cls, query_lens: ArrayLike, context_lens: ArrayLike) -> StepLengths:
        """Copies of integers on the host [num_seqs]. Raises `BatchError` for any other."""
        lengths = Lengths.of(_on_host("query_lens", query_lens), _on_host("context_lens", context_lens))
        kv = lengths.query + lengths.context
        return cls(lengths, kv, int(lengths.query.sum()), int(kv.max()))

    def check(self, max_tokens: int, max_seqs: int) -> StepLengths:
        """These, if they are within the limits. Raises `BatchError` where they are not."""
        if self.num_seqs > max_seqs or self.num_tokens > max_tokens:
            raise BatchError(f"{self.num_seqs} sequences with {self.num_tokens} query tokens are more than the "
                             f"{max_seqs} sequences and {max_tokens} query tokens that this attention was made for")
        return self


    def check_fits(self, rows: int, seqs: int, keys: int) -> StepLengths:
        """These, if tensors of so many rows, rows of the block table and keys in each of those have room for them.

        Raises `BatchError` where they have not.
        """
        if rows < self.num_tokens or seqs < len(self.kv):
            raise BatchError(f"{self.num_tokens} query tokens of {len(self.kv)} sequences need as many rows of q, out "
                             f"and tree_mask, and of block_table, not {rows} and {seqs}")
        if keys < self.longest_kv:
            raise BatchError(f"the longest sequence has {self.longest_kv} keys, and a row of block_table pages for "
                             f"{keys}")
        return self


def _on_host(name: str, lengths: Any) -> ArrayLike:
    if not isinstance(lengths, torch.Tensor):
        return lengths
    if not lengths.is_cpu:
        raise BatchError(f"{name} must be on the host, not on {lengths.device}: reading them there would wait for it")
    return lengths.numpy()


class LengthBuffers:
    """query_start_loc [max_seqs + 1] and kv_lens [max_seqs], int32 on `device`, at addresses that never change.

    Past the sequences of a step, query_start_loc says its number of query tokens, and kv_lens 0.
    """

    def __init__(self, max_seqs: int, device: torch.device | str) -> None:
        self._upload = Upload(2 * max_seqs + 1, device)
        self.query_start_loc, self.kv_lens = self._upload.buffer.split((max_seqs + 1, max_seqs))

    def write(self, step: StepLengths) -> None:
        """Start copying the lengths of `step`."""
        array, stop = self._upload.array(), len(self.query_start_loc)
        starts, kv_lens, num_seqs = array[:stop], array[stop:], step.num_seqs
        starts[0] = 0
        np.add.accumulate(step.lengths.query, out=starts[1 : num_seqs + 1], dtype=np.int32)
        starts[num_seqs + 1 :] = step.num_tokens
        kv_lens[:num_seqs] = step.kv
        kv_lens[num_seqs:] = 0
        self._upload.send(len(array))
