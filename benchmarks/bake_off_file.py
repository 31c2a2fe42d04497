"""The file of `bake_off.py`: which of its rows a later run goes on with, and which it makes anew."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attention_tuner

# What decides which variants are tried: of every search, and of each kind of sampler.
_STUDY = ("tuner/study.py", "tuner/samplers.py", "tuner/encoding.py", "tuner/points.py")
_POOL = ("tuner/pool_sampler.py",)
_RANKING = (*_POOL, "tuner/ranking_sampler.py")
_OWN = {
    "kriging": (*_RANKING, "tuner/kriging_sampler.py", "tuner/gaussian_process.py"),
    "forest": (*_RANKING, "tuner/forest_sampler.py"),
    "local": _POOL,
    "brute": _POOL,
}


def source_hash(sampler: str, leads: Sequence[str]) -> str:
    """A hash over the modules that decide what a search tries, and over its `leads`, as 16 hexadecimal digits."""
    root = Path(attention_tuner.__path__[0])
    texts = [(root / name).read_bytes() for name in (*_STUDY, *_OWN.get(sampler, ()))]
    return hashlib.sha256(b"".join([*texts, *map(str.encode, leads)])).hexdigest()[:16]


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
