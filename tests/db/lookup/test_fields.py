from __future__ import annotations

import math
from pathlib import Path

import pytest

from attention_tuner.db.lookup.fields import MOST, Field, read_text, replace_file
from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.errors import StoreError


def test_values_know_their_places():
    document = Field({"a": [{"b": 1}, {"b": 2.5}], "c": "x"}, "")
    first, second = document.members(("a",), ("c", "d"))["a"].items()
    assert (first.place, second.members(("b",))["b"].place) == ("a[0]", "a[1].b")
    assert first.members(("b",))["b"].whole(least=1) == 1
    assert second.mapping()["b"].number() == 2.5
    assert document.mapping()["c"].text() == "x"


def test_values_at_the_limits_are_read():
    assert Field(MOST, "x").whole() == MOST
    assert type(Field(3, "x").number()) is float
    assert Field(None, "x").optional(Field.whole) is None
    assert Field(3, "x").optional(Field.whole) == 3
    assert Field("\U0001f600", "x").text() == "\U0001f600"
    assert Field("2026-11-29T12:00:00Z", "x").moment() == "2026-11-29T12:00:00Z"
    assert Field("1x2@3", "x").made(lambda: Batch.parse("1x2@3")).num_tokens == 2


@pytest.mark.parametrize(("value", "read", "message"), [
    ([], Field.mapping, r"'x' is \[\]; expected an object"),
    ({}, Field.items, "'x' is {}; expected a list"),
    (1, Field.text, "'x' is 1; expected a text"),
    ("\udfff", Field.text, "without null characters and lone surrogates"),
    (1, Field.flag, "'x' is 1; expected true or false"),
    (True, Field.whole, "'x' is True; expected a whole number from 0 to 9223372036854775807"),
    (MOST + 1, Field.whole, "is 9223372036854775808; expected"),
    (True, Field.number, "'x' is True; expected a number"),
    (-math.inf, Field.number, "'x' is -inf; expected a number"),
    (math.nan, Field.number, "'x' is nan; expected a number"),
    ("1", Field.number, "'x' is '1'; expected a number"),
    ("2026-11-29T12:00:00+01:00", Field.moment, "expected a time in UTC"),
    ("2026-13-29", Field.moment, "expected a time in UTC"),
    ({"a": 1}, lambda field: field.members(("b",)), "'x.b' is missing"),
    ({"a": 1}, lambda field: field.members((), ("b", "c")), "'x.a' is unknown; expected one of b, c"),
    ("y" * 999, lambda field: field.made(lambda: Batch.parse("1x")), "'x' cannot be used: cannot read '1x'"),
    ("y" * 999, Field.items, r"'x' is 'y+\.\.\.y+'; expected a list"),
])
def test_other_values_are_refused(value: object, read: object, message: str):
    with pytest.raises(StoreError, match=message):
        read(Field(value, "x"))  # pyright: ignore


def test_a_file_is_replaced_as_a_whole(tmp_path: Path):
    for text in ("one", "two\n"):
        replace_file(tmp_path / "a", text)
        assert read_text(tmp_path / "a") == text
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_file_that_cannot_be_written_is_reported_and_unchanged(tmp_path: Path):
    with pytest.raises(StoreError, match="no regular file"):
        replace_file(tmp_path, "text")
    with pytest.raises(StoreError, match="cannot be written: No such file"):
        replace_file(tmp_path / "no" / "a", "text")
    assert list(tmp_path.iterdir()) == []


def test_an_unreadable_file_is_reported_with_what_was_expected(tmp_path: Path):
    with pytest.raises(StoreError, match=r"cannot be read: No such file.*; expected a poem"):
        read_text(tmp_path / "a", "expected a poem")
    (tmp_path / "a").write_bytes(b"\xff")
    with pytest.raises(StoreError, match="no text in UTF-8"):
        read_text(tmp_path / "a")
    with pytest.raises(StoreError, match="cannot be read"):
        read_text("~nobody-of-this-name/a")
