"""Tables of the results: this project against the best peer, and every contender's time."""

from __future__ import annotations

import statistics
import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .race import Entry
from .results import OURS, Results, median_ms

# Width if the output is no terminal: enough for a column per contender.
WIDTH = 240


def show(results: Results) -> None:
    """Print the tables and the notes."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for page in sorted({cell.page_size for cell in results.cells.values()}):
        console.print(standing_table(results, page), times_table(results, page))
    for line in notes(results):
        console.print(Text(line), soft_wrap=True)


def standing_table(results: Results, page: int) -> Table:
    """This project and the best peer by batch, and the geometric means by kind."""
    columns = ("floor", "ours", "of floor", "plain Triton", "best peer", "ms", "peer / ours", "vLLM Triton / ours",
               "vLLM Triton / plain")  # fmt: skip
    table = Table("batch", *(_right(name) for name in columns), title=f"pages of {page}: ms a launch")
    for cell in results.cells.values():
        if cell.page_size != page:
            continue
        s = cell.standing()
        share = s["share_of_floor"]
        table.add_row(
            cell.workload, _ms(cell.floor_ms), _ms(s["ours_ms"]), f"{share:.0%}" if share else "-", _ms(s["plain_ms"]),
            s["best_peer"] or "-", _ms(s["best_peer_ms"]), _ratio(s["best_peer_over_ours"]),
            _ratio(s["vllm_triton_over_ours"]), _ratio(s["vllm_triton_over_plain"]),
        )  # fmt: skip
    table.add_section()
    for row in results.summary():
        if row["page_size"] == page and row["best_peer_over_ours"]["cells"]:
            names = ("best_peer_over_ours", "vllm_triton_over_ours", "vllm_triton_over_plain")
            cells = (f"{_ratio(row[name]['geometric_mean'])} (least {_ratio(row[name]['least'])})" for name in names)
            table.add_row(f"{row['kind']}: geometric mean", *[""] * 6, *cells)
    return table


def times_table(results: Results, page: int) -> Table:
    """Every contender's median, or its final state."""
    cells = [cell for cell in results.cells.values() if cell.page_size == page]
    names = list(dict.fromkeys(entry.name for cell in cells for entry in cell.entries))
    names.sort(key=lambda name: not name.startswith(OURS))
    absent = [name for name, facts in results.document["peers"].items() if facts["missing"] and name not in names]
    table = Table("batch", *(_right(name) for name in (*names, *absent)))
    for cell in cells:
        # The last entry of a name is from its last run.
        last = {entry.name: entry for entry in cell.entries}
        table.add_row(cell.workload, *(_state(last.get(name)) for name in names), *["missing"] * len(absent))
    return table


def notes(results: Results) -> list[str]:
    """The reasons that peers are missing or contenders were not timed, each once."""
    lines = [f"missing: {name}: {facts['missing']}" for name, facts in results.document["peers"].items()
             if facts["missing"]]  # fmt: skip
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for key, cell in results.cells.items():
        for entry in cell.entries:
            if entry.state not in ("timed", "slow"):
                reasons.setdefault((entry.name, entry.state, entry.reason), []).append(key)
    for (name, state, reason), keys in reasons.items():
        more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
        lines.append(f"{state}: {name} on {keys[0]}{more}: {reason}")
    eager = sorted({entry.name for cell in results.cells.values() for entry in cell.entries
                    if (entry.regime or "graph").startswith("eager")})  # fmt: skip
    pages = results.pages()
    if pages:
        worst = max(pages, key=lambda name: abs(pages[name] - 1))
        lines.append(f"ours at the smallest pages over ours at the largest: geometric mean "
                     f"{statistics.geometric_mean(pages.values()):.3f}, farthest from 1 {pages[worst]:.3f} ({worst})")
    if eager:
        lines.append(f"timed in eager launches, because they could not be captured: {', '.join(eager)}")
    return lines


def _state(entry: Entry | None) -> str:
    if entry is None:
        return "-"
    ms = median_ms(entry)
    if ms:
        return _ms(ms) + " e" * (entry.regime or "").startswith("eager")
    return f"~{_ms(entry.first_ms)}" if entry.state == "slow" else entry.state


def _right(name: str) -> Any:
    from rich.table import Column

    return Column(name, justify="right")


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if value < 1 else f"{value:.3f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
