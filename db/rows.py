"""Stored configs as a lookup holds them: what it compares is read at once, the rest when a config is served."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar

from ..kernel_templates.batch import BatchBucket
from ..kernel_templates.gpu import Gpu
from ..kernel_templates.outcome import BestConfig
from ..kernel_templates.spec import AttentionSpec
from ..kernel_templates.variant import Variant
from .answer import Origin
from .models import UNREADABLE, BestRow

T = TypeVar("T")

_SLOT = ("spec", "page_size", "gpu_name", "gpu_num_sms", "gpu_capability")

# Of rows that are set aside together, so many are named.
_NAMED = 20

COLUMNS = (
    *_SLOT, "bucket", "batch", "variant", "regime", "samples_ms", "plan_ms", "default_samples_ms",
    "default_plan_ms", "default_regime", "verdict", "check_level", "gpu_shared_memory_bytes", "gpu_l2_bytes",
    "gpu_driver", "kernel_hash", "triton", "torch", "driver", "measured_at",
)  # fmt: skip
"""The columns of the table of best configs in the order in which `stored` takes their values.

Left out are the row's number and the template, with which the variant begins.
"""


class Slot(NamedTuple):
    """What configs must share with a question to answer it: the layer, the page size and the GPU."""

    spec: AttentionSpec
    page_size: int
    gpu_name: str
    num_sms: int
    capability: str

    @classmethod
    def of(cls, spec: AttentionSpec, page_size: int, gpu: Gpu) -> Slot:
        """The slot of a question."""
        return cls(spec, page_size, gpu.name, gpu.num_sms, "{}.{}".format(*gpu.capability))


@dataclass(frozen=True, slots=True)
class Row:
    """A config of which the bucket and the variant are understood; `config` reads all of it.

    That raises one of `UNREADABLE` where it cannot be read, and returns None, with a warning, where a full check says
    that it must not be served. `label` is what a message calls it.
    """

    bucket: BatchBucket
    variant: Variant
    config: Callable[[], BestConfig | None]
    label: Callable[[], str]


@dataclass(frozen=True)
class Rows(Generic[T]):
    """The configs of one place by slot, each as it is held there.

    `label` is what a message calls one, and `row` reads it or raises one of `UNREADABLE`. `content` gives a text for
    each of them, and of what else decides whether they are served. `unreadable` are the labels of those whose slot
    could not be read, each with the reason.
    """

    origin: Origin
    slots: Mapping[Slot, Sequence[T]]
    label: Callable[[T], str]
    row: Callable[[T], Row]
    content: Callable[[], Iterable[str]]
    unreadable: Sequence[str] = ()

    def __len__(self) -> int:
        return sum(map(len, self.slots.values())) + len(self.unreadable)

    def read(self, slot: Slot, bad: list[str]) -> Iterator[Row]:
        """The rows of `slot`; the labels and reasons of those that cannot be read are added to `bad`."""
        for item in self.slots.get(slot, ()):
            try:
                yield self.row(item)
            except UNREADABLE as error:
                bad.append(f"{self.label(item)} cannot be read: {error}")

    def lent(self, own: Slot, lender: str) -> list[Slot]:
        """The slots of the GPU called `lender` that are like `own`, of any number of multiprocessors."""
        return [slot for slot in self.slots if slot._replace(gpu_name=own.gpu_name, num_sms=own.num_sms) == own
                and slot.gpu_name == lender != own.gpu_name]

    def configs(self, bad: list[str]) -> Iterator[BestConfig]:
        """All configs; the labels and reasons of those that cannot be read are added to `bad`."""
        bad += self.unreadable
        for items in self.slots.values():
            for item in items:
                try:
                    config = self.row(item).config()
                except UNREADABLE as error:
                    bad.append(f"{self.label(item)} cannot be read: {error}")
                    continue
                if config is not None:
                    yield config


def set_aside(bad: Sequence[str]) -> None:
    """Warn, once, of all that is set aside: labels and reasons."""
    if bad:
        more = f"; and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
        warnings.warn("tuned configs that cannot be used here are set aside: " + "; ".join(bad[:_NAMED]) + more,
                      stacklevel=4)


def label_of(config: BestConfig) -> str:
    """What a message calls a config that is no row of a table."""
    return (f"the config {config.variant.key()!r} for {config.batch} of {config.shape.spec.key()!r} on "
            f"{config.gpu.name}")


def row_of(config: BestConfig, judge: Callable[[BestConfig], BestConfig | None]) -> Row:
    """The row of a config that has been read; `judge` says what is served of it."""
    return Row(config.shape.bucket, config.variant, functools.partial(judge, config),
               functools.partial(label_of, config))


def made(configs: Iterable[BestConfig], origin: Origin,
         judge: Callable[[BestConfig], BestConfig | None] = lambda config: config) -> Rows[BestConfig]:
    """The rows of `configs`; `judge` says what is served of one."""
    slots: dict[Slot, list[BestConfig]] = defaultdict(list)
    for config in configs:
        slots[Slot.of(config.shape.spec, config.variant.page_size, config.gpu)].append(config)

    def row(config: BestConfig) -> Row:
        return row_of(config, judge)

    return Rows(origin, dict(slots), label_of, row, lambda: map(repr, itertools.chain(*slots.values())))


def stored(rows: Iterable[Sequence[Any]], place: str, origin: Origin,
           judge: Callable[[BestConfig], BestConfig | None] = lambda config: config,
           record: Callable[[Sequence[Any]], BestConfig] | None = None) -> Rows[Sequence[Any]]:
    """The rows of a table of best configs, each its number and then the values of `COLUMNS`, texts or bytes.

    `place` says in messages where they stand. Nothing but the slot of each is read before it is asked for; `record`
    reads all of one, as `from_database` does.
    """
    columns = itemgetter(*(COLUMNS.index(name) + 1 for name in _SLOT))
    rows = list(rows)
    slots: dict[tuple[Any, ...], list[Sequence[Any]]] = defaultdict(list)
    for row in rows:
        slots[columns(row)].append(row)

    def label(row: Sequence[Any]) -> str:
        return f"row {row[0]} of {place}"

    readable: dict[Slot, list[Sequence[Any]]] = {}
    unreadable: list[str] = []
    for (spec, page_size, gpu_name, num_sms, capability), members in slots.items():
        try:
            slot = Slot(AttentionSpec.parse(text(spec)), _whole("page_size", page_size), text(gpu_name),
                        _whole("gpu_num_sms", num_sms), text(capability))
            readable.setdefault(slot, []).extend(members)
        except UNREADABLE as error:
            unreadable += (f"{label(row)} cannot be read: {error}" for row in members)
    # The number of a row says nothing about what is in it.
    return Rows(origin, readable, label, _reader(judge, label, record or from_database),
                lambda: (repr([*map(text, row[1:])]) for row in rows), unreadable)


def _whole(name: str, value: object) -> int:
    read = text(value)
    try:
        return int(read)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name} {read!r} is no whole number") from error


def from_database(row: Sequence[Any]) -> BestConfig:
    """The config in a row of the database. Raises one of `UNREADABLE`."""
    return BestRow(**dict(zip(COLUMNS, map(text, row[1:]), strict=True))).record()


def text(value: Any) -> Any:
    """A value of a row, with what stands there undecoded as a text; what is none has replacements in it."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _reader(judge: Callable[[BestConfig], BestConfig | None], label: Callable[[Sequence[Any]], str],
            record: Callable[[Sequence[Any]], BestConfig]) -> Callable[[Sequence[Any]], Row]:
    # Thousands of rows name the same few buckets and variants.
    @functools.cache
    def bucket_of(value: object) -> BatchBucket:
        return BatchBucket.parse(text(value))

    @functools.cache
    def variant_of(value: object) -> Variant:
        return Variant.parse(text(value))

    bucket_at, variant_at = COLUMNS.index("bucket") + 1, COLUMNS.index("variant") + 1

    def config(row: Sequence[Any]) -> BestConfig | None:
        return judge(record(row))

    return lambda row: Row(bucket_of(row[bucket_at]), variant_of(row[variant_at]), functools.partial(config, row),
                           functools.partial(label, row))
