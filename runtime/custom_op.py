"""PyTorch operator that launches attention, so that `torch.compile` sees one opaque call.

A compiled graph holds numbers and tensors but no Python objects, so the operator finds the attention by its handle.
"""

# pyright: basic
from __future__ import annotations

import itertools
import weakref
from typing import Protocol

import torch

from ..kernel_templates.errors import SpecError

NAME = "attention_tuner::hybrid_attention"
SCHEMA = (
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor(a!) out, Tensor(b!)? lse, Tensor? sinks, "
    "Tensor? alibi_slopes, Tensor? q_scale, Tensor? k_scale, Tensor? v_scale, Tensor? tree_mask, SymInt handle) -> ()"
)


class Launchable(Protocol):
    """Attention that the operator launches."""

    def launch(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor,
        out: torch.Tensor, lse: torch.Tensor | None, *features: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Launch the plan and write `out` and `lse`; `features` are in the order of the operator's arguments."""
        ...


_handles = itertools.count(1)
# Weak, because the caller owns the attention.
_by_handle: weakref.WeakValueDictionary[int, Launchable] = weakref.WeakValueDictionary()


def register(attention: Launchable) -> int:
    """Give `attention` a handle, unique in this process and valid while `attention` is referenced elsewhere."""
    handle = next(_handles)
    _by_handle[handle] = attention
    return handle


def _launch(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor | None, sinks: torch.Tensor | None, alibi_slopes: torch.Tensor | None,
    q_scale: torch.Tensor | None, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None,
    tree_mask: torch.Tensor | None, handle: int,
) -> None:  # fmt: skip
    attention = _by_handle.get(handle)
    if attention is None:
        raise SpecError(f"no attention has the handle {handle}: the compiled HybridAttention was deleted; "
                        "keep a reference to it")
    features = sinks, alibi_slopes, q_scale, k_scale, v_scale, tree_mask
    attention.launch(q, k_cache, v_cache, block_table, out, lse, *features)


hybrid_attention_op = torch.library.custom_op(NAME, _launch, mutates_args=("out", "lse"), schema=SCHEMA)


@hybrid_attention_op.register_fake
def _(*_arguments: object, **_more: object) -> None:
    """Return nothing, because the operator writes into given tensors."""
