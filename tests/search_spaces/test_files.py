"""Finding and reading the JSON files of presets and suites."""

from __future__ import annotations

from pathlib import Path

import pytest

from attention_tuner.kernel_templates.errors import ModelError
from attention_tuner.search_spaces.files import find, read_object, shipped


def test_a_name_comes_before_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "decode").write_text("{}")
    (tmp_path / "mine.json").write_text("{}")
    assert find("decode", "suites", "suite") == shipped("suites")["decode"]
    assert find("mine.json", "suites", "suite").resolve() == (tmp_path / "mine.json").resolve()


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"called 'decod' \(did you mean 'decode'\?\); known are decode, hopper13"):
        find("decod", "suites", "suite")
    with pytest.raises(ModelError, match=r"no suite and no file is called '/nowhere/x.json'; known are"):
        find("/nowhere/x.json", "suites", "suite")


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "null", '"text"', "[" * 100_000, b"\xff\xfe{}"])
def test_a_file_without_an_object_is_named(tmp_path: Path, text: str | bytes) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ModelError, match=r"bad\.json"):
        read_object(path)
