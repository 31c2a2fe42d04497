"""The results file of `bake_off.py`: the rows that a later run keeps, and the files that it refuses."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attention_tuner


def source_hash(leads: Sequence[str]) -> str:
    """A hash over the modules that decide what a search tries, and over its `leads`, as 16 hexadecimal digits."""
    modules = sorted(Path(attention_tuner.__path__[0], "tuner", "sampling").glob("*.py"))
    texts = [*(path.read_bytes() for path in modules), *map(str.encode, leads)]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:16]


def file_hash(path: Path) -> str:
    """A hash of the file at `path`, as 16 hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def held_rows(path: Path, header: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows in `path`, none where there is no file.

    Ends the script where the file is of another recording, other tasks or another number of trials than `header`.
    """
    if not path.exists():
        return []
    document = json.loads(path.read_text())
    for name, asked in header.items():
        if document.get(name) != asked:
            sys.exit(f"{path} is of {name} {document.get(name)!r} and not {asked!r}; accepted is another file")
    rows: list[dict[str, Any]] = document["entries"]
    return rows


def refuse_other_runs(path: Path, row: Mapping[str, Any], runs: int) -> None:
    """End the script where `row`, of `path`, is of another number of runs than is asked for."""
    if row["runs"] != runs:
        sys.exit(f"{path} holds {row['runs']} runs of {row['sampler']!r} with leads {row['leads']!r} and not {runs}; "
                 "accepted is that number, or another file")
