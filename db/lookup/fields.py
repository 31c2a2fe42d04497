"""Checked reading of untrusted JSON documents, and atomic writing of files."""

from __future__ import annotations

import contextlib
import json
import os
import re
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import NoReturn, TypeVar, cast

from ...kernel_templates.errors import StoreError, TunerError

T = TypeVar("T")

MOST = 2**63 - 1
"""The largest whole number that a database holds."""

# A database refuses texts that contain these.
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Field:
    """One value of a JSON document, checked when it is read.

    Every method raises `StoreError` for an unusable value; the message names the place, the value and what is expected.
    """

    value: object
    # Path from the root of the document, such as `groups[0].configs[2].time.plan_ms`.
    place: str

    def members(self, required: Iterable[str], optional: Iterable[str] = ()) -> dict[str, Field]:
        """The members of an object that has all `required` names and no others except `optional` ones."""
        found = self.mapping()
        required = list(required)
        for name in required:
            if name not in found:
                raise StoreError(f"{self.within(name)!r} is missing")
        known = dict.fromkeys((*required, *optional))
        for name in found:
            if name not in known:
                raise StoreError(f"{self.within(name)!r} is unknown; expected one of {', '.join(known)}")
        return found

    def mapping(self) -> dict[str, Field]:
        """The members of an object with any names."""
        value = self.value
        if not isinstance(value, dict):
            self.refuse("an object")
        return {name: Field(each, self.within(name)) for name, each in cast(dict[str, object], value).items()}

    def items(self) -> list[Field]:
        """The items of a list."""
        value = self.value
        if not isinstance(value, list):
            self.refuse("a list")
        return [Field(each, f"{self.place}[{i}]") for i, each in enumerate(cast(list[object], value))]

    def text(self) -> str:
        """A text that a database can hold."""
        if not isinstance(self.value, str):
            self.refuse("a text")
        if _UNSTORABLE.search(self.value):
            self.refuse("a text without null characters and lone surrogates")
        return self.value

    def flag(self) -> bool:
        """True or false."""
        if not isinstance(self.value, bool):
            self.refuse("true or false")
        return self.value

    def whole(self, least: int = 0) -> int:
        """A whole number from `least` to `MOST`; 1.0 and true are refused."""
        if type(self.value) is not int or not least <= self.value <= MOST:
            self.refuse(f"a whole number from {least} to {MOST}")
        return self.value

    def number(self, least: float = 0, most: float = MOST) -> float:
        """A number from `least` to `most`; NaN and true are refused."""
        value = self.value
        # Compared before the conversion, because a whole number may be too large for a float.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
            self.refuse(f"a number from {least:g} to {most:g}")
        return float(value)

    def numbers(self, least: float = 0, most: float = MOST) -> list[float]:
        """The items of a list of numbers, each read like `number`."""
        values = self.value
        # Fast path: an export is mostly samples, and a `Field` for each would take most of the import's time.
        if isinstance(values, list):
            floats = cast(list[float], values)
            if all(type(value) is float and least <= value <= most for value in floats):
                return floats
        return [item.number(least, most) for item in self.items()]

    def optional(self, read: Callable[[Field], T]) -> T | None:
        """The value as `read` returns it; None for null."""
        return None if self.value is None else read(self)

    def moment(self) -> str:
        """A time in UTC, as ISO 8601 text."""
        try:
            moment = datetime.fromisoformat(self.text())
        except ValueError:
            moment = None
        if moment is None or moment.utcoffset() != timedelta(0):
            self.refuse("a time in UTC, such as 2026-11-29T12:00:00+00:00")
        return self.text()

    def made(self, make: Callable[[], T]) -> T:
        """The record that `make` returns; its `TunerError` becomes a `StoreError` that names this place."""
        try:
            return make()
        except TunerError as error:
            raise StoreError(f"{self.place!r} cannot be used: {error}") from error

    def within(self, name: str) -> str:
        """The place of the member called `name`."""
        return f"{self.place}.{name}" if self.place else name

    def refuse(self, expected: str) -> NoReturn:
        """Raise the `StoreError` for a value that is not the `expected` one."""
        raise StoreError(f"{self.place!r} is {reprlib.repr(self.value)}; expected {expected}")


def read_document(path: str | os.PathLike[str], expected: str) -> Field:
    """The JSON document in the file `path`. Raises `StoreError`; its message ends with `expected`."""
    try:
        document: object = json.loads(read_text(path, expected))
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{str(path)!r} is no complete JSON file: {error}; {expected}") from error
    return Field(document, "")


def read_text(path: str | os.PathLike[str], expected: str = "") -> str:
    """The text of a UTF-8 file. Raises `StoreError`; its message ends with `expected`."""
    ending = f"; {expected}" if expected else ""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise StoreError(f"{str(path)!r} cannot be read: {error.strerror}{ending}") from error
    except UnicodeDecodeError as error:
        raise StoreError(f"{str(path)!r} is no text in UTF-8{ending}") from error
    except (ValueError, RuntimeError) as error:
        raise StoreError(f"{str(path)!r} cannot be read: {error}{ending}") from error


def replace_file(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to the file `path` atomically. If this fails, the file is unchanged and `StoreError` is raised."""
    path = Path(path).expanduser().resolve()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if path.exists() and not path.is_file():
            raise StoreError(f"{str(path)!r} is no regular file; expected the path of a file to write")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise StoreError(f"{str(path)!r} cannot be written: {error.strerror}; expected the path of a file in a folder "
                         "that exists and can be written") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
