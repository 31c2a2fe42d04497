"""The record of one thing to tune."""

from __future__ import annotations

from dataclasses import dataclass

from .batch import Batch
from .spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to tune: a batch of a layer."""

    spec: AttentionSpec
    batch: Batch
    # Tokens in a page of the KV cache.
    page_size: int
