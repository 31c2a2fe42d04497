"""The few columns of a table of losses with which every row loses least.

The least worst loss is that of the p-centre problem, which is solved by covering the rows, and the least mean that of
the p-median problem, for which columns are added and exchanged while that helps: Daskin, Network and Discrete Location,
2nd edition, chapters 5 and 6.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

# Stands for a loss that is not known: more than any that is measured, and still a number that can be added up.
UNKNOWN = 1e6
# Sets of columns looked at for one cover: what tuning leaves needs hundreds, and tables drawn at random may need any.
MOST_STEPS = 20_000

Losses = NDArray[np.float64]


def best_columns(losses: Losses, most: int) -> tuple[int, ...]:
    """At most `most` columns of `losses [rows, columns]`, infinite where unknown, of which each row takes its least.

    The largest of these losses is the least possible, unless that takes more than `MOST_STEPS` to find; their mean is
    as low as exchanging single columns then makes it. Columns that no row takes are left out.
    """
    if not losses.size:
        return ()
    known = np.where(np.isfinite(losses), losses, UNKNOWN)
    columns = _undominated(known)
    known = known[:, columns]
    if len(columns) > most:
        chosen = _improved(known, _least_worst(known, _improved(known, [], most)), most)
        columns, known = columns[chosen], known[:, chosen]
    taken = np.unique(known.argmin(axis=1))
    return tuple(sorted(int(column) for column in columns[taken]))


def fewest_columns(losses: Losses, limit: float) -> int | None:
    """How many columns of `losses [rows, columns]` suffice for no row to lose more than `limit`; None where not even
    all of them do. It is the fewest, unless that takes more than `MOST_STEPS` to find."""
    within = losses <= limit
    if not within.any(axis=1).all():
        return None
    return next(count for count in range(1, len(losses) + 1) if _cover(within, count) is not None)


def _undominated(losses: Losses) -> NDArray[np.intp]:
    """The columns that no other one is as good as in every row; of equal ones the first."""
    kept: list[int] = []
    # Whatever is as good everywhere has a sum that is no greater, and comes before.
    for column in np.argsort(losses.sum(axis=0), kind="stable"):
        if not (losses[:, kept] <= losses[:, [column]]).all(axis=0).any():
            kept.append(int(column))
    return np.array(sorted(kept), dtype=np.intp)


def _least_worst(losses: Losses, chosen: list[int]) -> list[int]:
    """`chosen`, or as many other columns whose worst row loses less: the least possible."""
    worst = losses[:, chosen].min(axis=1).max()
    limits = np.unique(losses[(losses >= losses.min(axis=1).max()) & (losses < worst)])
    low, high = 0, len(limits)
    while low < high:
        middle = (low + high) // 2
        found = _cover(losses <= limits[middle], len(chosen))
        if found is None:
            low = middle + 1
        else:
            high, chosen = middle, found
    return chosen


def _cover(within: NDArray[np.bool_], most: int) -> list[int] | None:
    """At most `most` columns of which every row is within one, None where none are found."""
    masks = [sum(1 << int(row) for row in np.flatnonzero(column)) for column in within.T]
    by_row = [sorted(np.flatnonzero(row).tolist(), key=lambda c: -masks[c].bit_count()) for row in within]
    largest = max(map(int.bit_count, masks))
    # However few are looked at, the first way down is gone to its end.
    steps = -len(by_row)

    def search(missing: int, left: int) -> list[int] | None:
        nonlocal steps
        if not missing:
            return []
        steps += 1
        if missing.bit_count() > left * largest or steps > MOST_STEPS:
            return None
        rarest = min((row for row in range(len(by_row)) if missing >> row & 1), key=lambda row: len(by_row[row]))
        for column in by_row[rarest]:
            rest = search(missing & ~masks[column], left - 1)
            if rest is not None:
                return [column, *rest]
        return None

    return search((1 << len(by_row)) - 1, most)


def _improved(losses: Losses, chosen: list[int], most: int) -> list[int]:
    """`chosen` with columns added up to `most`, then exchanged one by one, while that lowers the worst or the mean."""
    best = _scores(losses, chosen[:-1])[chosen[-1]] if chosen else (math.inf, math.inf)
    while True:
        kept = [chosen] if len(chosen) < most else [[c for c in chosen if c != out] for out in chosen]
        score, column, keep = min((min(scores), scores.index(min(scores)), keep)
                                  for keep in kept for scores in [_scores(losses, keep)])
        if score >= best:
            return chosen
        best, chosen = score, [*keep, column]


def _scores(losses: Losses, keep: list[int]) -> list[tuple[float, float]]:
    """For each column, the worst and the mean loss that it has together with `keep`."""
    so_far = losses[:, keep].min(axis=1, initial=np.inf)
    with_each = np.minimum(losses, so_far[:, None])
    return list(zip(with_each.max(axis=0).tolist(), with_each.mean(axis=0).tolist(), strict=True))
