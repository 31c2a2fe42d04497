from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from cli_samples import H100, Lines

from attention_tuner.kernel_templates.errors import StoreError
from attention_tuner.kernel_templates.launch import device
from attention_tuner.tuner.console.machine import Machine, Place, examine
from attention_tuner.tuner.measure.rates import Rates, RatesJob
from attention_tuner.tuner.processes.worker import Worker


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(device, "present_gpu", lambda: None)
    return examine(str(tmp_path / "deep" / "tuner.db"), tmp_path / "cache")


def test_examining_makes_nothing(machine: Machine, tmp_path: Path) -> None:
    assert list(tmp_path.iterdir()) == []
    assert machine.database == Place(str(tmp_path / "deep" / "tuner.db"), exists=False, writable=True)
    assert machine.cores == len(os.sched_getaffinity(0))


def test_a_place_knows_what_can_be_done_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert str(Place.of_path(file)) == f"{file} (can be written)"
    assert str(Place.of_path(tmp_path / "a" / "b")) == f"{tmp_path / 'a' / 'b'} (not there yet, can be written)"
    assert not Place.of_path(file / "below").writable
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert str(Place.of_path(file)) == f"{file} (cannot be written)"


def test_a_folder_is_no_place_for_a_database(tmp_path: Path) -> None:
    assert examine(str(tmp_path), tmp_path).database == Place(str(tmp_path), exists=True, writable=False)


def test_a_database_elsewhere_is_not_judged(machine: Machine) -> None:
    url = "postgresql+psycopg://user@host/name"
    assert examine(url, Path(machine.cache.name)).database is None
    with pytest.raises(StoreError, match="URL"):
        examine("postgresql:/x://", Path(machine.cache.name))


def test_a_password_is_not_told(machine: Machine) -> None:
    told = examine("postgresql+psycopg://user:secret@host/name", Path(machine.cache.name))
    assert "secret" not in str(told)
    assert told.database_name == "postgresql+psycopg://user:***@host/name"


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Lines:
    monkeypatch.setattr(device, "present_gpu", lambda: None)
    return Lines(capsys)


def test_doctor_says_what_will_happen_and_makes_nothing(lines: Lines, tmp_path: Path) -> None:
    assert lines.run("doctor", "--db", str(tmp_path / "tuner.db")) == 0
    assert "none that torch can use" in lines.out
    assert "regime interpreter" in lines.out
    assert f"{tmp_path / 'tuner.db'} (not there yet, can be written)" in lines.out
    assert list(tmp_path.iterdir()) == []


def test_without_a_gpu_nothing_is_measured_and_it_says_so(lines: Lines, tmp_path: Path) -> None:
    assert lines.run("doctor", "--measure", "--db", str(tmp_path / "tuner.db"), "--json") == 0
    assert json.loads(lines.out)["rates"] is None
    assert "nothing is measured" in lines.err


def test_a_gpu_is_measured_when_asked(lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[object] = []

    def run(worker: Worker, job: object, timeout_s: float) -> Rates:
        assert not worker.interpret
        jobs.append(job)
        return Rates(4.25, 694.0)

    monkeypatch.setattr(device, "present_gpu", lambda: H100)
    monkeypatch.setattr(Worker, "run", run)
    assert lines.run("doctor", "--db", str(tmp_path / "tuner.db")) == 0
    assert jobs == []
    assert lines.run("doctor", "--measure", "--db", str(tmp_path / "tuner.db")) == 0
    assert jobs == [RatesJob()]
    assert "reads 4.25 TB/s, bf16 matmul 694 TFLOP/s" in lines.out
