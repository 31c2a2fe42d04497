"""Losses of lookups against the best variant: stored losses, and the expected loss of an answer."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import cast

from sqlalchemy import UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from ..kernel_templates.errors import TunerError
from .answer import Source
from .models import Base

# Upper ends of the distance bands in which losses are pooled, because a single shape says little.
UPTO = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 1024.0)


@dataclass(frozen=True, slots=True)
class Loss:
    """The median loss of the answers of one source on one GPU model, in one distance band.

    Raises `TunerError` for invalid values.
    """

    gpu_name: str
    source: Source
    # Upper end of the distance band. The heuristic's distance is that of the nearest tuned bucket.
    upto: float
    # Number of answers.
    shapes: int
    # 0.02 is two percent slower than the best known variant.
    loss: float

    def __post_init__(self) -> None:
        if self.source not in ("bucket", "neighbour", "heuristic") or self.upto not in UPTO or self.shapes < 1:
            raise TunerError(f"no loss is kept of {self.shapes} answers of source {self.source!r} up to {self.upto}")
        if not math.isfinite(self.loss) or self.loss < -1:
            raise TunerError(f"a loss is a finite number, not {self.loss}")


class LossRow(Base):
    """The row of a `Loss`; columns as its fields."""

    __tablename__ = "losses"
    __table_args__ = (UniqueConstraint("gpu_name", "source", "upto"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    gpu_name: Mapped[str]
    source: Mapped[str]
    upto: Mapped[float]
    shapes: Mapped[int]
    loss: Mapped[float]

    @classmethod
    def of(cls, loss: Loss) -> LossRow:
        """The row of `loss`."""
        return cls(**asdict(loss))


def loss_of(row: LossRow) -> Loss:
    """The loss in `row`. Raises one of `models.UNREADABLE` for an invalid row."""
    return Loss(row.gpu_name, cast(Source, row.source), float(row.upto), int(row.shapes), float(row.loss))


class Losses:
    """Expected losses, estimated from measured ones."""

    def __init__(self, losses: Iterable[Loss] = ()) -> None:
        self._known: dict[tuple[str, Source], dict[float, float]] = defaultdict(dict)
        for each in losses:
            self._known[each.gpu_name, each.source].setdefault(each.upto, each.loss)

    def expect(self, gpu_name: str, source: Source, distance: float | None) -> float | None:
        """The expected loss of an answer: the measured loss of the nearest band; None beyond the farthest band.

        It is 0 for source "exact", and never negative (noise can make a measured loss negative).
        """
        if source == "exact":
            return 0.0
        known = self._known.get((gpu_name, source))
        if not known or distance is None or band(distance) > max(known):
            return None
        at = UPTO.index(band(distance))
        # The farther of two equally near bands counts, so that the loss is not underestimated.
        nearest = min(known, key=lambda upto: (abs(UPTO.index(upto) - at), -upto))
        return max(0.0, known[nearest])


def band(distance: float) -> float:
    """Upper end of the distance band of `distance`."""
    return next(upto for upto in UPTO if distance <= upto)
