from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cli_samples import Lines, config, database
from portfolio_samples import (
    DEFAULT,
    LARGE,
    MIDDLE,
    SMALL,
    SPEC,
    A,
    B,
    C,
    best_config,
    full_check,
    tuned,
    unified,
)

from attention_tuner.db import Store, import_json
from attention_tuner.search_spaces.models import model_layers

LAYER = ("--spec", SPEC.key())
TIMES = {
    SMALL: {A: 1.00, B: 1.10, C: 2.00, DEFAULT: 4.0},
    MIDDLE: {A: 2.20, B: 2.00, C: 2.40},
    LARGE: {A: 8.00, B: 4.40, C: 4.00},
}


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Lines:
    return Lines(capsys)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return tuned(tmp_path, TIMES)


def test_the_curve_and_what_serves_each_shape_are_shown(lines: Lines, path: str) -> None:
    assert lines.run("report", "portfolio", *LAYER, "--db", path) == 0
    assert "of 3 shapes none loses more than 2 % with 3 kernels" in lines.out
    assert "served by 3 kernels" in lines.out
    assert lines.run("report", "portfolio", "--kernels", "1", "--within", "15%", "--db", path) == 0
    assert "with 1 kernel\n" in lines.out
    assert "served by 1 kernel " in lines.out
    assert "median loss 10.0%, worst 10.0% on 8x1@4000" in lines.out
    assert "3 of 3 answers" in lines.out


def test_the_curve_is_a_document_too(lines: Lines, path: str) -> None:
    assert lines.run("report", "portfolio", "--gpu", "nvidia_h200", "--kernels", "2", "--db", path, "--json") == 0
    (group,) = json.loads(lines.out)["groups"]
    assert [each["kernels"] for each in group["curve"]] == [1, 2, 3]
    worst = [each["worst_loss"] for each in group["curve"]]
    assert worst == sorted(worst, reverse=True)
    assert (worst[0], worst[-1]) == (pytest.approx(0.1), 0)
    assert group["fewest_kernels"] == 3
    assert {pick["batch"] for pick in group["portfolio"]["picks"]} == {str(batch) for batch in TIMES}
    assert group["left_out"]["judged"] == 3


def test_what_cannot_be_compared_or_judged_is_told(lines: Lines, tmp_path: Path) -> None:
    path = tuned(tmp_path, {SMALL: {A: 1.0}, MIDDLE: {B: 1.0}})
    with Store.open(path) as store:
        store.put_best(config(store.best_configs()[0].gpu))
    assert lines.run("report", "portfolio", "--kernels", "1", *LAYER, "--db", path) == 0
    assert "unknown" in lines.out
    assert "none of them was timed here" in lines.out
    assert "no shape could be judged" in lines.out


def test_there_is_no_portfolio_without_trials(lines: Lines, tmp_path: Path) -> None:
    path = database(tmp_path, config())
    assert lines.run("report", "portfolio", "--db", path) == 2
    assert "tune first" in lines.err


def test_a_portfolio_is_exported_imported_and_looked_up(lines: Lines, path: str, tmp_path: Path) -> None:
    exported, other = tmp_path / "few.json", str(tmp_path / "other.db")
    assert lines.run("export", str(exported), "--portfolio", "1", "--provisional", "--db", path) == 0
    assert "3 configs written" in lines.out
    assert "1 kernel for 3 shapes, worst loss 10.0%, mean 6.7%" in lines.out
    assert {config.variant for config in import_json(exported)} == {B}
    arguments = ("--portfolio", "1", "--provisional", "--db", path, "--json")
    assert lines.run("export", str(exported), *arguments) == 0
    (portfolio,) = json.loads(lines.out)["portfolios"]
    assert {pick["batch"]: pick["loss"] for pick in portfolio["picks"]} == {
        str(SMALL): pytest.approx(0.1), str(MIDDLE): 0, str(LARGE): pytest.approx(0.1)}
    assert lines.run("import", str(exported), "--db", other) == 0
    asked = ("--batch", str(SMALL), "--gpu", "NVIDIA H200")
    assert lines.run("lookup", *LAYER, *asked, "--db", other, "--json") == 0
    (answer,) = json.loads(lines.out)["answers"]
    assert (answer["variant"], answer["source"]) == (B.key(), "exact")


def test_an_exported_portfolio_holds_what_passed_the_full_check(lines: Lines, path: str, tmp_path: Path) -> None:
    exported = tmp_path / "few.json"
    assert lines.run("export", str(exported), "--portfolio", "2", "--db", path) == 2
    assert "passed the full check" in lines.err
    assert not exported.exists()
    with Store.open(path) as store:
        store.put_full_check(full_check(C))
    assert lines.run("export", str(exported), "--portfolio", "2", "--db", path, "--json") == 0
    document = json.loads(lines.out)
    assert (document["configs"], document["provisional"], document["left_out"]) == (3, 0, 0)
    assert document["portfolios"][0]["kernels"] == 1
    assert {config.variant for config in import_json(exported)} == {C}


def test_page_sizes_are_compared_for_a_model(lines: Lines, tmp_path: Path) -> None:
    (spec,) = model_layers("llama-3-8b")
    path = str(tmp_path / "pages.db")
    with Store.open(path) as store:
        for page_size, ms in ((16, 1.0), (128, 0.9)):
            best = best_config(SMALL, unified(16, page_size=page_size), ms)
            store.put_best(replace(best, shape=replace(best.shape, spec=spec)))
        lone = best_config(LARGE, unified(16, page_size=128), 1.0)
        store.put_best(replace(lone, shape=replace(lone.shape, spec=spec)))
    asked = ("report", "pages", "--model", "llama-3-8b", "--db", path)
    assert lines.run(*asked, "--batch", str(SMALL), "--lengths", "100,128", "--json") == 0
    document = json.loads(lines.out)
    assert document["layers"] == {spec.key(): 32}
    assert document["token_bytes"] == 128 << 10
    (comparison,) = document["comparisons"]
    assert [page["lost_bytes"] >> 17 for page in comparison["pages"]] == [12, 28]
    assert [page["sum_ms"] for page in comparison["pages"]] == pytest.approx([32.0, 28.8])
    assert lines.run(*asked, "--within", "15", "--page-size", "16,128") == 0
    assert "recommended are pages of 16" in lines.out
    assert "8x1@4000 is left out: not tuned with pages of 16" in lines.out
    assert lines.run(*asked, "--within", "3") == 0
    assert "recommended are pages of 128" in lines.out
    for options in (("--batch", "9x1@9"), ("--page-size", "16"), ("--tp", "8")):
        assert lines.run(*asked, *options) == 2
        assert "--page-size 16,128" in lines.err
