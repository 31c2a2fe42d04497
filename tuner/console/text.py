"""Short texts for batches, variants, times and counts."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...kernel_templates.batch import Batch
from ...kernel_templates.gpu import Gpu
from ...kernel_templates.heuristic import default_variant
from ...kernel_templates.registry import why_invalid
from ...kernel_templates.variant import Variant

if TYPE_CHECKING:
    from ..settings import Progress, Reason, TaskResult

# A batch whose text is longer than this is shortened.
BATCH_WIDTH = 44
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


def batch_text(batch: Batch | str) -> str:
    """Return `batch` in a few words: contexts of many sequences of one query length are cut to their range."""
    text = str(batch)
    if len(text) <= BATCH_WIDTH:
        return text
    groups: dict[int, list[int]] = {}
    for query_len, context_len in (Batch.parse(batch) if isinstance(batch, str) else batch).sequences:
        groups.setdefault(query_len, []).append(context_len)
    return ",".join(
        f"{len(contexts)}x{query_len}@{min(contexts)}" + (f"..{max(contexts)}" if len(set(contexts)) > 1 else "")
        for query_len, contexts in groups.items()
    )


def variant_text(variant: Variant) -> str:
    """Return the template and values in words that a narrow column can break, without the page size."""
    return " ".join([variant.template, *(f"{name}={value}" for name, value in variant.values)])


def milliseconds(ms: float) -> str:
    """Return a time with three significant digits, in microseconds below a millisecond."""
    return f"{ms * 1e3:.1f} us" if ms < 1 else f"{ms:.3g} ms" if ms < 1000 else f"{ms / 1e3:.3g} s"


def seconds(count: float) -> str:
    """Return a duration in seconds, minutes or hours."""
    if count < 100:
        return f"{count:.0f} s"
    return f"{count / 60:.0f} min" if count < 5400 else f"{count / 3600:.1f} h"


def percent(share: float | None) -> str:
    """Return a share as a percentage, "unknown" for None."""
    return "unknown" if share is None else f"{share:.1%}"


def size_text(count: float) -> str:
    """Return a number of bytes with three significant digits and its unit."""
    unit = 0
    while count >= 1000 and unit < len(_BYTES) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.3g} {_BYTES[unit]}"


def counted(count: int, noun: str) -> str:
    """Return `count` and the noun, in the plural unless there is one."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def count_list(counts: Counter[str]) -> str:
    """Return the counts with their names, the largest first."""
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


def baseline_text(result: TaskResult, gpu: Gpu) -> str:
    """Return the name of the baseline of a speed-up: the default, or the variant that replaced it and why."""
    task, baseline = result.task, result.baseline
    default = default_variant(task.spec, task.batch, task.page_size)
    if baseline is None or baseline == default:
        return "the default"
    lack = "cannot run" if why_invalid(default, task.spec, gpu) else "was not right and timed"
    return f"{baseline.key()}, the default {lack}"


def progress_text(progress: Progress) -> str:
    """Return the best time so far, trials without a time by kind, and the time left."""
    parts: list[str] = []
    if progress.best_ms is not None:
        parts.append(f"best {milliseconds(progress.best_ms)}")
        if progress.default_ms is not None:
            parts[0] += f", {progress.default_ms / progress.best_ms:.2f}x over the default"
    parts += [f"{count} {kind}" for kind, count in progress.outcomes.items() if kind != "timed"]
    if math.isfinite(progress.seconds_left):
        parts.append(f"at most {seconds(max(0.0, progress.seconds_left))} left")
    return "; ".join(parts)


def total(results: Iterable[TaskResult], name: str) -> float:
    """Return the sum of a field over all results."""
    return sum(getattr(result, name) for result in results)


def grouped(reasons: Counter[Reason]) -> Counter[Reason]:
    """Return `reasons` where those that differ only in numbers are one, with N for the numbers."""
    groups: dict[Reason, Counter[Reason]] = {}
    for (outcome, stage, reason), count in reasons.items():
        groups.setdefault((outcome, stage, _NUMBER.sub("N", reason)), Counter())[outcome, stage, reason] += count
    return Counter({kind if len(group) > 1 else next(iter(group)): group.total() for kind, group in groups.items()})
