"""Best configs as one flat table of text, which a program in any language reads without Python.

The file says itself what it is: its first lines begin with `#` and state the columns and the rule of the buckets.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...kernel_templates.errors import StoreError
from ...kernel_templates.outcome import BestConfig
from ..answer import REACH
from ..merit import merit
from ..models import UNREADABLE, BestRow
from ..rows import COLUMNS, COMPARED, Rows, from_database, stored
from .text_files import read_text, replace_file

MARK = "# attention-tuner table"
VERSION = 1

# In the place of the samples stand their medians: a launch is chosen by these.
_MEDIANS = {"samples_ms": "median_ms", "default_samples_ms": "default_median_ms"}
_NAMES = tuple(_MEDIANS.get(name, name) for name in COLUMNS)
_READERS: dict[str, Callable[[str], object]] = {
    "page_size": int, "gpu_num_sms": int, "gpu_shared_memory_bytes": int, "gpu_l2_bytes": int,
    "plan_ms": float, "default_plan_ms": float, "median_ms": "[{}]".format, "default_median_ms": "[{}]".format,
}  # fmt: skip
_CONVERTED = tuple((at, _READERS[name]) for at, name in enumerate(_NAMES, 1) if name in _READERS)

_HEAD = """\
{mark}, version {version}, rows {rows}
# A row is a config: values in the order of the last line of this head, with a tab between them, in UTF-8.
# To choose a launch, take the first row whose spec, page_size, gpu_name, gpu_num_sms, gpu_capability and bucket are
# those asked for, or else of the nearest bucket: that of which the sum over the sizes of |log2(a / b)|, 0 counting as a
# half, is least.
# Rows of other buckets whose variant has waves=0 or num_segments=1 are passed over, and more than {reach:g} is too far:
# what is here does worse there than values chosen by rule. So may such a row of the bucket asked for, for any batch but
# its own and with few tiles for each multiprocessor: of several rows of a bucket, rather take one that is not such.
# A row of another bucket must have short_seqs and the same short_skew unless the batch has no short sequence, and
# long_rows unless it has no long one; values of a part that only the row has do not matter.
# bucket: short_seqs-short_rows-short_kv-long_seqs-long_rows-long_kv-short_skew. A sequence is short with 1 to 8 query
# tokens and long with more; seqs counts sequences, rows query tokens, kv query and context tokens; short_skew is the
# longest short sequence over the mean, in kv. Each is 0 or rounded to a power of two: 2 ** round(log2(size)), where a
# half rounds to the even exponent.
# variant: the template, then its values by name. Times are medians in milliseconds of a launch; plan_ms is of the host.
{names}
"""


def write_table(configs: Iterable[BestConfig], path: str | os.PathLike[str]) -> None:
    """Write `configs` to `path`, those of one question best first: the same text for the same configs in any order.

    Raises `StoreError` for a text with a tab or a line break, and where the file cannot be written, which is then left
    as it was.
    """
    lines = sorted((_order(config), _line(config)) for config in configs)
    head = _HEAD.format(mark=MARK, version=VERSION, reach=REACH, rows=len(lines), names="\t".join(_NAMES))
    replace_file(path, head + "".join(f"{line}\n" for _, line in lines))


def _order(config: BestConfig) -> tuple[object, ...]:
    gpu = config.gpu
    return (gpu.name, gpu.num_sms, config.shape.spec.key(), config.variant.page_size, config.shape.bucket.sizes,
            *merit(config))


def _line(config: BestConfig) -> str:
    row = BestRow.of(config)
    medians = {"samples_ms": config.timing.median_ms, "default_samples_ms": config.default_timing.median_ms}
    texts = [str(medians.get(name, getattr(row, name))) for name in COLUMNS]
    for name, text in zip(_NAMES, texts, strict=True):
        if not text.isprintable():
            raise StoreError(f"{name} {text!r} cannot stand in a table; expected a text without tabs and line breaks")
    return "\t".join(texts)


def table_rows(path: str | os.PathLike[str], judge: Callable[[BestConfig], BestConfig | None]) -> Rows[Sequence[Any]]:
    """The rows of a file that `write_table` wrote, each read when it is asked for.

    Raises `StoreError` for a file that is none, is cut short or has other columns.
    """
    return stored(_rows(path), f"table {str(path)!r}", "file", judge, _config)


def read_table(path: str | os.PathLike[str]) -> list[BestConfig]:
    """The configs in a file that `write_table` wrote, with their medians as the only samples.

    Raises `StoreError` for any other file, naming the first row that cannot be used.
    """
    configs: list[BestConfig] = []
    for row in _rows(path):
        try:
            configs.append(_config(row))
        except UNREADABLE as error:
            raise StoreError(f"row {row[0]} of table {str(path)!r} cannot be imported: {error}") from error
    return configs


def _config(row: Sequence[Any]) -> BestConfig:
    """The config in a row of `_rows`. Raises one of `UNREADABLE`."""
    values: list[Any] = [*row[:-1], *row[-1].split("\t")]
    if len(values) != len(_NAMES) + 1:
        raise ValueError(f"it has {len(values) - 1} values; expected {len(_NAMES)}")
    for at, read in _CONVERTED:
        values[at] = read(values[at])
    return from_database(values)


def _rows(path: str | os.PathLike[str]) -> list[list[Any]]:
    """For each row its number, the texts of the columns that a lookup compares, and the rest in one text."""
    name = str(path)
    first, *lines = read_text(path).split("\n")
    count = first.removeprefix(f"{MARK}, version {VERSION}, rows ")
    if not first.startswith(MARK) or not count.isdecimal():
        raise StoreError(f"{name!r} is no table of tuned configs of version {VERSION}; expected a file that "
                         "`attention-tuner export --format table` wrote")
    names, *texts = [line for line in lines if line and not line.startswith("#")] or [""]
    if names != "\t".join(_NAMES):
        raise StoreError(f"{name!r} has other columns than a table of version {VERSION}; expected {', '.join(_NAMES)}")
    if len(texts) != int(count) or lines[-1]:
        raise StoreError(f"{name!r} holds {len(texts)} whole rows and not the {count} that it says: it is cut "
                         "short, or was added to")
    rows: list[list[Any]] = [[number, *text.split("\t", COMPARED)] for number, text in enumerate(texts, 1)]
    for row in rows:
        if len(row) != COMPARED + 2:
            raise StoreError(f"row {row[0]} of table {name!r} is cut short; expected {len(_NAMES)} values")
    return rows
