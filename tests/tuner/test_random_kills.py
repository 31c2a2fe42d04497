"""A few of the kills that `benchmarks/random_kills.py` makes many of."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
KILLS = 8


def test_random_kills_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    random_kills = importlib.import_module("random_kills")
    tally = random_kills.measure(KILLS, seed=0, processes=2)
    assert tally.violations == []
    assert tally.kills.total() == KILLS
    assert set(tally.kills) == {"tuner alone", "all processes"}
    assert tally.moments["after a line"] >= KILLS / 4
    assert tally.rounds >= 2
    assert tally.measured_again == 0
