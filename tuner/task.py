"""What is tuned."""

from __future__ import annotations

from dataclasses import dataclass

from ..kernel_templates.batch import Batch
from ..kernel_templates.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to tune: a batch of a layer whose cache has pages of `page_size` tokens."""

    spec: AttentionSpec
    batch: Batch
    page_size: int
