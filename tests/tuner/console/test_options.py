from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import typer

from attention_tuner.tuner.console import options


@pytest.mark.parametrize(("text", "number"), [("1", 1), ("30", 30), (str(2**32 - 1), 2**32 - 1)])
def test_whole_numbers(text: str, number: int) -> None:
    assert options.whole_number(text) == number


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (options.whole_number, "0"),
        (options.whole_number, "-3"),
        (options.whole_number, "1.5"),
        (options.whole_number, "many"),
        (options.whole_number, "9" * 5000),
        (options.seed_number, "-1"),
        (options.seed_number, str(2**32)),
        (options.positive_seconds, "0"),
        (options.positive_seconds, "-1"),
        (options.positive_seconds, "nan"),
        (options.positive_seconds, "inf"),
        (options.positive_seconds, "soon"),
    ],
)
def test_other_numbers_are_refused_with_what_is_accepted(parse: Callable[[str], object], text: str) -> None:
    with pytest.raises(typer.BadParameter, match="cannot be used; accepted is"):
        parse(text)


def test_seeds_and_seconds() -> None:
    assert options.seed_number("0") == 0
    assert options.positive_seconds("0.5") == 0.5


def test_a_folder_is_no_database(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="is a folder; accepted is the path of a database"):
        options.database(str(tmp_path))
    for name in (str(tmp_path / "new.db"), "postgresql+psycopg://user@host/name"):
        assert options.database(name) == name


def test_every_option_has_a_help_that_is_a_sentence() -> None:
    shared = [value for name, value in vars(options).items() if name[0].isupper() and len(get_args(value)) == 2]
    assert len(shared) >= 12
    for option in shared:
        text = get_args(option)[1].help
        assert text[0].isupper(), text
        assert text.endswith("."), text
