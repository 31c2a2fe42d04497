"""JSON files of presets, suites and recordings: shipped files by name, the user's files by path."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any, cast

from ..kernel_templates.errors import ModelError

JsonObject = dict[str, Any]


def shipped(folder: str, suffixes: tuple[str, ...] = (".json",)) -> dict[str, Path]:
    """List the files shipped in `folder` that end in one of `suffixes`, by name without suffix, sorted."""
    paths = [path for path in (Path(__file__).parent / folder).glob("*") if path.name.endswith(suffixes)]
    names = {path.name.removesuffix(next(s for s in suffixes if path.name.endswith(s))): path for path in paths}
    return dict(sorted(names.items()))


def find(name_or_path: str, folder: str, noun: str, suffixes: tuple[str, ...] = (".json",)) -> Path:
    """Find the file of that name shipped in `folder`, or else the file at that path.

    Raises `ModelError` if there is neither; the message lists the known names and the closest one.
    """
    known = shipped(folder, suffixes)
    path = known.get(name_or_path) or Path(name_or_path).expanduser()
    if path.is_file():
        return path
    close = difflib.get_close_matches(name_or_path.lower(), known, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ModelError(f"no {noun} and no file is called {name_or_path!r}{hint}; known are {', '.join(known)}")


def read_object(path: Path) -> JsonObject:
    """Read the JSON object in the file at `path`. Raises `ModelError` if it holds none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {str(path)!r} as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{str(path)!r} holds no JSON object but a {type(value).__name__}")
    return cast(JsonObject, value)
