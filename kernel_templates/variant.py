"""The record of one variant of the kernel: a template and a value for each of its dimensions."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import VariantError

Value = int | str


@dataclass(frozen=True, slots=True)
class Variant:
    """A template, the page size, and a value for each of the template's dimensions.

    This class does not check the values; `registry.why_invalid` does. So a stored variant can be read and shown even if
    its template is not installed.
    """

    # The template's name.
    template: str
    # Tokens in a page of the KV cache.
    page_size: int
    # Pairs of a dimension and its value, sorted by dimension.
    values: tuple[tuple[str, Value], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.values]
        if any(map(operator.ge, names, names[1:])):
            raise VariantError(f"the dimensions of a variant must be sorted and distinct, not {names}")
        if not self.template or self.page_size < 1:
            raise VariantError(f"a variant needs a template and a positive page size, not {self.template!r} "
                               f"and {self.page_size}")

    @classmethod
    def of(cls, template: str, page_size: int, values: Mapping[str, Value]) -> Variant:
        """The variant of `template` with these values, in any order."""
        return cls(template, page_size, tuple(sorted(values.items())))

    def number(self, name: str) -> int:
        """The value of an integer dimension. Raises `VariantError` if the variant has none of that name."""
        value = self.get(name)
        if not isinstance(value, int):
            raise VariantError(f"variant {self.key()!r} has no number {name!r}")
        return value

    def text(self, name: str) -> str:
        """The value of a text dimension. Raises `VariantError` if the variant has none of that name."""
        value = self.get(name)
        if not isinstance(value, str):
            raise VariantError(f"variant {self.key()!r} has no text {name!r}")
        return value

    def get(self, name: str) -> Value | None:
        """The value of a dimension; None if the variant has none of that name."""
        return self.as_dict().get(name)

    def as_dict(self) -> dict[str, Value]:
        """The values, by dimension."""
        return dict(self.values)

    def replace(self, **changes: Value) -> Variant:
        """This variant with some values changed or added."""
        return Variant.of(self.template, self.page_size, self.as_dict() | changes)

    def key(self) -> str:
        """The variant as text, such as `unified:page_size=16,block_m=16,...`; `parse` is the inverse."""
        pairs = (("page_size", self.page_size), *self.values)
        return f"{self.template}:" + ",".join(f"{name}={value}" for name, value in pairs)

    @classmethod
    def parse(cls, text: str) -> Variant:
        """The variant with this `key`. Raises `VariantError` if the text is no key."""
        try:
            template, _, rest = text.partition(":")
            pairs = [part.split("=", 1) for part in rest.split(",")]
            values = {name: int(value) if value.isdigit() else value for name, value in pairs}
            page_size = values.pop("page_size")
            if len(values) + 1 != len(pairs) or not isinstance(page_size, int):
                raise ValueError
        except (ValueError, KeyError) as error:
            raise VariantError(f"{text!r} does not name a variant; expected the form "
                               "TEMPLATE:page_size=16,DIMENSION=VALUE,...") from error
        return cls.of(template, page_size, values)
