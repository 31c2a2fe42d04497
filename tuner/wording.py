"""How batches, variants and times are put in few words."""

from __future__ import annotations

import math

from ..kernel_templates.batch import Batch
from ..kernel_templates.variant import Variant
from .run import Progress

# A batch whose text is longer than this is shortened.
BATCH_WIDTH = 44


def short(batch: Batch) -> str:
    """`batch` in at most a few words: contexts of many sequences of one query length are cut to their range."""
    text = str(batch)
    if len(text) <= BATCH_WIDTH:
        return text
    groups: dict[int, list[int]] = {}
    for query_len, context_len in batch.sequences:
        groups.setdefault(query_len, []).append(context_len)
    parts = [
        f"{len(contexts)}x{query_len}@{min(contexts)}" + (f"..{max(contexts)}" if len(set(contexts)) > 1 else "")
        for query_len, contexts in groups.items()
    ]
    return ",".join(parts)


def values(variant: Variant) -> str:
    """The template and values of `variant` in words that a narrow column can break; the page size is left out."""
    return " ".join([variant.template, *(f"{name}={value}" for name, value in variant.values)])


def milliseconds(ms: float) -> str:
    """A time with three significant digits, or microseconds where these read better."""
    return f"{ms * 1e3:.1f} us" if ms < 1 else f"{ms:.3g} ms" if ms < 1000 else f"{ms / 1e3:.3g} s"


def seconds(count: float) -> str:
    """A duration in seconds, minutes or hours."""
    if count < 100:
        return f"{count:.0f} s"
    return f"{count / 60:.0f} min" if count < 5400 else f"{count / 3600:.1f} h"


def progress_text(progress: Progress) -> str:
    """Where a search stands: the best so far against the default, trials without a time by kind, and the time left."""
    parts: list[str] = []
    if progress.best_ms is not None:
        parts.append(f"best {milliseconds(progress.best_ms)}")
        if progress.default_ms is not None:
            parts[0] += f", {progress.default_ms / progress.best_ms:.2f}x over the default"
    parts += [f"{count} {kind}" for kind, count in progress.outcomes.items() if kind != "timed"]
    if math.isfinite(progress.seconds_left):
        parts.append(f"at most {seconds(max(0.0, progress.seconds_left))} left")
    return "; ".join(parts)
