"""Values of a JSON document that anyone may have written: each knows where it stands, and is checked as it is read."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NoReturn, TypeVar, cast

from ...kernel_templates.errors import StoreError, TunerError

T = TypeVar("T")

MOST = 2**63 - 1
"""The largest whole number that a database holds."""

# What no text of a database may have in it.
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Field:
    """One value and its place, such as `groups[0].configs[2].time.plan_ms`.

    Every method raises `StoreError`, naming the place, the value and what would be accepted.
    """

    value: object
    place: str

    def members(self, required: Iterable[str], optional: Iterable[str] = ()) -> dict[str, Field]:
        """The members of an object that has all the `required` ones and at most the `optional` ones beside."""
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
        """The members of an object, whatever their names."""
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
        """A whole number from `least` to `MOST`; neither 1.0 nor true is one."""
        if type(self.value) is not int or not least <= self.value <= MOST:
            self.refuse(f"a whole number from {least} to {MOST}")
        return self.value

    def number(self, least: float = 0, most: float = MOST) -> float:
        """A number from `least` to `most`; NaN and true are none."""
        value = self.value
        # A whole number may be beyond any float: it is compared first and converted then.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
            self.refuse(f"a number from {least:g} to {most:g}")
        return float(value)

    def numbers(self, least: float = 0, most: float = MOST) -> list[float]:
        """The items of a list of numbers, each as `number` reads it."""
        values = self.value
        # An export is mostly samples: a place is made up only for one that is refused.
        if isinstance(values, list):
            floats = cast(list[float], values)
            if all(type(value) is float and least <= value <= most for value in floats):
                return floats
        return [item.number(least, most) for item in self.items()]

    def optional(self, read: Callable[[Field], T]) -> T | None:
        """What `read` makes of the value, None for null."""
        return None if self.value is None else read(self)

    def moment(self) -> str:
        """A time in UTC, ISO 8601, as it is written."""
        try:
            moment = datetime.fromisoformat(self.text())
        except ValueError:
            moment = None
        if moment is None or moment.utcoffset() != timedelta(0):
            self.refuse("a time in UTC, such as 2026-11-29T12:00:00+00:00")
        return self.text()

    def made(self, make: Callable[[], T]) -> T:
        """What `make` returns, for a record made of what stands here."""
        try:
            return make()
        except TunerError as error:
            raise StoreError(f"{self.place!r} cannot be used: {error}") from error

    def within(self, name: str) -> str:
        """The place of the member called `name`."""
        return f"{self.place}.{name}" if self.place else name

    def refuse(self, expected: str) -> NoReturn:
        """Raise, because the value is not what was `expected`."""
        raise StoreError(f"{self.place!r} is {reprlib.repr(self.value)}; expected {expected}")
