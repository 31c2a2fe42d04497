from __future__ import annotations

import itertools

import numpy as np
import pytest

from attention_tuner.tuner import subset
from attention_tuner.tuner.subset import Losses, best_columns, fewest_columns

INF = float("inf")


def table(seed: int, rows: int = 12, columns: int = 9, unknown: float = 0.0) -> Losses:
    draw = np.random.default_rng(seed)
    losses = np.abs(draw.normal(0, 0.2, (rows, columns)))
    losses[draw.random((rows, columns)) < unknown] = INF
    return losses - losses.min(axis=1, keepdims=True)


def score(losses: Losses, columns: tuple[int, ...]) -> tuple[float, float]:
    taken = np.where(np.isfinite(losses), losses, subset.UNKNOWN)[:, list(columns)].min(axis=1)
    return float(taken.max()), float(taken.mean())


@pytest.mark.parametrize("most", [1, 2, 3, 4])
@pytest.mark.parametrize("unknown", [0.0, 0.3])
def test_no_other_columns_have_a_smaller_worst_loss(most: int, unknown: float) -> None:
    means: list[float] = []
    for seed in range(20):
        losses = table(seed, unknown=unknown)
        worst, mean = score(losses, best_columns(losses, most))
        least = min(score(losses, each) for each in itertools.combinations(range(losses.shape[1]), most))
        assert worst == pytest.approx(least[0])
        means.append(mean / least[1])
    # Exchanging single columns need not end at the least mean, and nearly always does.
    assert sum(ratio < 1.0001 for ratio in means) >= 16
    assert max(means) < 1.25


def test_columns_that_no_row_takes_are_left_out() -> None:
    losses = np.array([[0.0, 0.5, 0.0], [0.3, 0.0, 0.3], [0.0, 0.1, 0.2]])
    assert best_columns(losses, 3) == (0, 1)
    assert best_columns(losses, 8) == (0, 1)


def test_the_worst_comes_before_the_mean() -> None:
    # The first column is best for nine rows of ten, and loses a lot on the last.
    losses = np.array([[0.0, 0.1]] * 9 + [[0.5, 0.0]])
    assert best_columns(losses, 1) == (1,)


def test_as_few_rows_as_possible_are_left_without_a_known_loss() -> None:
    losses = np.array([[0.0, INF], [0.0, INF], [INF, 0.0]])
    assert best_columns(losses, 1) == (0,)
    assert best_columns(losses, 2) == (0, 1)


def test_the_fewest_columns_for_a_limit_are_counted() -> None:
    for seed in range(10):
        losses = table(seed)
        for limit in (0.02, 0.1, 0.3):
            counts = (len(each) for size in range(1, 10) for each in itertools.combinations(range(9), size)
                      if score(losses, each)[0] <= limit)
            assert fewest_columns(losses, limit) == next(counts)
    assert fewest_columns(np.array([[INF, 0.1]]), 0.05) is None


def test_a_table_as_large_as_a_long_search_leaves_is_done_in_a_moment() -> None:
    losses = table(0, rows=90, columns=300)
    chosen = best_columns(losses, 8)
    assert len(chosen) == 8
    draw = np.random.default_rng(1)
    others = [tuple(draw.choice(300, 8, replace=False)) for _ in range(500)]
    assert score(losses, chosen) < min(score(losses, each) for each in others)


def test_a_cover_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = table(3, rows=40, columns=60)
    exact, fewest = score(losses, best_columns(losses, 4))[0], fewest_columns(losses, 0.1)
    assert fewest is not None
    monkeypatch.setattr(subset, "MOST_STEPS", -30)
    hasty, more = score(losses, best_columns(losses, 4))[0], fewest_columns(losses, 0.1)
    assert more is not None
    assert exact <= hasty < 1.5 * exact
    assert fewest <= more <= 2 * fewest
    assert (hasty, more) != (exact, fewest)


def test_there_is_nothing_to_choose_of_nothing() -> None:
    assert best_columns(np.zeros((3, 0)), 2) == ()
    assert best_columns(np.zeros((0, 0)), 2) == ()
