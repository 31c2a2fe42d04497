from __future__ import annotations

import contextlib
import json
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import GPU, Bench

from attention_tuner.kernel_templates.errors import StoreError
from attention_tuner.tuner.measure.card import CardState
from attention_tuner.tuner.run import Settings
from attention_tuner.tuner.running import running


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_run_ends_by_its_seconds_less_those_that_pass_aside(bench: Bench) -> None:
    executor = replace(bench.executor, aside_s=3.0)
    with running(GPU, bench.store, Settings(seconds=10), executor) as run:
        assert run.seconds_left == pytest.approx(7.0)
        assert run.builds is not None
    with running(GPU, bench.store, Settings(), replace(bench.executor, pool=None)) as run:
        assert run.seconds_left == float("inf")
        assert run.builds is None
    assert not bench.worker.closed


def test_the_card_is_stored_as_it_was_before_and_after(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    states = iter([CardState(power_w=70), CardState(power_w=690)])
    monkeypatch.setattr("attention_tuner.tuner.running.card_state", lambda uuid: next(states))
    with running(GPU, bench.store, Settings(trials=7), replace(bench.executor, uuid="GPU-1")) as run:
        assert run.run_id == 1
    with contextlib.closing(sqlite3.connect(bench.store.name)) as connection:
        ((text,),) = connection.execute("select settings from runs").fetchall()
    settings = json.loads(text)
    assert (settings["trials"], settings["processes"]) == (7, 4)
    assert [settings["card"][when]["power_w"] for when in ("start", "end")] == [70, 690]


def test_what_fails_closes_the_processes_and_a_note_that_is_not_kept_does_not(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(bench.store, "finish_run", refuse)
    with pytest.warns(UserWarning, match="the disk is full"), running(GPU, bench.store, Settings(), bench.executor):
        pass
    assert not bench.worker.closed
    with pytest.raises(KeyboardInterrupt), running(GPU, bench.store, Settings(), bench.executor):
        raise KeyboardInterrupt
    assert bench.worker.closed
    assert bench.pool.closed
