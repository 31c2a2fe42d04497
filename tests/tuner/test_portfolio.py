from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from portfolio_samples import (
    A2,
    DEFAULT,
    ENVIRONMENT,
    GPU,
    LARGE,
    MIDDLE,
    SMALL,
    SPEC,
    A,
    B,
    C,
    add_outcomes,
    add_trials,
    best_config,
    full_check,
    tuned,
)

from attention_tuner.db import ConfigTable, Store, export_json, import_json
from attention_tuner.kernel_templates.outcome import Failed, Regime, Verdict
from attention_tuner.kernel_templates.registry import template_of
from attention_tuner.tuner.portfolio import (
    Group,
    choose,
    curve,
    fewest_kernels,
    groups,
    leave_one_out,
    portfolios_of,
    served_configs,
)

# A and A2 share a kernel. B is best nowhere, and never far off.
TIMES = {
    SMALL: {A: 1.00, A2: 1.20, B: 1.10, C: 2.00, DEFAULT: 4.0},
    MIDDLE: {A: 2.50, A2: 2.00, B: 2.10, C: 2.40},
    LARGE: {A: 8.00, A2: 7.00, B: 4.40, C: 4.00},
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tuned(tmp_path, TIMES)) as opened:
        yield opened


def group_of(store: Store, *, checked: bool = False) -> Group:
    (group,) = groups(store, store.best_configs(), checked=checked)
    return group


def test_variants_of_one_kernel_count_once_and_each_shape_gets_the_fastest(store: Store) -> None:
    group = group_of(store)
    assert (group.spec, group.page_size, group.incomparable) == (SPEC, 16, 0)
    two = choose(group, 2)
    assert set(two.kernels) == {template_of(v).code_key(v) for v in (A, C)}
    assert {pick.shape.batch: pick.variant for pick in two.picks} == {SMALL: A, MIDDLE: A2, LARGE: C}
    assert (two.worst, two.mean, two.num_variants) == (0.0, 0.0, 3)


def test_a_portfolio_of_one_kernel_has_the_least_worst_loss(store: Store) -> None:
    (one,) = curve(group_of(store), 1)
    assert {pick.variant for pick in one.picks} == {B}
    assert sorted(one.losses) == pytest.approx([0.05, 0.1, 0.1])
    assert one.worst == pytest.approx(0.1)


def test_the_curve_ends_where_nothing_is_lost(store: Store) -> None:
    group = group_of(store)
    assert [len(each.kernels) for each in curve(group, 16)] == [1, 2]
    assert [fewest_kernels(group, limit) for limit in (0.0, 0.02, 0.2)] == [2, 2, 1]


def test_losses_are_of_trials_but_the_winner_of_a_decided_race_has_none(store: Store) -> None:
    # The race found C, whose one trial was slower than that of B.
    store.put_best(best_config(SMALL, C))
    (shape,) = [shape for shape in group_of(store).shapes if shape.batch == SMALL]
    assert (shape.loss(C), shape.loss(A), shape.loss(A.replace(num_warps=2))) == (0.0, 0.0, None)
    assert shape.loss(B) == pytest.approx(0.1)
    store.put_best(best_config(SMALL, C, verdict=Verdict.AMBIGUOUS))
    (shape,) = [shape for shape in group_of(store).shapes if shape.batch == SMALL]
    assert shape.loss(C) == pytest.approx(1.0)


def test_a_shape_is_served_by_its_best_config_or_by_a_config_made_of_a_trial(store: Store) -> None:
    portfolio = choose(group_of(store), 1)
    configs = {config.batch: config for config in portfolio.configs()}
    small = configs[str(SMALL)]
    assert (small.variant, small.timing.median_ms, small.default_timing.median_ms) == (B, 1.1, 4.0)
    assert (small.verdict, small.full_check) == (Verdict.AMBIGUOUS, False)
    best = {config.batch: config for config in store.best_configs()}
    assert set(choose(group_of(store), 2).configs()) == set(best.values())


def test_a_kernel_that_was_not_timed_on_a_shape_does_not_serve_it(tmp_path: Path) -> None:
    with Store.open(tuned(tmp_path, {SMALL: {A: 1.0}, MIDDLE: {B: 1.0}, LARGE: {B: 1.0}})) as store:
        one, two = curve(group_of(store), 4)
    assert [pick.loss for pick in one.picks if pick.variant is None] == [None]
    assert one.worst is None
    assert len(one.configs()) == 2
    assert two.worst == 0.0


def test_only_trials_of_the_latest_environment_are_compared(store: Store) -> None:
    # Another driver since: only one shape was tuned anew, and another source of the kernel is not compared either.
    newer = replace(ENVIRONMENT, driver="590.2")
    add_trials(store, LARGE, {A: 0.1}, environment=replace(newer, kernel_hash="before"))
    add_trials(store, LARGE, {B: 3.0, C: 4.0}, environment=newer)
    store.put_best(best_config(LARGE, B, 3.0, environment=newer))
    group = group_of(store)
    assert group.incomparable == 2
    (shape,) = group.shapes
    assert set(shape.timed) == {B, C}


def test_trials_of_another_regime_change_nothing(store: Store) -> None:
    before = group_of(store)
    warm, newer = Regime("graph", "warm"), replace(ENVIRONMENT, driver="590.2")
    for batch, times in TIMES.items():
        add_trials(store, batch, {variant: ms / 2 for variant, ms in times.items()}, newer, warm)
    assert group_of(store) == before


def test_variants_that_failed_last_or_cannot_run_any_more_are_not_chosen(store: Store) -> None:
    add_outcomes(store, SMALL, Failed(B, "time", "an illegal access"))
    add_trials(store, MIDDLE, {replace(B, template="gone"): 0.1})
    store.put_full_check(full_check(C, "failed"))
    with pytest.warns(UserWarning, match="failed the full check"):
        group = group_of(store)
    shapes = {shape.batch: set(shape.timed) for shape in group.shapes}
    assert shapes == {SMALL: {A, A2, DEFAULT}, MIDDLE: {A, A2, B}}


def test_only_fully_checked_variants_are_chosen_when_checked(store: Store) -> None:
    store.put_full_check(full_check(B))
    portfolio = choose(group_of(store, checked=True), 8)
    assert {pick.variant for pick in portfolio.picks} == {B}
    assert portfolio.worst == pytest.approx(0.1)
    configs = served_configs(store, [portfolio])
    assert [config.full_check for config in configs] == [True] * 3
    assert choose(group_of(store), 8).worst == 0.0


def test_a_left_out_shape_is_answered_from_the_others(store: Store) -> None:
    left_out = {each.shape.batch: each for each in leave_one_out(group_of(store), 2)}
    assert set(left_out) == set(TIMES)
    # The nearest of the others is the middle one, whose plan is not the best here.
    small = left_out[SMALL]
    assert (small.source, small.variant) == ("neighbour", A2)
    assert small.loss == pytest.approx(0.2)
    (alone,) = [replace(group_of(store), shapes=group_of(store).shapes[:1])]
    assert list(leave_one_out(alone)) == []


def test_an_exported_portfolio_is_what_a_lookup_answers(store: Store, tmp_path: Path) -> None:
    portfolios = portfolios_of(store, store.best_configs(), 1, checked=False)
    export_json(served_configs(store, portfolios), tmp_path / "few.json")
    table = ConfigTable.of(import_json(tmp_path / "few.json"))
    for batch in TIMES:
        answer = table.lookup(SPEC, batch, 16, GPU)
        assert (answer.source, answer.variant) == ("exact", B)
