"""Shapes that lookups found nothing tuned for, as a file that `tune --from-misses` takes."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from ...kernel_templates.batch import Batch
from ...kernel_templates.errors import StoreError
from ...kernel_templates.spec import AttentionSpec
from ..answer import SOURCES, Source
from .coverage import Coverage
from .fields import Field
from .text_files import read_text, replace_file

MISSES_VERSION = 1

_EXPECTED = f"expected a file of misses of version {MISSES_VERSION}, as `write_misses` writes it"


@dataclass(frozen=True, slots=True)
class MissedShape:
    """A shape to tune: `batch` is one of its bucket, and its question was asked `count` times on GPU `gpu_name`."""

    gpu_name: str
    spec: AttentionSpec
    page_size: int
    batch: Batch
    source: Source
    count: int


def write_misses(coverage: Coverage, path: str | os.PathLike[str]) -> int:
    """Write the misses of `coverage`, the most frequent first, and return how many there are.

    Each has a batch that stands for its bucket. The file is replaced as a whole or, when a `StoreError` is raised, left
    as it was.
    """
    misses = [
        {"gpu": gpu.name, "spec": spec.key(), "page_size": page_size, "batch": str(bucket.sample()),
         "bucket": bucket.key(), "source": miss.source, "count": miss.count}
        for miss in coverage.misses for spec, bucket, page_size, gpu in [miss.question]
    ]  # fmt: skip
    lines = ",\n".join(f"  {json.dumps(miss)}" for miss in misses)
    counts = json.dumps(dict(coverage.counts))
    replace_file(path, f'{{"misses_version": {MISSES_VERSION},\n "lookups": {counts},\n "misses": [\n{lines}\n ]}}\n')
    return len(misses)


def read_misses(path: str | os.PathLike[str]) -> list[MissedShape]:
    """The misses in a file that `write_misses` wrote.

    Raises `StoreError` for any other file, naming the first value that cannot be used.
    """
    try:
        document: object = json.loads(read_text(path, _EXPECTED))
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{str(path)!r} is no complete JSON file: {error}; {_EXPECTED}") from error
    try:
        parts = Field(document, "").members(("misses_version", "lookups", "misses"))
        if parts["misses_version"].whole() != MISSES_VERSION:
            parts["misses_version"].refuse(str(MISSES_VERSION))
        return [_miss(entry) for entry in parts["misses"].items()]
    except StoreError as error:
        raise StoreError(f"{str(path)!r} cannot be used: {error}; {_EXPECTED}") from error


def _miss(entry: Field) -> MissedShape:
    parts = entry.members(("gpu", "spec", "page_size", "batch", "bucket", "source", "count"))
    spec, batch, source = parts["spec"].text(), parts["batch"].text(), parts["source"].text()
    if source not in SOURCES:
        parts["source"].refuse(f"one of {', '.join(SOURCES)}")
    return MissedShape(
        parts["gpu"].text(),
        parts["spec"].made(lambda: AttentionSpec.parse(spec)),
        parts["page_size"].whole(least=1),
        parts["batch"].made(lambda: Batch.parse(batch)),
        source,
        parts["count"].whole(least=1),
    )
