"""Suites: lists of batches to tune together, shipped or in a user's file.

A suite file is a JSON object with `name`, `description` and `batches`: a list of batch texts, or an object with names
as keys.
"""

from __future__ import annotations

from typing import Any, cast

from ..kernel_templates.batch import Batch
from ..kernel_templates.errors import BatchError, ModelError
from .files import find, read_object

# Batches for tuning without a GPU: the interpreter runs each in well under a second.
INTERPRETER_BATCHES = ("1x16@32,2x1@40", "2x1@48", "1x4@44")


def suite(name_or_path: str) -> tuple[Batch, ...]:
    """Read the distinct batches of a shipped suite or a JSON file, in its order.

    Raises `ModelError` if there is no such suite or the file is no suite, and `BatchError` if a batch in it is invalid.
    """
    return tuple(dict.fromkeys(named_batches(name_or_path).values()))


def named_batches(name_or_path: str) -> dict[str, Batch]:
    """Read the batches of a suite by name. A batch without a name goes by its text. Raises as `suite` does."""
    path = find(name_or_path, "suites", "suite")
    batches: Any = read_object(path).get("batches")
    texts = {text: text for text in cast(list[Any], batches)} if _is_list_of_texts(batches) else batches
    if not isinstance(texts, dict) or not texts:
        raise ModelError(f"{str(path)!r} is no suite: its 'batches' must be a list of texts such as '64x1@16383', "
                         "or an object of them by name")
    try:
        return {name: Batch.parse(str(text)) for name, text in cast(dict[str, Any], texts).items()}
    except BatchError as error:
        raise BatchError(f"{str(path)!r}: {error}") from error


def _is_list_of_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in cast(list[Any], value))
