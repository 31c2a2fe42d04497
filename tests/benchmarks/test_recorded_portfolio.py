"""Portfolios of a recording are those of the times that it holds."""

from __future__ import annotations

import recorded_portfolio

from attention_tuner.tuner.portfolio import curve
from attention_tuner.tuner.recording import Recording


def test_the_curve_ends_with_the_optimum_of_every_recorded_task() -> None:
    recording = Recording.load("h200_llama_3_8b")
    group = recorded_portfolio.group_of(recording, 128)
    assert len(group.shapes) == 2
    one, *_, all_of_them = curve(group, 2)
    assert all_of_them.losses == (0.0, 0.0)
    assert one.worst > 0
    for pick in all_of_them.picks:
        task = next(t for t in recording.tasks if (str(t.batch), t.page_size) == (pick.shape.best.batch, 128))
        optimum = recording.optimum(task)
        assert optimum is not None
        assert pick.variant == optimum.variant
