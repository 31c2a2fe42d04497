"""The file of `bake_off.py`: which of its rows a later run goes on with, and which it makes anew."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attention_tuner

# What decides which variants are tried: of every search, of one that is given leads, and of each kind of sampler.
_STUDY = ("tuner/study.py", "tuner/samplers.py", "tuner/encoding.py", "tuner/points.py")
_LEADS = ("tuner/leads.py", "kernel_templates/heuristic.py", "kernel_templates/default.py")
_POOL = ("tuner/pool_sampler.py",)
_RANKING = (*_POOL, "tuner/ranking_sampler.py")
_OWN = {
    "kriging": (*_RANKING, "tuner/kriging_sampler.py", "tuner/gaussian_process.py"),
    "forest": (*_RANKING, "tuner/forest_sampler.py"),
    "local": _POOL,
    "brute": _POOL,
}


def source_hash(sampler: str, has_leads: bool) -> str:
    """A hash over the modules that decide what such a search tries, as 16 hexadecimal digits."""
    root = Path(attention_tuner.__path__[0])
    names = (*_STUDY, *(_LEADS if has_leads else ()), *_OWN.get(sampler, ()))
    return hashlib.sha256(b"".join((root / name).read_bytes() for name in names)).hexdigest()[:16]


def file_hash(path: Path) -> str:
    """A hash of the file at `path`, as 16 hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def held_rows(path: Path, header: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows in `path`, none where there is no file, without those made with other sources than the present ones.

    Ends the script where the file is of another recording, other tasks or another number of trials than `header`.
    """
    if not path.exists():
        return []
    document = json.loads(path.read_text())
    for name, asked in header.items():
        if document.get(name) != asked:
            sys.exit(f"{path} is of {name} {document.get(name)!r} and not {asked!r}; accepted is another file")
    return [row for row in document["entries"]
            if row["sources"] == source_hash(row["sampler"], row["leads"] != "none")]


def refuse_other_runs(path: Path, row: Mapping[str, Any], runs: int) -> None:
    """End the script where `row`, of `path`, is of another number of runs than is asked for."""
    if row["runs"] != runs:
        sys.exit(f"{path} holds {row['runs']} runs of {row['sampler']!r} with leads {row['leads']!r} and not {runs}; "
                 "accepted is that number, or another file")
