"""The results file: measurements by cell, and their summary."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .race import Entry

OURS = "ours:"
VLLM_TRITON = "vllm_triton"
KINDS = ("hybrid", "decode", "verify", "prefill")


@dataclass(slots=True)
class Cell:
    """One workload at one page size."""

    workload: str
    kind: str
    page_size: int
    spec: str
    batch: str
    # Lower bound on the time, from the rates in the file.
    floor_ms: float
    read_bytes: int
    flops: float
    entries: list[Entry] = field(default_factory=list[Entry])

    def missing(self, names: Iterable[str]) -> list[str]:
        """The `names` without an entry; `OURS` means any of this project's contenders."""
        known = {OURS if entry.name.startswith(OURS) else entry.name for entry in self.entries}
        return [name for name in names if name not in known]

    def add(self, entries: Iterable[Entry]) -> None:
        """Add the entries of a run. A peer keeps its last entry; this project's contenders keep one per run."""
        new = list(entries)
        names = {entry.name for entry in new if not entry.name.startswith(OURS)}
        self.entries = [entry for entry in self.entries if entry.name not in names] + new

    def ours(self, run: int, plain: bool = False) -> Entry | None:
        """This project's fastest contender in a run, or its fastest in plain Triton."""
        own = [e for e in self.entries if e.name.startswith(OURS) and e.run == run and (e.is_plain or not plain)]
        return min((e for e in own if median_ms(e)), key=lambda e: median_ms(e) or math.inf, default=None)

    def peers(self) -> list[Entry]:
        """The entries of peers."""
        return [entry for entry in self.entries if not entry.name.startswith(OURS)]

    def ratio(self, peer: Entry, plain: bool = False) -> float | None:
        """A peer's time divided by this project's in the same run; above 1 the peer is slower."""
        own = self.ours(peer.run, plain)
        mine, theirs = own and median_ms(own), median_ms(peer)
        return theirs / mine if mine and theirs else None

    def best_peer(self) -> Entry | None:
        """The fastest peer relative to this project."""
        return min((e for e in self.peers() if self.ratio(e)), key=lambda e: self.ratio(e) or math.inf, default=None)

    def standing(self) -> dict[str, Any]:
        """The cell's figures, None if unknown. This project's times are of the best peer's run, else the last run."""
        best = self.best_peer()
        run = best.run if best else max((entry.run for entry in self.entries), default=0)
        own, plain = self.ours(run), self.ours(run, plain=True)
        triton = next((entry for entry in self.peers() if entry.name == VLLM_TRITON), None)
        ms = own and median_ms(own)
        return {
            "ours": own and own.name, "ours_ms": ms, "share_of_floor": self.floor_ms / ms if ms else None,
            "plain_ms": plain and median_ms(plain), "best_peer": best and best.name,
            "best_peer_ms": best and median_ms(best), "best_peer_over_ours": best and self.ratio(best),
            "vllm_triton_over_ours": triton and self.ratio(triton),
            "vllm_triton_over_plain": triton and self.ratio(triton, plain=True),
        }  # fmt: skip


def median_ms(entry: Entry) -> float | None:
    """The median of an entry's samples; None if it was not timed."""
    return statistics.median(entry.samples_ms) if entry.state == "timed" and entry.samples_ms else None


class Results:
    """The contents of a results file, which is written atomically.

    A second file names the running contender. If the process dies, the next process records this contender as failed.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.document: dict[str, Any] = {"unit": "ms a launch", "runs": [], "peers": {}, "rates": None}
        self.cells: dict[str, Cell] = {}
        self._marker = out.with_name(f".{out.name}.at")
        if out.exists():
            self._read(json.loads(out.read_text(encoding="utf-8")))
        self._record_death()

    @property
    def run(self) -> int:
        """The number of this run of the script."""
        return len(self.document["runs"])

    def begin(self, record: Mapping[str, Any]) -> None:
        """Begin a run; `record` holds its command, host, GPU and versions."""
        self.document["runs"].append(record)

    def cell(self, new: Cell) -> Cell:
        """The known cell of `new`'s workload and page size; `new` itself if there is none."""
        return self.cells.setdefault(f"{new.workload} page {new.page_size}", new)

    def at(self, cell: Cell, name: str) -> None:
        """Note the running contender; "" for none."""
        if not name:
            self._marker.unlink(missing_ok=True)
            return
        at = {"cell": f"{cell.workload} page {cell.page_size}", "name": name, "run": self.run}
        self._marker.write_text(json.dumps(at), encoding="utf-8")

    def write(self) -> None:
        """Write the file."""
        cells = {key: {**asdict(cell), "standing": cell.standing()} for key, cell in self.cells.items()}
        text = json.dumps({**self.document, "summary": self.summary(), "small_over_large_pages": self.pages(),
                           "cells": cells}, indent=1, allow_nan=False)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        partial = self.out.with_name(f".{self.out.name}.part")
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(self.out)

    def summary(self) -> list[dict[str, Any]]:
        """The geometric mean and minimum of the ratios, for each page size and kind of batch, and for all kinds."""
        pages = sorted({cell.page_size for cell in self.cells.values()})
        return [
            {"page_size": page, "kind": kind, **_summary([
                cell.standing() for cell in self.cells.values() if cell.page_size == page and kind in (cell.kind, "all")
            ])}
            for page in pages for kind in (*KINDS, "all")
        ]  # fmt: skip

    def pages(self) -> dict[str, float]:
        """This project's time at the smallest page size divided by that at the largest, by workload."""
        times: dict[str, dict[int, float]] = {}
        for cell in self.cells.values():
            ms = cell.standing()["ours_ms"]
            if ms:
                times.setdefault(cell.workload, {})[cell.page_size] = ms
        return {name: by_page[min(by_page)] / by_page[max(by_page)] for name, by_page in times.items()
                if len(by_page) > 1}  # fmt: skip

    def _read(self, document: dict[str, Any]) -> None:
        for key, value in document.pop("cells").items():
            value.pop("standing")
            entries = [_entry(each) for each in value.pop("entries")]
            self.cells[key] = Cell(**value, entries=entries)
        for name in ("summary", "small_over_large_pages"):
            document.pop(name)
        self.document |= document

    def _record_death(self) -> None:
        if not self._marker.exists():
            return
        at = json.loads(self._marker.read_text(encoding="utf-8"))
        if at["cell"] in self.cells:
            reason = "the process ended, or was ended, while it ran"
            self.cells[at["cell"]].add([Entry(at["name"], "failed", at["run"], reason)])
        self._marker.unlink()


def _entry(fields: dict[str, Any]) -> Entry:
    return Entry(**{**fields, "samples_ms": tuple(fields["samples_ms"])})  # pyright: ignore[reportArgumentType]


def _summary(standings: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("best_peer_over_ours", "vllm_triton_over_ours", "vllm_triton_over_plain"):
        ratios = [standing[name] for standing in standings if standing[name]]
        found[name] = {"cells": len(ratios), "geometric_mean": statistics.geometric_mean(ratios) if ratios else None,
                       "least": min(ratios, default=None)}  # fmt: skip
    return found
