"""What `report pages` shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...kernel_templates.spec import AttentionSpec
from ..pages import Comparison, PageSize, token_bytes
from .output import print_json, print_table, say
from .portfolio_report import percent
from .text import counted, milliseconds, short

COLUMNS = ("page", "mean of the batches", "sum", "slower by", "memory lost", "of the cache")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def print_comparisons(
    comparisons: Sequence[Comparison], layers: Mapping[AttentionSpec, int], within: float, *, as_json: bool
) -> None:
    """Write for each GPU and regime what every page size costs, and the one that is recommended with the rule."""
    if as_json:
        print_json({
            "layers": {spec.key(): count for spec, count in layers.items()},
            "token_bytes": token_bytes(layers),
            "within": within / 100,
            "comparisons": [_document(each, within) for each in comparisons],
        })
        return
    names = " and ".join(f"{counted(count, 'layer')} of {spec.key()}" for spec, count in layers.items())
    for each in comparisons:
        say(f"{each.gpu.name}, regime {each.regime}: {names}, {size(token_bytes(layers))} a token")
        print_table(f"page sizes over {counted(len(each.batches), 'batch')}".replace("batchs", "batches"), COLUMNS,
                    [_cells(each, one) for one in each.sizes])
        for batch, missing in each.left_out.items():
            say(f"{short(batch)} is left out: not tuned with pages of {' and '.join(map(str, missing))}")
        if each.is_mixed:
            say("not all of this was measured with the same Triton, torch and driver; verify --retune makes it so")
        say(f"recommended are pages of {each.recommended(within).page_size}: of those at most {within:g} % slower than "
            "the fastest in the geometric mean, they lose the least memory")


def size(count: float) -> str:
    """A number of bytes with three significant digits and its unit."""
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.3g} {_UNITS[unit]}"


def _cells(comparison: Comparison, one: PageSize) -> tuple[str, ...]:
    return (str(one.page_size), milliseconds(one.mean_ms), milliseconds(one.sum_ms),
            percent(comparison.slowdown(one)), size(one.lost_bytes), f"{one.lost_share:.2%}")


def _document(comparison: Comparison, within: float) -> dict[str, Any]:
    return {
        "gpu": comparison.gpu.name,
        "regime": str(comparison.regime),
        "batches": list(map(str, comparison.batches)),
        "left_out": {str(batch): list(missing) for batch, missing in comparison.left_out.items()},
        "pages": [{
            "page_size": one.page_size,
            "times_ms": list(one.times_ms),
            "geometric_mean_ms": one.mean_ms,
            "sum_ms": one.sum_ms,
            "slowdown": comparison.slowdown(one),
            "held_bytes": one.held_bytes,
            "lost_bytes": one.lost_bytes,
            "lost_share": one.lost_share,
        } for one in comparison.sizes],
        "mixed_versions": comparison.is_mixed,
        "recommended": comparison.recommended(within).page_size,
    }
