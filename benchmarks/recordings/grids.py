"""Grids: declared parts of a search space, small enough to measure every variant.

A grid file is a JSON object with `name`, `description`, `spec` (an attention layer) and `parts`. A part has a
`page_size`, a `suite`, the names of some of its `batches`, and `templates`: for each template, the values of some
dimensions. Other dimensions have their first choice. Its variants are all valid combinations of the values.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from attention_tuner.kernel_templates.batch import Batch, BatchBucket
from attention_tuner.kernel_templates.errors import InputError, ModelError, TunerError
from attention_tuner.kernel_templates.gpu import Gpu
from attention_tuner.kernel_templates.registry import templates, why_invalid
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.template import Template
from attention_tuner.kernel_templates.variant import Value, Variant
from attention_tuner.search_spaces.files import read_object
from attention_tuner.search_spaces.suites import named_batches

# The grids of this folder.
GRIDS = Path(__file__).parent / "grids"

Values = Mapping[str, tuple[Value, ...]]


@dataclass(frozen=True, slots=True)
class GridPart:
    """Batches with one page size and the same values to try."""

    page_size: int
    batches: tuple[Batch, ...]
    # The values to try, by template and dimension.
    templates: Mapping[str, Values]

    def variants(self, spec: AttentionSpec, batch: Batch, gpu: Gpu) -> tuple[Variant, ...]:
        """The distinct valid variants for `batch` on `gpu`, in the order of the file."""
        bucket, found = BatchBucket.of(batch), dict[Variant, None]()
        for name, values in self.templates.items():
            template = templates()[name]
            for combination in itertools.product(*values.values()):
                variant = Variant.of(name, self.page_size, dict(zip(values, combination, strict=True)))
                settled = template.settle(variant, bucket)
                if settled not in found and why_invalid(settled, spec, gpu) is None:
                    found[settled] = None
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Grid:
    """A declared grid over one attention layer. Raises `InputError` if two parts share a batch and page size."""

    name: str
    spec: AttentionSpec
    parts: tuple[GridPart, ...]

    def __post_init__(self) -> None:
        counts = Counter((batch, part.page_size) for part in self.parts for batch in dict.fromkeys(part.batches))
        for (batch, page_size), count in counts.items():
            if count > 1:
                raise InputError(f"{count} parts name batch {str(batch)!r} at pages of {page_size}; accepted is one")


def read_grid(name_or_path: str) -> Grid:
    """Read the grid of that name in the folder `grids`, or else the JSON file at that path.

    Raises `InputError` if the file is no grid.
    """
    named = GRIDS / f"{name_or_path}.json"
    path = named if named.is_file() else Path(name_or_path).expanduser()
    document = read_object(path)
    try:
        parts = tuple(_part(part) for part in document["parts"])
        if not parts:
            raise ModelError("it has no part")
        return Grid(str(document["name"]), AttentionSpec.parse(document["spec"]), parts)
    except TunerError as error:
        raise InputError(f"{str(path)!r}: {error}") from error
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise _no_grid(path, error) from error


def _no_grid(path: Path, error: Exception) -> ModelError:
    return ModelError(f"{str(path)!r} is no grid ({type(error).__name__}: {error}); accepted is an object with 'name', "
                      "'spec' and 'parts', each of 'page_size', 'suite', 'batches' and 'templates'")


def _part(document: Any) -> GridPart:
    known = named_batches(str(document["suite"]))
    names = cast(list[str], document["batches"])
    for name in names:
        if name not in known:
            raise ModelError(f"suite {document['suite']!r} has no batch {name!r}; it has {', '.join(known)}")
    declared = cast(dict[str, dict[str, list[Value]]], document["templates"])
    page_size = int(document["page_size"])
    return GridPart(page_size, tuple(known[name] for name in names), {
        name: _values(name, values) for name, values in declared.items()
    })


def _values(name: str, declared: Mapping[str, list[Value]]) -> Values:
    """The values of every dimension of template `name`, in the template's order. Raises `ModelError`."""
    if name not in templates():
        raise ModelError(f"unknown template {name!r}; installed are {', '.join(templates())}")
    template: Template = templates()[name]
    choices = {d.name: d.choices for d in template.dimensions}
    for dimension, values in declared.items():
        if dimension not in choices:
            raise ModelError(f"template {name!r} has no dimension {dimension!r}; it has {', '.join(choices)}")
        strange = [value for value in values if value not in choices[dimension]]
        if strange or not values:
            raise ModelError(f"template {name!r} has {dimension}={strange[0] if strange else '[]'}; accepted are "
                             f"{', '.join(map(str, choices[dimension]))}")
    return {dimension: tuple(declared.get(dimension, known[:1])) for dimension, known in choices.items()}
