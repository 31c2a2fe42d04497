"""Reading the JSON files of presets and suites, shipped or the user's own."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any, cast

from ..kernel_templates.errors import ModelError

JsonObject = dict[str, Any]


def shipped(folder: str) -> dict[str, Path]:
    """The JSON files that ship in `folder` of this package by name without extension, sorted."""
    paths = (Path(__file__).parent / folder).glob("*.json")
    return {path.stem: path for path in sorted(paths, key=lambda path: path.stem)}


def find(name_or_path: str, folder: str, noun: str) -> Path:
    """The shipped file of that name in `folder`, or else the file at that path.

    Raises `ModelError` when there is neither, listing the names and the closest one.
    """
    known = shipped(folder)
    path = known.get(name_or_path) or Path(name_or_path).expanduser()
    if path.is_file():
        return path
    close = difflib.get_close_matches(name_or_path.lower(), known, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ModelError(f"no {noun} and no file is called {name_or_path!r}{hint}; known are {', '.join(known)}")


def read_object(path: Path) -> JsonObject:
    """The JSON object in the file at `path`. Raises `ModelError`, naming the file, when it holds none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {str(path)!r} as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{str(path)!r} holds no JSON object but a {type(value).__name__}")
    return cast(JsonObject, value)
