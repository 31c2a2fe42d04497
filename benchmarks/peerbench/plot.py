"""Plot of the results: every contender's time divided by the floor."""

# pyright: basic
from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .results import OURS, Results, median_ms

MARKERS = "ovsPX*D^<>pHd"
TICKS = (1, 1.5, 2, 3, 5, 10, 20, 50)


def plot(results: Results, path: Path) -> None:
    """Draw one panel for each page size into the PNG `path`. Raises `ImportError` without matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    pages = sorted({cell.page_size for cell in results.cells.values()})
    names = sorted({entry.name for cell in results.cells.values() for entry in cell.entries if median_ms(entry)})
    height = 1.5 + 0.42 * max((sum(c.page_size == page for c in results.cells.values()) for page in pages), default=1)
    figure, axes = plt.subplots(1, max(1, len(pages)), figsize=(7 * max(1, len(pages)), height), squeeze=False)
    for axis, page in zip(axes[0], pages, strict=False):
        cells = [cell for cell in results.cells.values() if cell.page_size == page]
        for index, name in enumerate(names):
            # The last run counts, as in the tables.
            last = [{entry.name: median_ms(entry) for entry in cell.entries if median_ms(entry)} for cell in cells]
            places = [(times[name] / cells[row].floor_ms, row) for row, times in enumerate(last) if name in times]
            if places:
                own = name.startswith(OURS)
                axis.scatter(
                    *zip(*places, strict=True), label=name, marker=MARKERS[index % len(MARKERS)],
                    color=mpl.colormaps["tab20"](index % 20), s=70 if own else 34, zorder=3 if own else 2,
                    alpha=1.0 if own else 0.7, edgecolors="black" if own else "none",
                )  # fmt: skip
        axis.axvline(1.0, color="gray", linewidth=1)
        axis.set_xscale("log")
        low, high = axis.get_xlim()
        ticks = [tick for tick in TICKS if low < tick < high]
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        axis.set_yticks(range(len(cells)), [cell.workload for cell in cells])
        axis.invert_yaxis()
        axis.set_xlabel("time / floor")
        axis.set_title(f"pages of {page}")
        axis.grid(axis="x", linewidth=0.3)
    handles, labels = _legend(axes[0])
    figure.legend(handles, labels, loc="lower center", ncols=5, fontsize="small")
    figure.tight_layout(rect=(0, 0.14, 1, 1))
    figure.savefig(path, dpi=140, format="png")
    plt.close(figure)


def _legend(axes: Iterable[Any]) -> tuple[list[Any], list[str]]:
    found: dict[str, Any] = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    return list(found.values()), list(found)
