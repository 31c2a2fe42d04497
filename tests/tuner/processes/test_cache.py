import os
from pathlib import Path

import pytest

from attention_tuner.tuner.processes.cache import prune, triton_cache


def entry(folder: Path, name: str, size: int, age: int) -> Path:
    path = folder / name
    path.mkdir()
    (path / "kernel.cubin").write_bytes(b"x" * size)
    os.utime(path, (1_000_000 - age, 1_000_000 - age))
    return path


def test_the_oldest_entries_go_until_half_is_left(tmp_path: Path) -> None:
    entries = [entry(tmp_path, name, 100, age) for name, age in (("new", 1), ("oldest", 9), ("old", 5), ("older", 7))]
    assert prune(tmp_path, limit_bytes=399) == 300
    assert [path.exists() for path in entries] == [True, False, False, False]


def test_a_cache_within_its_bound_is_left_alone(tmp_path: Path) -> None:
    path = entry(tmp_path, "one", 100, 1)
    assert prune(tmp_path, limit_bytes=100) == 0
    assert path.exists()


def test_a_cache_that_is_not_there_needs_no_pruning(tmp_path: Path) -> None:
    assert prune(tmp_path / "none") == 0


def test_files_that_are_no_entries_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "lock").write_bytes(b"x" * 100)
    assert prune(tmp_path, limit_bytes=1) == 0
    assert (tmp_path / "lock").exists()


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert triton_cache() == tmp_path / "attention-tuner" / "triton"
