"""What a lookup loses against the best variant: measured by leaving out each tuned shape in turn, then expected."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol, cast

from sqlalchemy import UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from ..kernel_templates.batch import Batch
from ..kernel_templates.errors import TunerError
from ..kernel_templates.outcome import BestConfig
from ..kernel_templates.variant import Variant
from .answer import Answer, Chain, Source
from .models import Base

# Leaving one of so many out asks a table of all the others, which takes some milliseconds.
_MOST = 256

TimesOf = Callable[[BestConfig], Mapping[Variant, float]]
"""The median times in milliseconds of the variants that were timed in the setting of a config."""

# Losses are pooled by the distance of the bucket that answered, up to each of these: alone, a tuned shape says little.
_UPTO = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 1024.0)


@dataclass(frozen=True, slots=True)
class Loss:
    """The median loss of `shapes` answers of one source on one GPU model, from buckets up to distance `upto` away.

    The heuristic's distance is that of the nearest tuned bucket, from which no answer came.
    0.02 is two percent slower than the best variant known for the shape. Raises `TunerError` for what cannot be.
    """

    gpu_name: str
    source: Source
    upto: float
    shapes: int
    loss: float

    def __post_init__(self) -> None:
        if self.source not in ("bucket", "neighbour", "heuristic") or self.upto not in _UPTO or self.shapes < 1:
            raise TunerError(f"no loss is kept of {self.shapes} answers of source {self.source!r} up to {self.upto}")
        if not math.isfinite(self.loss) or self.loss < -1:
            raise TunerError(f"a loss is a finite number, not {self.loss}")


class LossRow(Base):
    """One `Loss`, in the columns of its fields."""

    __tablename__ = "losses"
    __table_args__ = (UniqueConstraint("gpu_name", "source", "upto"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    gpu_name: Mapped[str]
    source: Mapped[str]
    upto: Mapped[float]
    shapes: Mapped[int]
    loss: Mapped[float]

    @property
    def label(self) -> str:
        """What a message calls the row."""
        return f"row {self.id} of table {self.__tablename__}"

    @classmethod
    def of(cls, loss: Loss) -> LossRow:
        """The row of `loss`."""
        return cls(**asdict(loss))

    def record(self) -> Loss:
        """The loss that `of` was given. Raises one of `models.UNREADABLE` for a row that no loss has made."""
        return Loss(self.gpu_name, cast(Source, self.source), float(self.upto), int(self.shapes), float(self.loss))


class Losses:
    """The losses to expect, from those that were measured."""

    def __init__(self, losses: Iterable[Loss] = ()) -> None:
        self._known: dict[tuple[str, Source], dict[float, float]] = defaultdict(dict)
        for each in losses:
            self._known[each.gpu_name, each.source].setdefault(each.upto, each.loss)

    def expect(self, gpu_name: str, source: Source, distance: float | None) -> float | None:
        """The loss to expect of an answer: that measured nearest to its distance, None where none was from so far.

        Of a config that was tuned on the batch itself it is 0, and where noise makes a measured one less, too.
        """
        if source == "exact":
            return 0.0
        known = self._known.get((gpu_name, source))
        if not known or distance is None or _band(distance) > max(known):
            return None
        at = _UPTO.index(_band(distance))
        # Of two equally near, the larger distance: rather too much is expected than too little.
        nearest = min(known, key=lambda upto: (abs(_UPTO.index(upto) - at), -upto))
        return max(0.0, known[nearest])


class Stored(Protocol):
    """What a `Store` does here."""

    def best_configs(self, *, gpu_name: str) -> list[BestConfig]:
        """The best configs of a GPU model."""
        ...

    def times(self, config: BestConfig) -> Mapping[Variant, float]:
        """The median times in milliseconds of the variants that were timed in the setting of a config."""
        ...

    def put_losses(self, gpu_name: str, losses: Iterable[Loss]) -> None:
        """Keep these losses in the place of all others of a GPU model."""
        ...


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What the other configs answer for the batch of `config`, and the times there in milliseconds.

    `served_ms` is None where the variant of `answer` was never timed there.
    """

    config: BestConfig
    answer: Answer
    served_ms: float | None
    best_ms: float

    @property
    def loss(self) -> float | None:
        """What `answer` loses there, None where that is not known."""
        return None if self.served_ms is None else self.served_ms / self.best_ms - 1


def leave_one_out(configs: Sequence[BestConfig], times_of: TimesOf, chain: Chain | None = None) -> list[LeftOut]:
    """Each config of which times are known, left out with all others of its batch, and what is answered then."""
    from .lookup.table import ConfigTable

    slots: dict[object, list[BestConfig]] = defaultdict(list)
    for config in configs:
        slots[config.shape.spec, config.variant.page_size, config.gpu.name, config.gpu.num_sms].append(config)
    found: list[LeftOut] = []
    for members in slots.values():
        for config in members:
            times = times_of(config)
            if not times:
                continue
            table = ConfigTable.of((other for other in members if other.batch != config.batch), chain=chain)
            answer = table.lookup(config.shape.spec, Batch.parse(config.batch), config.variant.page_size, config.gpu)
            found.append(LeftOut(config, answer, times.get(answer.variant), min(times.values())))
    return found


def pooled(left_out: Iterable[LeftOut]) -> list[Loss]:
    """The median losses by GPU model, source and distance, of those that are known."""
    groups: dict[tuple[str, Source, float], list[float]] = defaultdict(list)
    for each in left_out:
        answer = each.answer
        if each.loss is not None and answer.distance is not None:
            groups[each.config.gpu.name, answer.source, _band(answer.distance)].append(each.loss)
    return [Loss(*group, len(losses), statistics.median(losses)) for group, losses in sorted(groups.items())]


def measure_losses(store: Stored, gpu_name: str) -> list[Loss]:
    """Leave out in turn each shape that was tuned on a GPU model, and keep in `store` what is lost.

    Of many, those that were measured last.
    """
    configs = sorted(store.best_configs(gpu_name=gpu_name), key=lambda config: config.measured_at)
    losses = pooled(leave_one_out(configs[-_MOST:], store.times))
    store.put_losses(gpu_name, losses)
    return losses


def _band(distance: float) -> float:
    return next(upto for upto in _UPTO if distance <= upto)
