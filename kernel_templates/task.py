"""What is tuned."""

from __future__ import annotations

from dataclasses import dataclass

from .batch import Batch
from .spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to tune: a batch of a layer whose cache has pages of `page_size` tokens."""

    spec: AttentionSpec
    batch: Batch
    page_size: int
