from __future__ import annotations

import json
from pathlib import Path

import pytest
from portfolio_samples import MIDDLE, SMALL, A, B, tuned

from attention_tuner.db import Store
from attention_tuner.tuner.console.portfolio_report import (
    Findings,
    percent,
    portfolios_document,
    print_findings,
    print_portfolios,
)
from attention_tuner.tuner.portfolio import choose, curve, fewest_kernels, groups, leave_one_out


def findings(folder: Path, size: int) -> Findings:
    with Store.open(tuned(folder, {SMALL: {A: 1.0, B: 1.1}, MIDDLE: {A: 2.4, B: 2.0}})) as store:
        (group,) = groups(store, store.best_configs())
    return Findings(curve(group, 8), choose(group, size), size, 5.0, fewest_kernels(group, 0.05),
                    list(leave_one_out(group, size)))


def test_a_loss_is_a_percentage_or_unknown() -> None:
    assert (percent(0.0153), percent(0), percent(None)) == ("1.5%", "0.0%", "unknown")


def test_the_curve_names_the_batch_that_loses_most(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_findings("tuner.db", [findings(tmp_path, 1)], as_json=False)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "1 1 2 10.0% 5.0% 8x1@1100" in lines
    assert "2 2 2 0.0% 0.0%" in lines
    assert "of 2 shapes none loses more than 5 % with 2 kernels" in lines


def test_the_document_has_what_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = findings(tmp_path, 1)
    print_findings("tuner.db", [found], as_json=True)
    (group,) = json.loads(capsys.readouterr().out)["groups"]
    assert [point["mean_loss"] for point in group["curve"]] == pytest.approx([0.05, 0.0])
    assert [pick["variant"] for pick in group["portfolio"]["picks"]] == [B.key()] * 2
    assert group["left_out"]["worst_loss"] == pytest.approx(0.2)


def test_exported_portfolios_are_told_and_none_are_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    portfolio = findings(tmp_path, 1).portfolio
    print_portfolios([portfolio])
    assert "1 kernel for 2 shapes, worst loss 10.0%, mean 5.0%" in capsys.readouterr().out
    assert portfolios_document([portfolio])["portfolios"][0]["kernels"] == 1
    print_portfolios([])
    assert capsys.readouterr().out == ""
    assert portfolios_document([]) == {}
