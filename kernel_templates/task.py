"""The record of a task: one batch of a layer to tune."""

from __future__ import annotations

from dataclasses import dataclass

from .batch import Batch
from .spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class Task:
    """A batch of a layer to tune at one page size."""

    spec: AttentionSpec
    batch: Batch
    # Tokens in a page of the KV cache.
    page_size: int
