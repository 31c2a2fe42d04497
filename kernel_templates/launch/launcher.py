"""The launcher of a variant: its tensors, its settings, and the base class of every template's launcher."""

# pyright: basic
from __future__ import annotations

import abc
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from triton import knobs
from triton.runtime.jit import JITCallable

from ..batch import Batch, Lengths
from ..errors import BatchError, SpecError, VariantError
from ..gpu import Gpu
from ..limits import next_power_of_two
from ..registry import template_of, why_invalid
from ..spec import AttentionSpec
from ..variant import Variant
from .arguments import NO_FEATURES, Features
from .memory import Workspace

# The size of an axis in a wanted shape that accepts every size.
ANY = -1


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors that one launch reads and writes; a layer without a feature has None for the feature's tensors."""

    # Queries [num_tokens, num_q_heads, head_dim], last axis contiguous.
    q: torch.Tensor
    # Keys [num_pages, page_size, num_kv_heads, head_dim], any strides but 1 on the last axis.
    k_cache: torch.Tensor
    # Values [num_pages, page_size, num_kv_heads, value_dim], likewise.
    v_cache: torch.Tensor
    # [num_seqs, max_pages] int32: the physical page of each logical page.
    block_table: torch.Tensor
    # [num_seqs + 1] int32: the first query token of each sequence, and their total.
    query_start_loc: torch.Tensor
    # [num_seqs] int32: context and query tokens of each sequence.
    kv_lens: torch.Tensor
    # Output [num_tokens, num_q_heads, value_dim], last axis contiguous.
    out: torch.Tensor
    # Attention sinks [num_q_heads] float32.
    sinks: torch.Tensor | None = None
    # ALiBi slopes [num_q_heads] float32.
    alibi_slopes: torch.Tensor | None = None
    # Scales of fp8 queries [num_kv_heads] float32, by the KV head that the query head belongs to.
    q_scale: torch.Tensor | None = None
    # Scales of fp8 keys [num_kv_heads] float32.
    k_scale: torch.Tensor | None = None
    # Scales of fp8 values [num_kv_heads] float32.
    v_scale: torch.Tensor | None = None
    # [num_tokens] int64. Bit b of a token's word: the token sees query token b of its sequence. Only sequences of 2 to
    # 64 query tokens use their words.
    tree_mask: torch.Tensor | None = None
    # Written if given: the natural log-sum-exp [num_tokens, num_q_heads] float32, sink included.
    lse: torch.Tensor | None = None


def features_of(tensors: Tensors, spec: AttentionSpec) -> Features:
    """The features of a launch, checked against `spec`.

    Raises `SpecError` for a tensor that `spec` needs and lacks, for one that it does not take, and for one of another
    shape, dtype or device than `Tensors` and q have. The caller checks the rows of `tree_mask` and `lse`.
    """
    t, lse, fp8 = tensors, tensors.lse, spec.has_fp8_cache
    is_plain = not (fp8 or spec.has_sinks or spec.has_alibi or spec.has_tree_mask)
    if is_plain and t.sinks is t.alibi_slopes is t.q_scale is t.k_scale is t.v_scale is t.tree_mask is lse is None:
        return NO_FEATURES
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
    """Raise `SpecError` unless `tensor` has this shape, dtype and device; an axis of `ANY` may have any size.

    The last axis must be contiguous.
    """
    if not isinstance(tensor, torch.Tensor):
        found = f"a {type(tensor).__name__}"
    elif (
        tensor.dtype == dtype
        and tensor.device == device
        and tensor.dim() == len(shape)
        and all(map(_is_size, tensor.shape, shape))
        # A scale expanded from one element has a stride of 0, which the kernels would read past.
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
    """The narrower of "int32" and "int64" that holds every offset within one head of either cache.

    Offsets in int32 are quicker to compute. They overflow where several layers are views of one large tensor.
    """
    return "int32" if max(map(_farthest, (tensors.k_cache, tensors.v_cache))) < 2**31 else "int64"


def _farthest(cache: torch.Tensor) -> int:
    pages, slots, _, dim = cache.shape
    return (pages - 1) * cache.stride(0) + (slots - 1) * cache.stride(1) + dim - 1


@dataclass(frozen=True, slots=True)
class Settings:
    """Choices of a launcher's user, made with the launcher; no variant says them."""

    # Plan room and programs for more than the batch, as a captured graph has. It promises nothing about later batches.
    padded: bool = False
    # Launch only the planned programs, whatever room is reserved. For launches that are not captured.
    exact_grid: bool = False
    # The most keys of a segment of short and of long sequences, multiples of 128. A row's result then depends on no
    # other sequence. None: keys are cut so that the batch is balanced.
    fixed_split: tuple[int, int] | None = None
    # Compile the kernels of a launch and keep them in `Launcher.compiled`, instead of launching.
    compile_only: bool = False
    # Memory shared with other launchers on the stream. None: the launcher has its own.
    workspace: Workspace | None = None


DEFAULTS = Settings()


class Launcher(abc.ABC):
    """One variant of one layer on one GPU, ready to be planned and run.

    `plan` is called once per engine step, `run` once per layer. Buffers that `plan` allocates are reused while they are
    large enough. All calls of one launcher write the same work list and partial results, so they must be on one stream,
    or ordered by events as if they were; two streams need two launchers. A captured graph reads the same addresses with
    the same grid at each replay: call `reserve` with the largest batch to serve, then `plan`, and capture `run`; after
    each later `plan` the graph can be replayed.
    """

    def __init__(self, variant: Variant, spec: AttentionSpec, gpu: Gpu, settings: Settings = DEFAULTS) -> None:
        self.variant = variant
        self.spec = spec
        self.gpu = gpu
        self.settings = settings
        self.workspace = settings.workspace or Workspace()
        self.reserved: tuple[int, int] | None = None
        self.longest_kv = 0
        self.compiled: list[Any] = []

    @abc.abstractmethod
    def plan(self, batch: Batch | Lengths, device: torch.device | str) -> None:
        """Make the work lists of `batch` and copy them to `device` on its current stream, without synchronising.

        An engine that holds lengths as arrays passes `Lengths.of` them. Raises `BatchError` where 32 bits are too few.
        """

    def reserve(self, num_seqs: int, num_tokens: int, device: torch.device | str, longest_kv: int = 0) -> None:
        """Make room on `device` for every batch of at most `num_seqs` sequences and `num_tokens` query tokens.

        Contexts may have any length, but with a `fixed_split` the room is for sequences of up to `longest_kv` keys.
        From then on `plan` changes no address and no grid, and raises `BatchError` for a larger batch. A launcher
        without buffers need not override this.
        """
        self.reserved = (num_seqs, num_tokens)
        self.longest_kv = longest_kv

    def check_reserved(self, num_seqs: int, num_tokens: int) -> None:
        """Raise `BatchError` for a batch larger than the reserved room, if room was reserved."""
        if self.reserved is not None and (num_seqs > self.reserved[0] or num_tokens > self.reserved[1]):
            raise BatchError(f"room is reserved for up to {self.reserved[0]} sequences and {self.reserved[1]} query "
                             f"tokens, not for {num_seqs} sequences and {num_tokens} query tokens")

    @abc.abstractmethod
    def run(self, tensors: Tensors) -> None:
        """Launch the planned batch on the current stream. Can be captured in a CUDA graph."""

    def workspaces(self) -> tuple[torch.Tensor, ...]:
        """The partial results that `run` writes and reads again; empty where no sequence is split."""
        return ()

    def launch_key(self) -> str:
        """A text that two planned launchers share if they pass their kernels the same arguments, tensors aside.

        Launchers that also have the same code are measured once.
        """
        return self.variant.key()

    def capacity(self, size: int) -> int:
        """The room to make for `size`: with `padded` the next power of two, else `size`; 0 stays 0."""
        return next_power_of_two(size) if self.settings.padded else size

    def start(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """Launch `kernel`, or with `compile_only` compile it and keep the result."""
        compiled = run_or_compile(kernel, grid, arguments, constants, self.settings.compile_only)
        if self.settings.compile_only:
            self.compiled.append(compiled)


def run_or_compile(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any], compile_only: bool
) -> Any:
    """Launch a Triton kernel, or only compile it for that launch; returns the compiled kernel."""
    # Triton 3.9 warns, and 3.10 changes the default, when floating-point fusion is not given explicitly.
    return kernel.run(*arguments, grid=grid, warmup=compile_only, enable_fp_fusion=True, **constants)


def make_launcher(variant: Variant, spec: AttentionSpec, gpu: Gpu, settings: Settings = DEFAULTS) -> Launcher:
    """The launcher of `variant`'s template. Raises `VariantError` when the variant is unknown or not valid here."""
    module, _, name = template_of(variant).launcher.partition(":")
    reason = why_invalid(variant, spec, gpu)
    if reason:
        raise VariantError(f"variant {variant.key()!r} cannot run on {gpu.name}: {reason}")
    launcher = getattr(importlib.import_module(module), name)(variant, spec, gpu, settings)
    # Interpreted functions have no keys.
    if not knobs.runtime.interpret:
        settle_cache_keys(launcher)
    return launcher


def settle_cache_keys(launcher: Launcher) -> None:
    """Compute the cache keys of all functions that the kernels of `launcher` call, before those of their callers.

    Before Triton 3.8 a kernel's key holds the global constants of a function that it calls only if that function's own
    key was known by then, for instance because another kernel called it earlier. Then a process that measures would
    not find the kernels that other processes compiled. (Triton orders constants of one name by address, so constants
    of one name in two modules must have one value.)
    """
    seen: set[int] = set()
    for each in type(launcher).__mro__:
        for value in tuple(vars(sys.modules[each.__module__]).values()):
            if isinstance(value, JITCallable):
                _settle(value, seen)


def _settle(function: Any, seen: set[int]) -> None:
    if id(function) in seen:
        return
    seen.add(id(function))
    for called in _called(function):
        _settle(called, seen)
    function.cache_key  # noqa: B018 - Triton keeps the key once it is computed


def _called(function: Any) -> Iterator[Any]:
    """The jitted functions that `function` names, directly or as an attribute of a module, like `max` of `tl.max`."""
    code, known = function.fn.__code__, function.fn.__globals__
    for name in code.co_names:
        value = known.get(name)
        if isinstance(value, JITCallable):
            yield value
        for attribute in code.co_names if isinstance(value, ModuleType) else ():
            found = getattr(value, attribute, None)
            if isinstance(found, JITCallable):
                yield found


def query_start_locs(batch: Batch) -> list[int]:
    """The first query token of each sequence in the packed q, and the total last: [num_seqs + 1]."""
    starts = [0]
    for query_len, _ in batch.sequences:
        starts.append(starts[-1] + query_len)
    return starts
