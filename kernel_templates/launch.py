"""How a variant is planned and launched: what every template's launcher has in common."""

# pyright: basic
from __future__ import annotations

import abc
import importlib
from dataclasses import dataclass
from typing import Any

import torch

from .batch import Batch
from .errors import BatchError, VariantError
from .gpu import Gpu
from .spec import AttentionSpec
from .template import template_of, why_invalid
from .variant import Variant

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Tensors:
    """What one launch reads and writes.

    q and out: [num_tokens, num_q_heads, head_dim], the last axis contiguous. k_cache and v_cache:
    [num_pages, page_size, num_kv_heads, head_dim], any strides but the last, which is 1. block_table:
    [num_seqs, max_pages] int32, the physical page of each logical one. query_start_loc: [num_seqs + 1] int32, where
    each sequence's query tokens start. kv_lens: [num_seqs] int32, context and query tokens of each sequence.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    kv_lens: torch.Tensor
    out: torch.Tensor


class Launcher(abc.ABC):
    """One variant of one layer on one GPU, ready to be planned and run.

    `plan` is called once per engine step, `run` once per layer; what `plan` allocates is kept and reused while it is
    large enough. A captured graph reads the same addresses with the same grid for ever: call `reserve` with the largest
    batch that it is to serve, then `plan` and capture `run`; after each later `plan` the graph can be replayed.
    `padded`, false at first, makes room, and launches programs, for more than the planned batch, as such a graph would
    have; it promises nothing. Raises `VariantError` when the variant is not valid here.
    """

    def __init__(self, variant: Variant, spec: AttentionSpec, gpu: Gpu) -> None:
        reason = why_invalid(variant, spec, gpu)
        if reason:
            raise VariantError(f"variant {variant.key()!r} cannot run on {gpu.name}: {reason}")
        self.variant = variant
        self.spec = spec
        self.gpu = gpu
        self.padded = False
        self.reserved: tuple[int, int] | None = None
        self.compile_only = False
        self.compiled: list[Any] = []

    @abc.abstractmethod
    def plan(self, batch: Batch, device: torch.device | str) -> None:
        """Make the work lists of `batch` and write them to `device`; nothing is synchronised."""

    def reserve(self, num_seqs: int, num_tokens: int, device: torch.device | str) -> None:
        """Make room on `device` for every batch of at most `num_seqs` sequences and `num_tokens` query tokens.

        Of any lengths. From then on `plan` changes no address and no grid, and raises `BatchError` for a larger batch.
        A launcher that overrides nothing here needs no room.
        """
        self.reserved = (num_seqs, num_tokens)

    def check_reserved(self, num_seqs: int, num_tokens: int) -> None:
        """Raise `BatchError` when room was reserved, and not for a batch of so many sequences and query tokens."""
        if self.reserved is not None and (num_seqs > self.reserved[0] or num_tokens > self.reserved[1]):
            raise BatchError(f"room is reserved for up to {self.reserved[0]} sequences and {self.reserved[1]} query "
                             f"tokens, not for {num_seqs} sequences and {num_tokens} query tokens")

    @abc.abstractmethod
    def run(self, tensors: Tensors) -> None:
        """Launch the planned batch on the current stream. Can be captured in a CUDA graph."""

    def workspaces(self) -> tuple[torch.Tensor, ...]:
        """The partial results that `run` writes and reads again; none where no sequence is split."""
        return ()

    def launch_key(self) -> str:
        """What is equal for two planned launchers that pass the same to their kernels, tensors aside.

        If they also have the same code, they are one measurement.
        """
        return self.variant.key()

    def capacity(self, size: int) -> int:
        """How many to make room for where `size` are planned: `padded` to the next power of two; 0 stays 0."""
        return 1 << (size - 1).bit_length() if self.padded and size else size

    def start(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """Launch `kernel`, or only compile it and remember the result while `compile_only` is set."""
        # Newer Tritons warn, and later ones change the default, when floating-point fusion is not said explicitly.
        compiled = kernel.run(*arguments, grid=grid, warmup=self.compile_only, enable_fp_fusion=True, **constants)
        if self.compile_only:
            self.compiled.append(compiled)


def make_launcher(variant: Variant, spec: AttentionSpec, gpu: Gpu) -> Launcher:
    """The launcher of `variant`'s template. Raises `VariantError` when the variant is unknown or not valid here."""
    module, _, name = template_of(variant).launcher.partition(":")
    return getattr(importlib.import_module(module), name)(variant, spec, gpu)


def query_start_locs(batch: Batch) -> list[int]:
    """Where each sequence's query tokens start in the packed q, and their total last: [num_seqs + 1]."""
    starts = [0]
    for query_len, _ in batch.sequences:
        starts.append(starts[-1] + query_len)
    return starts
