from __future__ import annotations

from pathlib import Path

import pytest

from attention_tuner.db.lookup.text_files import read_text, replace_file
from attention_tuner.kernel_templates.errors import StoreError


def test_a_file_is_replaced_as_a_whole(tmp_path: Path):
    for text in ("one", "two\n"):
        replace_file(tmp_path / "a", text)
        assert read_text(tmp_path / "a") == text
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_cannot_be_written_is_told_and_left(tmp_path: Path):
    with pytest.raises(StoreError, match="no regular file"):
        replace_file(tmp_path, "text")
    with pytest.raises(StoreError, match="cannot be written: No such file"):
        replace_file(tmp_path / "no" / "a", "text")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_read_is_told_with_what_was_expected(tmp_path: Path):
    with pytest.raises(StoreError, match=r"cannot be read: No such file.*; expected a poem"):
        read_text(tmp_path / "a", "expected a poem")
    (tmp_path / "a").write_bytes(b"\xff")
    with pytest.raises(StoreError, match="no text in UTF-8"):
        read_text(tmp_path / "a")
    with pytest.raises(StoreError, match="cannot be read"):
        read_text("~nobody-of-this-name/a")
