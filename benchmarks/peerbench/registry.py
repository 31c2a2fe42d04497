"""All known peers, and their loading."""

from __future__ import annotations

from collections.abc import Iterable

from . import flash_attn_3, flash_attn_4, flash_infer, torch_attention, vllm_triton
from .contender import Loaded, MissingError, Peer, Places, reason_of

PEERS: tuple[Peer, ...] = (
    *vllm_triton.PEERS, *flash_attn_3.PEERS, *flash_infer.PEERS, *flash_attn_4.PEERS, *torch_attention.PEERS,
)  # fmt: skip


def load(peers: Iterable[Peer], places: Places) -> dict[str, Loaded | str]:
    """Load the peers. By name: the loaded peer, or the reason that it is missing."""
    return {peer.name: _loaded(peer, places) for peer in peers}


def _loaded(peer: Peer, places: Places) -> Loaded | str:
    try:
        return peer.load(places)
    except MissingError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - another project's code, which may raise anything as it is imported
        return reason_of(error)
