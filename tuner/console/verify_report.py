"""What `verify` shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ...kernel_templates.gpu import Gpu
from ..verify import CHANGED, Verified
from .output import print_json, print_table, say
from .text import counted, milliseconds, short, values

COLUMNS = ("batch", "page", "result", "before", "now", "fastest now", "tuned anew")


def print_verified(database: str, gpu: Gpu, found: Sequence[Verified], fresh: int, *, as_json: bool) -> None:
    """Write what came of each winner that was raced; `fresh` are those that needed no race."""
    states = Counter(each.state for each in found)
    retuned = sum(each.retuned is not None for each in found)
    if as_json:
        print_json({
            "database": database, "gpu": gpu.name, "fresh": fresh, "states": dict(states), "retuned": retuned,
            "verified": list(map(_document, found)),
        })
        return
    groups: dict[str, list[Verified]] = {}
    for each in found:
        groups.setdefault(f"{gpu.name}, {each.config.shape.spec.key()}", []).append(each)
    for title, members in groups.items():
        print_table(title, COLUMNS, map(_cells, members))
    if fresh:
        say(f"{counted(fresh, 'best config')} of {database} measured with what is here now, and not raced")
    if found:
        told = ", ".join(f"{count} {state}" for state, count in states.most_common())
        say(f"{counted(len(found), 'best config')} raced with the runners-up and neighbours: {told}; {retuned} tuned "
            f"anew. Held are those that nothing beats beyond noise and whose time is within {CHANGED:.0%} of before")


def _cells(each: Verified) -> tuple[str, ...]:
    before_ms = each.config.timing.median_ms
    return (
        short(each.task.batch),
        str(each.task.page_size),
        each.state,
        milliseconds(before_ms),
        "" if each.timing is None or each.ratio is None else
        f"{milliseconds(each.timing.median_ms)} ({each.ratio - 1:+.1%})",
        "" if each.fastest is None or each.fastest_ms is None else
        "itself" if each.fastest == each.config.variant else f"{milliseconds(each.fastest_ms)} {values(each.fastest)}",
        "" if each.retuned is None else
        f"{milliseconds(each.retuned.timing.median_ms)} {values(each.retuned.variant)}",
    )


def _document(each: Verified) -> dict[str, Any]:
    return {
        "spec": each.task.spec.key(),
        "batch": each.config.batch,
        "page_size": each.task.page_size,
        "variant": each.config.variant.key(),
        "state": each.state,
        "before_ms": each.config.timing.median_ms,
        "now_ms": each.timing and each.timing.median_ms,
        "ratio": each.ratio,
        "fastest": each.fastest and each.fastest.key(),
        "fastest_ms": each.fastest_ms,
        "retuned": each.retuned and each.retuned.variant.key(),
        "retuned_ms": each.retuned and each.retuned.timing.median_ms,
    }
