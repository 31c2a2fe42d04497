"""torch's own attention: varlen, FlexAttention, and scaled_dot_product_attention with its cuDNN backend.

In the supported versions none of them reads a page table, so each gets copies of K and V, made once and not timed.
"""

# pyright: basic
from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from attention_tuner.kernel_templates.launch.launcher import Tensors, query_start_locs
from attention_tuner.kernel_templates.oracle.reference import gather
from attention_tuner.kernel_templates.task import Task

from .contender import Contender, Loaded, MissingError, Peer, Places, RefusedError, gathered, reason_of, starts_of

# The share of free memory that copies of one set of tensors may take.
MOST_OF_FREE = 0.5


class TorchVarlen(Contender):
    """`torch.nn.attention.varlen.varlen_attn` on concatenated K and V."""

    def __init__(self, task: Task, varlen_attn: Any) -> None:
        super().__init__(task)
        self._varlen_attn = varlen_attn
        # Newer versions need an option if query heads share KV heads.
        self._options = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

    def prepare(self, tensors: Tensors) -> None:
        """Copy K and V."""
        k, v = (gathered(cache, tensors, self.task) for cache in (tensors.k_cache, tensors.v_cache))
        self.made[id(tensors)] = k, v, starts_of(self.batch.kv_lens, k.device)

    def run(self, tensors: Tensors) -> Any:
        """Launch the kernel."""
        k, v, kv_starts = self.made[id(tensors)]
        return self._varlen_attn(tensors.q, k, v, tensors.query_start_loc, kv_starts, self.max_query, self.max_kv,
                                 scale=self.spec.softmax_scale, window_size=(-1, 0), **self._options)  # fmt: skip

    def output(self, tensors: Tensors, returned: Any) -> torch.Tensor:
        """The returned output."""
        return returned


class Flex(Contender):
    """Compiled `flex_attention` on all sequences as one; a block mask separates them."""

    def __init__(self, task: Task, flex_attention: Any) -> None:
        super().__init__(task)
        self._flex_attention = flex_attention
        self._block_mask: Any = None

    def prepare(self, tensors: Tensors) -> None:
        """Copy K and V, and make the block mask, which depends only on lengths."""
        k, v = (gathered(cache, tensors, self.task) for cache in (tensors.k_cache, tensors.v_cache))
        self.made[id(tensors)] = _heads_first(k), _heads_first(v)
        if self._block_mask is None:
            # Every batch compiles anew. Without the reset, the compiler counts each as a recompilation of the last.
            torch.compiler.reset()
            self._block_mask = self._mask(tensors.q.device)

    def _mask(self, device: torch.device) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        query_lens = torch.tensor([query_len for query_len, _ in self.batch.sequences], device=device)
        kv_lens = torch.tensor(self.batch.kv_lens, device=device)
        sequence = torch.arange(self.batch.num_seqs, device=device)
        of_query, of_key = (sequence.repeat_interleave(lengths) for lengths in (query_lens, kv_lens))
        # Absolute positions of tokens in their sequences.
        query_position = _positions(query_lens) + (kv_lens - query_lens)[of_query]
        key_position = _positions(kv_lens)

        def visible(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return (of_query[query] == of_key[key]) & (key_position[key] <= query_position[query])

        return create_block_mask(visible, None, None, len(of_query), len(of_key), device=str(device))

    def run(self, tensors: Tensors) -> Any:
        """Launch the kernel, and the reduction if KV is split."""
        k, v = self.made[id(tensors)]
        return self._flex_attention(_heads_first(tensors.q), k, v, block_mask=self._block_mask,
                                    scale=self.spec.softmax_scale, enable_gqa=True)  # fmt: skip

    def output(self, tensors: Tensors, returned: Any) -> torch.Tensor:
        """The returned output, tokens first."""
        return returned[0].transpose(0, 1)


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences of one query length, padded to the longest."""

    # Indices of their rows in q [num_seqs, query_len].
    rows: torch.Tensor
    # [num_seqs, num_kv_heads, longest, head_dim]
    k: torch.Tensor
    v: torch.Tensor
    # Added to the scores [num_seqs, 1, query_len, longest]; None if `is_causal` hides all that must be hidden.
    mask: torch.Tensor | None
    is_causal: bool


class Sdpa(Contender):
    """`scaled_dot_product_attention` with one backend, called once for each query length."""

    def __init__(self, task: Task, backend: Any) -> None:
        super().__init__(task)
        self._backend = backend

    def prepare(self, tensors: Tensors) -> None:
        """Copy K and V into padded groups, and make their masks. Raises `RefusedError` if they do not fit."""
        members: dict[int, list[int]] = defaultdict(list)
        for index, (query_len, _) in enumerate(self.batch.sequences):
            members[query_len].append(index)
        tokens = sum(len(group) * max(self.batch.kv_lens[i] for i in group) for group in members.values())
        needed = 2 * tokens * self.spec.num_kv_heads * self.spec.head_dim * self.spec.element_bytes
        if tensors.q.is_cuda and needed > MOST_OF_FREE * torch.cuda.mem_get_info()[0]:
            raise RefusedError(f"padded to the longest sequence, K and V take {needed / 1e9:.0f} GB")
        self.made[id(tensors)] = [self._group(tensors, length, group) for length, group in members.items()]

    def _group(self, tensors: Tensors, query_len: int, members: list[int]) -> Group:
        device = tensors.q.device
        starts, kv_lens = query_start_locs(self.batch), self.batch.kv_lens
        longest = max(kv_lens[i] for i in members)
        shape = (len(members), longest, self.spec.num_kv_heads, self.spec.head_dim)
        k, v = (tensors.k_cache.new_zeros(shape) for _ in range(2))
        for place, i in enumerate(members):
            for copy, cache in ((k, tensors.k_cache), (v, tensors.v_cache)):
                copy[place, : kv_lens[i]] = gather(cache, tensors.block_table[i], kv_lens[i])
        contexts = torch.tensor([kv_lens[i] - query_len for i in members], device=device)
        visible = contexts[:, None, None, None] + torch.arange(query_len, device=device)[:, None]
        hidden = torch.arange(longest, device=device) > visible
        is_causal = query_len == longest and query_len > 1
        mask = None
        if not is_causal and bool(hidden.any()):
            mask = torch.zeros(hidden.shape, dtype=k.dtype, device=device).masked_fill_(hidden, -torch.inf)
        rows = torch.tensor([starts[i] for i in members], device=device)[:, None] + torch.arange(query_len).to(device)
        return Group(rows, k.transpose(1, 2), v.transpose(1, 2), mask, is_causal)

    def run(self, tensors: Tensors) -> Any:
        """Launch once per query length: gather the queries from q, and scatter the output."""
        from torch.nn.attention import sdpa_kernel

        with sdpa_kernel(self._backend):
            for group in self.made[id(tensors)]:
                out = torch.nn.functional.scaled_dot_product_attention(
                    tensors.q[group.rows].transpose(1, 2), group.k, group.v, attn_mask=group.mask,
                    is_causal=group.is_causal, scale=self.spec.softmax_scale, enable_gqa=True,
                )  # fmt: skip
                tensors.out[group.rows] = out.transpose(1, 2)


def _heads_first(rows: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, head_dim] as [1, heads, tokens, head_dim]."""
    return rows.transpose(0, 1)[None]


def _positions(lengths: torch.Tensor) -> torch.Tensor:
    """Positions 0, 1, ... of each sequence, concatenated."""
    starts = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum()), device=lengths.device) - starts.repeat_interleave(lengths)


def _loaded(make: Callable[[Task], Contender]) -> Loaded:
    return Loaded(make, f"torch {torch.__version__}")


def _load_varlen(places: Places) -> Loaded:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise MissingError(reason_of(error)) from error
    return _loaded(functools.partial(TorchVarlen, varlen_attn=varlen_attn))


def _load_flex(places: Places) -> Loaded:
    from torch.nn.attention.flex_attention import flex_attention

    return _loaded(functools.partial(Flex, flex_attention=torch.compile(flex_attention, dynamic=False)))


def _load_cudnn(places: Places) -> Loaded:
    from torch.nn.attention import SDPBackend

    if not torch.backends.cudnn.is_available():
        raise MissingError("torch has no cuDNN here")
    loaded = _loaded(functools.partial(Sdpa, backend=SDPBackend.CUDNN_ATTENTION))
    return Loaded(loaded.make, f"{loaded.version}, cuDNN {torch.backends.cudnn.version()}")


_COPIES = "no page table: copies of K and V, not timed, "
PEERS = (
    Peer("torch_varlen", _COPIES + "back to back", _load_varlen),
    Peer("cudnn", _COPIES + "padded to the longest sequence of each query length, with a mask where needed; "
         "reordering q and out is timed", _load_cudnn),
    Peer("flex_attention", _COPIES + "back to back as one sequence, separated by a block mask that is made once; "
         "compiled by torch.compile", _load_flex),
)  # fmt: skip
