"""How a variant is planned and launched: what every template's launcher has in common."""

# pyright: basic
from __future__ import annotations

import abc
import importlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..batch import Batch, Lengths
from ..errors import BatchError, SpecError, VariantError
from ..gpu import Gpu
from ..limits import next_power_of_two
from ..registry import template_of, why_invalid
from ..spec import AttentionSpec
from ..variant import Variant
from .workspace import Workspace

LOG2_E = 1.4426950408889634
# In a shape: as many as there are.
ANY = -1


@dataclass(frozen=True, slots=True)
class Tensors:
    """What one launch reads and writes.

    q: [num_tokens, num_q_heads, head_dim] and out: [num_tokens, num_q_heads, value_dim], the last axis contiguous.
    k_cache: [num_pages, page_size, num_kv_heads, head_dim] and v_cache: the same with value_dim, any strides but the
    last, which is 1. block_table: [num_seqs, max_pages] int32, the physical page of each logical one. query_start_loc:
    [num_seqs + 1] int32, where each sequence's query tokens start. kv_lens: [num_seqs] int32, context and query tokens
    of each sequence. What a layer has only with a feature: sinks and alibi_slopes [num_q_heads] float32; q_scale,
    k_scale and v_scale [num_kv_heads] float32, what fp8 queries and an fp8 cache are multiplied by, queries by that of
    their KV head; tree_mask [num_tokens] int64, whose bit b says whether a token sees query token b of its own sequence
    (of sequences of 2 to 64 query tokens). lse: [num_tokens, num_q_heads] float32, where the natural log-sum-exp, the
    sink included, is written if given.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    kv_lens: torch.Tensor
    out: torch.Tensor
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    q_scale: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    tree_mask: torch.Tensor | None = None
    lse: torch.Tensor | None = None


class Features(NamedTuple):
    """What the kernels read and write of a layer's features, as `Tensors` says; None where the layer lacks it."""

    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    q_scale: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    tree_mask: torch.Tensor | None
    lse: torch.Tensor | None
    stride_lse: int | None


PLAIN = Features(None, None, None, None, None, None, None, None)


def features_of(tensors: Tensors, spec: AttentionSpec) -> Features:
    """The features of a launch.

    Raises `SpecError` for a tensor that `spec` needs and lacks, for one that it does not take, and for one that is not
    as `Tensors` says, or not where q is. How many rows `tree_mask` and `lse` have is for the caller to see to.
    """
    t, lse, fp8 = tensors, tensors.lse, spec.has_fp8_cache
    is_plain = not (fp8 or spec.has_sinks or spec.has_alibi or spec.has_tree_mask)
    if is_plain and t.sinks is t.alibi_slopes is t.q_scale is t.k_scale is t.v_scale is t.tree_mask is lse is None:
        return PLAIN
    q_heads, kv_heads, device = spec.num_q_heads, spec.num_kv_heads, t.q.device
    for name, tensor, is_taken, dtype, shape in (
        ("sinks", t.sinks, spec.has_sinks, torch.float32, (q_heads,)),
        ("alibi_slopes", t.alibi_slopes, spec.has_alibi, torch.float32, (q_heads,)),
        ("q_scale", t.q_scale, spec.has_fp8_queries, torch.float32, (kv_heads,)),
        ("k_scale", t.k_scale, fp8, torch.float32, (kv_heads,)),
        ("v_scale", t.v_scale, fp8, torch.float32, (kv_heads,)),
        ("tree_mask", t.tree_mask, spec.has_tree_mask, torch.int64, (ANY,)),
        ("lse", lse, lse is not None, torch.float32, (ANY, q_heads)),
    ):
        if tensor is None and not is_taken:
            continue
        if tensor is None:
            raise SpecError(f"layer {spec.key()} needs the tensor {name!r}, which is not given")
        if not is_taken:
            raise SpecError(f"layer {spec.key()} takes no tensor {name!r}, which is given")
        check_tensor(name, tensor, shape, dtype, device)
    return Features(t.sinks, t.alibi_slopes, t.q_scale, t.k_scale, t.v_scale, t.tree_mask, lse,
                    None if lse is None else lse.stride(0))  # fmt: skip


def check_tensor(name: str, tensor: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raise `SpecError` for what is no tensor of `shape`, its last axis contiguous; `ANY` stands for any size."""
    if not isinstance(tensor, torch.Tensor):
        found = f"a {type(tensor).__name__}"
    elif (
        tensor.dtype == dtype
        and tensor.device == device
        and tensor.dim() == len(shape)
        and all(map(_is_size, tensor.shape, shape))
        # A scale that is expanded from one element has a stride of 0, and is no row of elements.
        and tensor.stride(-1) == 1
    ):
        return
    else:
        found = f"{list(tensor.shape)} in {tensor.dtype} on {tensor.device} with strides {tensor.stride()}"
    sizes = ", ".join("any" if size == ANY else str(size) for size in shape)
    raise SpecError(f"{name} must be [{sizes}] in {dtype} on {device} with a contiguous last axis, not {found}")


def _is_size(size: int, wanted: int) -> bool:
    return size == wanted or wanted == ANY


def offset_dtype(tensors: Tensors) -> str:
    """The narrowest dtype, "int32" or "int64", that holds every offset within one head of either cache.

    One layer's cache holds so much on hardly any GPU, but several layers may be views of one tensor. Offsets in int32
    are quicker to compute.
    """
    return "int32" if max(map(_farthest, (tensors.k_cache, tensors.v_cache))) < 2**31 else "int64"


def _farthest(cache: torch.Tensor) -> int:
    pages, slots, _, dim = cache.shape
    return (pages - 1) * cache.stride(0) + (slots - 1) * cache.stride(1) + dim - 1


class Launcher(abc.ABC):
    """One variant of one layer on one GPU, ready to be planned and run.

    `plan` is called once per engine step, `run` once per layer; what `plan` allocates is kept and reused while it is
    large enough. All calls of one launcher write the same work list and the same partial results: they must be on one
    stream, or ordered by events as if they were; two streams need two launchers. A captured graph reads the same
    addresses with the same grid for ever: call `reserve` with the largest batch that it is to serve, then `plan` and
    capture `run`; after each later `plan` the graph can be replayed.

    May be set before the first plan: `padded`, to make room, and launch programs, for more than the planned batch, as
    such a graph would have; it promises nothing. `exact_grid`, to launch no more programs than planned, whatever is
    reserved: for launches that are not captured. `fixed_split`, to cut keys into segments of at most so many, multiples
    of 128, for tiles of short and of long sequences (of at most `longest_kv` keys where room is reserved): then what a
    row gives depends on no other sequence. Without it, keys are cut so that the batch is balanced. `workspace`, to
    share that of other launchers on the stream. Raises `VariantError` when the variant is not valid here.
    """

    def __init__(self, variant: Variant, spec: AttentionSpec, gpu: Gpu) -> None:
        reason = why_invalid(variant, spec, gpu)
        if reason:
            raise VariantError(f"variant {variant.key()!r} cannot run on {gpu.name}: {reason}")
        self.variant = variant
        self.spec = spec
        self.gpu = gpu
        self.padded = False
        self.exact_grid = False
        self.fixed_split: tuple[int, int] | None = None
        self.longest_kv = 0
        self.workspace = Workspace()
        self.reserved: tuple[int, int] | None = None
        self.compile_only = False
        self.compiled: list[Any] = []

    @abc.abstractmethod
    def plan(self, batch: Batch | Lengths, device: torch.device | str) -> None:
        """Make the work lists of `batch` and copy them to `device` on its current stream; nothing is synchronised.

        An engine that holds lengths as arrays gives `Lengths.of` them. Raises `BatchError` where 32 bits are too few.
        """

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
        return next_power_of_two(size) if self.padded else size

    def start(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """Launch `kernel`, or only compile it and remember the result while `compile_only` is set."""
        compiled = run_or_compile(kernel, grid, arguments, constants, self.compile_only)
        if self.compile_only:
            self.compiled.append(compiled)


def run_or_compile(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any], compile_only: bool
) -> Any:
    """Launch a Triton kernel, or only compile it as that launch would, and give what was compiled."""
    # Newer Tritons warn, and later ones change the default, when floating-point fusion is not said explicitly.
    return kernel.run(*arguments, grid=grid, warmup=compile_only, enable_fp_fusion=True, **constants)


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
