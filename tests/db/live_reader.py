"""What a process does that looks up while another writes, by a name that a new process can import."""

from __future__ import annotations

import os

from attention_tuner.db import LiveTable
from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.outcome import BestConfig

HYBRID = Batch.parse("1x512@16384,63x1@32768")


def ask(path: str, config: BestConfig, ready: object, stop: object, results: object) -> None:
    """One of several readers: looks up and refreshes until it is stopped, and says what it saw."""
    live = LiveTable(path, config.gpu)
    lookups = refreshes = 0
    seen: list[float] = []
    wrong: list[str] = []
    ready.release()  # pyright: ignore
    while not stop.is_set():  # pyright: ignore
        answer = live.lookup(config.shape.spec, HYBRID, 16, config.gpu)
        lookups += 1
        known = answer.config
        if known is None or answer.source != "exact":
            wrong.append(answer.source)
        # Half a result would be times of one write with the variant of another.
        elif known.timing.median_ms != known.default_timing.median_ms / 2 or known.variant.number("waves") != (
                4 if round(known.timing.median_ms) % 2 else 8):
            wrong.append(repr(known))
        elif not seen or seen[-1] != known.timing.median_ms:
            seen.append(known.timing.median_ms)
        refreshes += live.refresh()
    results.put((os.getpid(), lookups, refreshes, seen, wrong))  # pyright: ignore
