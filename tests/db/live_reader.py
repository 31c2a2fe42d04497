"""A process that looks up while another writes, in a module that a new process can import."""

from __future__ import annotations

from attention_tuner.db import LiveTable
from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.outcome import BestConfig

HYBRID = Batch.parse("1x512@16384,63x1@32768")


def ask(path: str, config: BestConfig, refreshed: object, stop: object, results: object) -> None:
    """Look up and refresh until `stop` is set, then report the number of lookups, the times seen and wrong answers.

    `refreshed` is released once the table is loaded and after each newer snapshot.
    """
    live = LiveTable(path, config.gpu)
    lookups = 0
    seen: list[float] = []
    wrong: list[str] = []
    refreshed.release()  # pyright: ignore
    while not stop.is_set():  # pyright: ignore
        answer = live.lookup(config.shape.spec, HYBRID, 16, config.gpu)
        lookups += 1
        known = answer.config
        if known is None or answer.source != "exact":
            wrong.append(answer.source)
        # Half a result would have the times of one write and the variant of another.
        elif known.timing.median_ms != known.default_timing.median_ms / 2 or known.variant.number("waves") != (
                4 if round(known.timing.median_ms) % 2 else 8):
            wrong.append(repr(known))
        elif not seen or seen[-1] != known.timing.median_ms:
            seen.append(known.timing.median_ms)
        if live.refresh():
            refreshed.release()  # pyright: ignore
    results.put((lookups, seen, wrong))  # pyright: ignore
