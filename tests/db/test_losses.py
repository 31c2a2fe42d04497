from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

import pytest

from attention_tuner.db import Store, load_table
from attention_tuner.db.losses import Loss, Losses
from attention_tuner.kernel_templates.errors import TunerError
from attention_tuner.kernel_templates.outcome import BestConfig

Make = Callable[..., BestConfig]
HYBRID, LIKE_IT, NEAR = "1x512@16384,63x1@32768", "1x513@16384,63x1@32768", "1x1024@16384,63x1@32768"
H200 = "NVIDIA H200"


def test_the_expected_loss_is_the_one_measured_nearest():
    losses = Losses([Loss(H200, "neighbour", 1.0, 5, 0.01), Loss(H200, "neighbour", 8.0, 5, 0.08),
                     Loss(H200, "bucket", 0.0, 5, -0.001)])
    assert [losses.expect(H200, "neighbour", d) for d in (0.5, 1, 2, 3, 5, 8)] == [0.01, 0.01, 0.01, 0.08, 0.08, 0.08]
    assert losses.expect(H200, "bucket", 0.0) == 0.0
    assert losses.expect(H200, "exact", 0.0) == 0.0
    assert losses.expect("NVIDIA H100", "neighbour", 1.0) is None


def test_no_loss_is_expected_farther_away_than_was_measured():
    losses = Losses([Loss(H200, "heuristic", 4.0, 5, 0.2), Loss(H200, "heuristic", 16.0, 5, 0.3),
                     Loss(H200, "neighbour", 1.0, 5, 0.01)])
    assert [losses.expect(H200, "heuristic", d) for d in (0, 4, 9, 16)] == [0.2, 0.2, 0.3, 0.3]
    assert [losses.expect(H200, "heuristic", d) for d in (16.5, 21, 999)] == [None] * 3
    assert losses.expect(H200, "neighbour", 1.5) is None
    # No shape is tuned there.
    assert losses.expect(H200, "heuristic", None) is None


@pytest.mark.parametrize("changes", [{"source": "exact"}, {"source": "x"}, {"upto": 3.0}, {"shapes": 0},
                                     {"loss": float("nan")}])
def test_an_impossible_loss_is_refused(changes: dict[str, Any]):
    with pytest.raises(TunerError):
        Loss(**({"gpu_name": H200, "source": "bucket", "upto": 0.0, "shapes": 1, "loss": 0.1} | changes))


@pytest.mark.parametrize(("column", "value"), [("source", "'luck'"), ("upto", "3"), ("loss", "'x'"), ("shapes", "0")])
def test_a_poisoned_loss_is_set_aside_and_named(store: Store, make_config: Make, column: str, value: str):
    store.put_losses(H200, [Loss(H200, "bucket", 0.0, 1, 0.1), Loss(H200, "neighbour", 1.0, 1, 0.1)])
    connection = sqlite3.connect(store.name)
    connection.execute(f"UPDATE losses SET {column} = {value} WHERE id = 1")
    connection.commit()
    connection.close()
    with pytest.warns(UserWarning, match="row 1 of table losses"):
        assert [loss.source for loss in store.losses()] == ["neighbour"]
    with pytest.warns(UserWarning, match="row 1 of table losses") as caught:
        load_table(store.name)
    assert len(caught) == 1
