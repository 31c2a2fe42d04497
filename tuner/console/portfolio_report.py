"""What `report portfolio` and `export --portfolio` show."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..portfolio import LeftOut, Pick, Portfolio
from .output import print_json, print_table, say
from .text import counted, milliseconds, short, values

CURVE = ("kernels", "variants", "shapes", "worst loss", "mean loss", "worst on")
PICKS = ("batch", "variant", "time", "loss")


@dataclass(frozen=True, slots=True)
class Findings:
    """What was found for a group: its curve, the `portfolio` of at most `size` kernels, the `fewest` kernels with which
    no shape loses more than `limit` per cent, and each shape answered from the others."""

    curve: Sequence[Portfolio]
    portfolio: Portfolio
    size: int
    limit: float
    fewest: int | None
    left_out: Sequence[LeftOut]


def print_findings(database: str, findings: Sequence[Findings], *, as_json: bool) -> None:
    """Write for each group the curve of kernels against loss, what serves each shape, and the shapes left out."""
    if as_json:
        print_json({"database": database, "groups": list(map(_document, findings))})
        return
    for found in findings:
        group = found.portfolio.group
        say(f"{group.gpu.name}, {group.spec.key()}, pages of {group.page_size}, regime {group.regime}")
        print_table("kernels against loss", CURVE, map(_curve_cells, found.curve))
        print_table(f"served by {counted(len(found.portfolio.kernels), 'kernel')}", PICKS,
                    map(_pick_cells, found.portfolio.picks))
        for sentence in _sentences(found):
            say(sentence)


def portfolios_document(portfolios: Sequence[Portfolio]) -> dict[str, Any]:
    """The portfolios that were exported; nothing where there are none."""
    return {"portfolios": list(map(_full_document, portfolios))} if portfolios else {}


def print_portfolios(portfolios: Sequence[Portfolio]) -> None:
    """Write what serves each shape of the portfolios that were exported, and what it loses."""
    for portfolio in portfolios:
        group, served = portfolio.group, counted(len(portfolio.losses), "shape")
        print_table(f"{group.gpu.name}, {group.spec.key()}, pages of {group.page_size}", PICKS,
                    map(_pick_cells, portfolio.picks))
        say(f"{counted(len(portfolio.kernels), 'kernel')} for {served}, worst loss "
            f"{percent(max(portfolio.losses, default=None))}, mean {percent(portfolio.mean)}")


def percent(loss: float | None) -> str:
    """A loss as a percentage, "unknown" for None."""
    return "unknown" if loss is None else f"{loss:.1%}"


def _curve_cells(portfolio: Portfolio) -> tuple[str, ...]:
    worst = _worst(portfolio)
    return (str(len(portfolio.kernels)), str(portfolio.num_variants), str(len(portfolio.losses)),
            percent(portfolio.worst), percent(portfolio.mean), "" if worst.loss == 0 else short(worst.shape.batch))


def _worst(portfolio: Portfolio) -> Pick:
    """The shape that loses most, or of which it is not known."""
    return max(portfolio.picks, key=lambda pick: (pick.loss is None, pick.loss))


def _pick_cells(pick: Pick) -> tuple[str, ...]:
    batch = short(pick.shape.batch)
    if pick.variant is None:
        return batch, "none of them was timed here", "", percent(None)
    timing = pick.shape.timed[pick.variant].timing
    return batch, values(pick.variant), milliseconds(timing.median_ms), percent(pick.loss)


def _sentences(found: Findings) -> list[str]:
    group = found.portfolio.group
    count = len(group.shapes)
    told = [f"of {counted(count, 'shape')} none loses more than {found.limit:.3g} % with "
            + ("any number of kernels that were timed there" if found.fewest is None else
               counted(found.fewest, "kernel"))]
    if group.incomparable:
        told.append(f"{counted(group.incomparable, 'best config')} left out: the variant cannot run any more, or no "
                    "trial of the latest environment has it; tune again")
    judged = _judged(found.left_out)
    if judged:
        worst = max(judged, key=lambda each: each.loss or 0.0)
        told.append(
            f"each shape left out and looked up in a portfolio of at most {counted(found.size, 'kernel')} for the "
            f"others: median loss {percent(_median(judged))}, worst {percent(worst.loss)} on "
            f"{short(worst.shape.batch)}; {len(judged)} of {counted(len(found.left_out), 'answer')} had been timed "
            f"there, and {sum(each.source == 'heuristic' for each in found.left_out)} were chosen by rule, for nothing "
            "tuned was near")
    elif found.left_out:
        told.append("no shape could be judged by leaving it out: no answer had been timed there; tune with --cross")
    return told


def _judged(left_out: Sequence[LeftOut]) -> list[LeftOut]:
    return [each for each in left_out if each.loss is not None]


def _median(judged: Sequence[LeftOut]) -> float | None:
    return statistics.median(each.loss or 0.0 for each in judged) if judged else None


def _document(found: Findings) -> dict[str, Any]:
    group, judged = found.portfolio.group, _judged(found.left_out)
    return {
        "gpu": group.gpu.name,
        "regime": str(group.regime),
        "shapes": len(group.shapes),
        "incomparable": group.incomparable,
        "curve": [_summary(portfolio) for portfolio in found.curve],
        "limit": found.limit / 100,
        "fewest_kernels": found.fewest,
        "portfolio": _full_document(found.portfolio),
        "left_out": {
            "judged": len(judged),
            "median_loss": _median(judged),
            "worst_loss": max((each.loss or 0.0 for each in judged), default=None),
            "answers": [{
                "batch": each.shape.best.batch, "variant": each.variant.key(), "source": each.source,
                "loss": each.loss,
            } for each in found.left_out],
        },
    }


def _full_document(portfolio: Portfolio) -> dict[str, Any]:
    group = portfolio.group
    return {
        "spec": group.spec.key(),
        "page_size": group.page_size,
        **_summary(portfolio),
        "names": list(portfolio.kernels),
        "picks": [{
            "batch": pick.shape.best.batch,
            "variant": pick.variant and pick.variant.key(),
            "median_ms": pick.variant and pick.shape.timed[pick.variant].timing.median_ms,
            "loss": pick.loss,
            "best": pick.shape.best.variant.key(),
        } for pick in portfolio.picks],
    }


def _summary(portfolio: Portfolio) -> dict[str, Any]:
    return {"kernels": len(portfolio.kernels), "variants": portfolio.num_variants, "shapes": len(portfolio.losses),
            "worst_loss": portfolio.worst, "mean_loss": portfolio.mean}
