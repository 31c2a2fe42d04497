from __future__ import annotations

import importlib
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from attention_tuner.db import Setting, Store, TrialRecord, export_json, load_table
from attention_tuner.db.checks import FullCheckRow, FullChecks, check_of
from attention_tuner.db.models import UNREADABLE
from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.gpu import Gpu
from attention_tuner.kernel_templates.outcome import (
    BestConfig,
    CaseResult,
    Check,
    Environment,
    Failed,
    FullCheck,
    Wrong,
)

Make = Callable[..., BestConfig]
PASSED = CaseResult("one token", "passed", 0.25)
FAILED = CaseResult("large logits", "failed", None, "row 3 \0")
UNRUN = CaseResult("long contexts", "not run", None, "it needs a GPU")


def full_check(config: BestConfig, *cases: CaseResult, day: int = 1, **environment: str) -> FullCheck:
    return FullCheck(config.shape.spec, config.variant, config.gpu.name, replace(config.environment, **environment),
                     cases or (PASSED, UNRUN), f"2026-12-{day:02}T00:00:00+00:00")


@pytest.fixture
def quick(make_config: Make) -> BestConfig:
    return make_config(full_check=False)


def test_a_full_check_comes_back_as_it_was(store: Store, quick: BestConfig):
    failed = full_check(quick, PASSED, FAILED, UNRUN, triton="3.6.0")
    store.put_full_check(full_check(quick), failed)
    shown = replace(failed, cases=(PASSED, replace(FAILED, reason="row 3 ?"), UNRUN))
    assert store.full_checks() == [full_check(quick), shown]
    assert store.full_checks(spec=quick.shape.spec, variant=quick.variant, gpu_name="NVIDIA H200") == [
        full_check(quick), shown]
    assert store.full_checks(gpu_name="NVIDIA H100") == []
    assert store.full_checks(variant=quick.variant.replace(waves=4)) == []


def test_a_later_check_takes_the_place_of_an_earlier_one(store: Store, quick: BestConfig):
    store.put_full_check(full_check(quick, FAILED))
    store.put_full_check(full_check(quick, day=2))
    assert store.full_checks() == [full_check(quick, day=2)]


def test_a_pass_counts_for_every_shape_that_the_variant_won(store: Store, quick: BestConfig, make_config: Make):
    other = make_config("64x1@4096", full_check=False)
    another = make_config("64x1@8192", variant=quick.variant.replace(waves=4), full_check=False)
    store.put_best(quick, other, another)
    assert not any(config.full_check for config in store.best_configs())
    store.put_full_check(full_check(quick))
    assert {config.batch: config.full_check for config in store.best_configs()} == {
        quick.batch: True, other.batch: True, another.batch: False}
    served = [config for config in load_table(store.name).configs if config.shape == quick.shape]
    assert [config.full_check for config in served if config.variant == quick.variant] == [True]


@pytest.mark.parametrize("part", ["kernel_hash", "triton", "torch", "driver"])
def test_a_pass_in_another_environment_is_ignored_and_a_failure_is_not(store: Store, quick: BestConfig, part: str):
    store.put_best(quick)
    store.put_full_check(full_check(quick, **{part: "other"}))
    assert store.best_configs() == [quick]
    store.put_full_check(full_check(quick, FAILED, **{part: "other"}))
    with pytest.warns(UserWarning, match="set aside: .*'fused.* failed the full check's case 'large logits'"):
        assert store.best_configs() == []
    store.put_full_check(full_check(quick, day=2))
    assert store.best_configs() == [replace(quick, full_check=True)]


def test_a_failure_after_a_pass_counts(store: Store, quick: BestConfig):
    store.put_best(quick)
    store.put_full_check(full_check(quick), full_check(quick, FAILED, day=2, kernel_hash="new"))
    with pytest.warns(UserWarning, match="are set aside"):
        assert store.best_configs() == []


def test_a_failure_before_the_config_was_measured_is_ignored(store: Store, quick: BestConfig):
    store.put_best(replace(quick, measured_at="2026-12-05T00:00:00+00:00"))
    store.put_full_check(full_check(quick, FAILED, kernel_hash="old"))
    assert len(store.best_configs()) == 1


def test_the_latest_check_in_another_environment_decides(store: Store, quick: BestConfig):
    store.put_best(quick)
    store.put_full_check(full_check(quick, FAILED, triton="3.6.0"), full_check(quick, day=2, triton="3.7.0"))
    assert store.best_configs() == [quick]


@pytest.mark.parametrize("changes", [
    {"gpu": Gpu("NVIDIA H100", (9, 0), 132, 232448, 62914560, "580.1")},
    {"environment": Environment("0123456789abcdef", "3.9.0", "2.13.0", "590")},
])
def test_a_pass_on_another_gpu_or_driver_does_not_count(store: Store, quick: BestConfig, changes: dict[str, object]):
    store.put_best(replace(quick, **changes))
    store.put_full_check(full_check(quick))
    assert [config.full_check for config in store.best_configs()] == [False]


def test_a_config_that_failed_is_not_served(store: Store, make_config: Make):
    config = make_config()
    store.put_best(config)
    store.put_full_check(full_check(config, PASSED, FAILED))
    with pytest.warns(UserWarning, match="failed the full check's case 'large logits'") as caught:
        table = load_table(store.name)
    assert config not in table.configs
    answers = [table.lookup(config.shape.spec, asked, 16, config.gpu)
               for asked in (Batch.parse(config.batch), config.shape.bucket, Batch.parse("1x9@0,1x1@0"))]
    assert {answer.origin for answer in answers} <= {"shipped", None}
    assert len(caught) == 1


def test_a_shipped_config_that_failed_here_is_not_served(
    store: Store, make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = make_config()
    store.put_full_check(full_check(config, PASSED, FAILED))
    (tmp_path / "configs").mkdir()
    export_json([config], tmp_path / "configs" / "NVIDIA_H200.json")
    monkeypatch.setattr(importlib.import_module("attention_tuner.db.lookup.lookup"), "SHIPPED", tmp_path / "configs")
    with pytest.warns(UserWarning, match="are set aside"):
        assert load_table(store.name).configs == ()


def test_equal_layers_are_one_whatever_the_spelling_of_their_numbers(store: Store, quick: BestConfig):
    whole, decimal = (replace(quick, shape=replace(quick.shape, spec=replace(quick.shape.spec, logits_soft_cap=cap)))
                      for cap in (50, 50.0))  # fmt: skip
    store.put_best(whole)
    store.put_best(replace(decimal, measured_at="2027-01-01T00:00:00+00:00"))
    assert len(store.best_configs(spec=whole.shape.spec)) == len(store.best_configs()) == 1
    store.put_full_check(full_check(whole, FAILED, day=31))
    assert store.full_checks(spec=decimal.shape.spec) == store.full_checks() != []
    spec, bucket = decimal.shape.spec, decimal.shape.bucket
    with pytest.warns(UserWarning, match="are set aside"):
        answer = load_table(store.name).lookup(spec, bucket, quick.variant.page_size, quick.gpu)
    assert answer.source == "heuristic"


def test_an_imported_pass_holds_without_a_check(store: Store, make_config: Make):
    store.put_best(make_config())
    assert store.best_configs() == [make_config()]


def test_a_trial_whose_variant_failed_is_reused_as_wrong(store: Store, make_trial: Callable[..., TrialRecord],
                                                         setting: Setting):
    store.start_run({})
    timed = make_trial()
    other = make_trial(Failed(timed.outcome.variant.replace(block_m=64), "compile", "no"))
    store.add_trial(timed)
    store.add_trial(other)
    check = FullCheck(setting.spec, timed.outcome.variant, setting.gpu.name, timed.environment, (FAILED,), "2026")
    store.put_full_check(check, replace(check, variant=other.outcome.variant))
    first, second = store.known_trials(setting, lambda template, gpu: timed.environment).reusable
    assert second == other
    assert isinstance(first.outcome, Wrong)
    assert not first.outcome.check.passed
    assert first.outcome.check.level == "full"
    assert "large logits" in first.outcome.check.detail
    kept = FullChecks([replace(check, cases=(PASSED,))]).trial(timed)
    assert kept == timed
    assert isinstance(FullChecks([replace(check, cases=(replace(FAILED, worst_ratio=9.0),))]).trial(timed).outcome,
                      Wrong)
    assert Check(9.0).passed is False


@pytest.mark.parametrize(("column", "value"), [
    ("spec", "nothing"), ("variant", "?"), ("cases", "[["), ("cases", "[]"), ("cases", '[["x"]]'), ("cases", "7"),
    ("cases", '[["x", "fine", 0.5, ""]]'), ("result", "failed"),
])
def test_reading_a_poisoned_check_raises_a_caught_error(quick: BestConfig, column: str, value: str):
    row = FullCheckRow.of(full_check(quick))
    assert check_of(row) == full_check(quick)
    setattr(row, column, value)
    with pytest.raises(UNREADABLE):
        check_of(row)


def test_a_poisoned_row_is_set_aside_and_named(store: Store, quick: BestConfig):
    store.put_full_check(full_check(quick))
    connection = sqlite3.connect(store.name)
    connection.execute("UPDATE full_checks SET cases = 'x'")
    connection.commit()
    connection.close()
    with pytest.warns(UserWarning, match="row 1 of table full_checks"):
        assert store.full_checks() == []


def test_full_checks_are_read_only_where_there_is_something_to_judge(store: Store, quick: BestConfig):
    store.put_full_check(full_check(quick))
    connection = sqlite3.connect(store.name)
    connection.execute("UPDATE full_checks SET cases = 'x'")
    connection.commit()
    connection.close()
    # A warning about the unreadable check would be an error here.
    assert store.best_configs() == store.trials(quick.shape.spec, 16, quick.gpu) == []
    store.put_best(quick)
    assert store.best_configs(gpu_name="NVIDIA H100") == []
    with pytest.warns(UserWarning, match="row 1 of table full_checks"):
        assert store.best_configs() == [quick]
