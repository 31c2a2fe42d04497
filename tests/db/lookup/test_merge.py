from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from attention_tuner.db import Store, merged
from attention_tuner.db.lookup.merge import import_configs, merge_configs, merit
from attention_tuner.db.losses import Loss
from attention_tuner.kernel_templates.outcome import BestConfig, Regime, Timing
from attention_tuner.kernel_templates.sources import kernel_hash

Make = Callable[..., BestConfig]


@pytest.fixture
def config(make_config: Make) -> BestConfig:
    """A config of the present kernel source."""
    made = make_config()
    return replace(made, environment=replace(made.environment, kernel_hash=kernel_hash(made.variant.template)))


def timed(config: BestConfig, ms: float) -> BestConfig:
    return replace(config, timing=replace(config.timing, samples_ms=(ms,)))


def test_the_better_config_of_a_question_is_kept_in_any_order(config: BestConfig):
    outdated = replace(config.environment, kernel_hash="0123456789abcdef")
    ranked = [
        timed(config, 3.0),
        timed(config, 4.0),
        timed(replace(config, full_check=False), 2.0),
        timed(replace(config, environment=outdated), 1.0),
    ]
    for better, worse in itertools.combinations(ranked, 2):
        assert merged([better], [worse]) == merged([worse], [better]) == merged([worse, better]) == [better]


def test_the_earlier_of_two_equally_good_configs_is_kept(config: BestConfig):
    newer = replace(config, measured_at="2026-12-29T12:00:00+00:00")
    assert merged([newer], [config]) == [newer]
    assert merged([config], [newer]) == [config]


def test_configs_of_other_questions_are_kept(config: BestConfig, make_config: Make):
    others = [
        make_config("1x513@16384,63x1@32768"),
        replace(config, variant=replace(config.variant, page_size=128)),
        replace(config, gpu=replace(config.gpu, name="NVIDIA H100")),
        replace(config, gpu=replace(config.gpu, num_sms=66)),
        replace(config, timing=replace(config.timing, regime=Regime("eager"))),
        replace(config, shape=replace(config.shape, spec=replace(config.shape.spec, num_q_heads=64))),
    ]
    assert merged([config], others) == [config, *others]
    assert merged(others, [config]) == [*others, config]


def test_the_driver_and_triton_are_not_part_of_a_question(config: BestConfig):
    other = replace(config, gpu=replace(config.gpu, driver="590"),
                    environment=replace(config.environment, driver="590", triton="3.6.0"))
    assert merged([timed(config, 2.0)], [timed(other, 1.0)]) == [timed(other, 1.0)]


def test_configs_that_cannot_run_any_more_are_dropped(config: BestConfig):
    gone = timed(replace(config, variant=replace(config.variant, template="gone")), 0.01)
    unknown = timed(replace(config, variant=config.variant.replace(colour="red")), 0.01)
    assert merged([gone, config], [unknown]) == [config]
    assert merged([gone]) == []


def test_the_reason_for_dropping_a_config_is_given(config: BestConfig):
    outdated = replace(config.environment, kernel_hash="0123456789abcdef")
    best = timed(config, 3.0)
    cases = [
        (timed(config, 4.5), "it takes 4.5 ms, 50.0% more than the 3 ms of the one kept"),
        (timed(replace(config, full_check=False), 2.0), "it has passed the quick check only"),
        (timed(replace(config, environment=outdated), 1.0), "it was measured with another kernel source"),
        (replace(best, measured_at="2026-12-29T12:00:00+00:00"), "it is equally good and came later"),
    ]
    for worse, reason in cases:
        (choice,) = merge_configs([best], [worse]).choices
        assert (choice.kept, choice.dropped, choice.reason) == (best, worse, reason)
    (choice,) = merge_configs([replace(best, variant=replace(best.variant, template="gone"))]).choices
    assert (choice.kept, choice.reason) == (None, "it cannot run any more: its template is not installed")
    assert merge_configs([best], [best]).choices == []


def test_every_dropped_config_of_a_question_is_reported(config: BestConfig):
    three = [timed(config, ms) for ms in (3.0, 1.0, 2.0)]
    merge = merge_configs(three)
    assert merge.configs == [three[1]]
    assert [(choice.kept, choice.dropped) for choice in merge.choices] == [(three[1], three[0]), (three[1], three[2])]


Make = Callable[..., BestConfig]


def test_an_import_keeps_better_configs_and_stores_new_ones(store: Store, config: BestConfig, make_config: Make):
    slow, fast, other = timed(config, 2.0), timed(config, 1.0), make_config("64x1@4096")
    store.put_best(fast, other)
    lost = [Loss("NVIDIA H200", "bucket", 0.0, 2, 0.01)]
    merge = import_configs(store, [slow, other, make_config("32x1@4096")], lost, keep_better=True)
    assert merge.configs == [make_config("32x1@4096")]
    assert [(choice.kept, choice.dropped) for choice in merge.choices] == [(fast, slow)]
    assert set(store.best_configs()) == {fast, other, make_config("32x1@4096")}
    assert store.losses() == lost
    assert import_configs(store, [slow], [replace(lost[0], loss=0.5)]).configs == [slow]
    assert slow in store.best_configs()
    assert store.losses() == lost


def test_the_comparisons_of_an_import_grow_like_its_rows(
    store: Store, make_config: Make, monkeypatch: pytest.MonkeyPatch
):
    configs = [make_config(f"{n}x1@4096") for n in range(1, 101)]
    store.put_best(*configs[:50])
    counts: Counter[str] = Counter()
    equal = BestConfig.__eq__

    def count(self: BestConfig, other: object) -> bool:
        counts["comparisons"] += 1
        return equal(self, other)

    monkeypatch.setattr(BestConfig, "__eq__", count)
    merge = import_configs(store, [timed(config, 0.01) for config in configs], keep_better=True)
    assert len(merge.configs) == 100
    assert counts["comparisons"] <= 3 * len(configs)


def test_merit_puts_the_better_config_first(make_config: Make):
    def at(ms: float, regime: Regime = Regime("graph"), **changes: object) -> BestConfig:  # noqa: B008
        return make_config(timing=Timing((ms,), regime), **changes)

    ranked = [at(2.0), at(3.0), at(1.0, Regime("graph", "warm")), at(0.5, Regime("eager")), at(0.1, full_check=False)]
    assert sorted(random.Random(0).sample(ranked, len(ranked)), key=merit) == ranked


def test_merit_tells_equally_fast_variants_apart(make_config: Make):
    config = make_config()
    other = replace(config, variant=config.variant.replace(waves=4))
    assert merit(config) != merit(other)
    assert merit(config) == merit(replace(config, measured_at="2026-12-01T00:00:00+00:00"))
