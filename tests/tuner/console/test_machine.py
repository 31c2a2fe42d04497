from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_samples import H100, Lines

from attention_tuner.tuner.console import doctor
from attention_tuner.tuner.measure.rates import Rates, RatesJob
from attention_tuner.tuner.processes.worker import Worker


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Lines:
    monkeypatch.setattr(doctor, "present_gpu", lambda: None)
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

    monkeypatch.setattr(doctor, "present_gpu", lambda: H100)
    monkeypatch.setattr(Worker, "run", run)
    assert lines.run("doctor", "--db", str(tmp_path / "tuner.db")) == 0
    assert jobs == []
    assert lines.run("doctor", "--measure", "--db", str(tmp_path / "tuner.db")) == 0
    assert jobs == [RatesJob()]
    assert "reads 4.25 TB/s, bf16 matmul 694 TFLOP/s" in lines.out
