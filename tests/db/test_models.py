from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_tuner.db import Setting, Store, TrialRecord
from attention_tuner.db.models import UNREADABLE, BestRow, TrialRow, config_of, trial_of
from attention_tuner.db.records import utc_now
from attention_tuner.kernel_templates.batch import Batch, Shape
from attention_tuner.kernel_templates.gpu import Gpu
from attention_tuner.kernel_templates.outcome import (
    BestConfig,
    Check,
    Environment,
    Failed,
    Regime,
    Skipped,
    StaticFacts,
    Timed,
    Timing,
    Verdict,
    Wrong,
)
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.variant import Variant

names = st.from_regex(r"[a-z_]{1,12}", fullmatch=True)
texts = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=30)
sizes = st.integers(1, 10**6)
variants = st.builds(
    lambda template, values: Variant.of(template, 16, values),
    names,
    st.dictionaries(names.filter(lambda name: name != "page_size"), sizes | names, max_size=5),
)
regimes = st.builds(Regime, st.sampled_from(("graph", "eager", "interpreter")), st.sampled_from(("cold", "warm")),
                    st.sampled_from(("burst", "sustained")))
times = st.floats(1e-6, 1e6)
timings = st.builds(Timing, st.lists(times, min_size=1, max_size=5).map(tuple), regimes, st.floats(0, 10))
checks = st.builds(Check, st.floats(0, allow_nan=False), st.sampled_from(("quick", "full")), texts)
outcomes = st.one_of(
    st.builds(Timed, variants, checks, timings),
    st.builds(Wrong, variants, checks),
    st.builds(Failed, variants, st.sampled_from(("compile", "check", "time")), texts),
    st.builds(Skipped, variants, texts),
)
specs = st.builds(lambda group, heads, dim, dtype, scale: AttentionSpec(group * heads, heads, dim, dtype, scale=scale),
                  st.integers(1, 71), st.integers(1, 16), st.sampled_from((64, 128, 256)),
                  st.sampled_from(("bfloat16", "float16")), st.none() | st.floats(0.01, 2))
batches = st.builds(Batch, st.lists(st.tuples(st.integers(1, 600), st.integers(0, 40000)), min_size=1,
                                    max_size=6).map(tuple))
gpus = st.builds(Gpu, texts.filter(str.strip), st.tuples(st.integers(0, 12), st.integers(0, 9)), sizes, sizes, sizes,
                 texts)
environments = st.builds(Environment, texts, texts, texts, texts)
facts = st.none() | st.builds(StaticFacts, sizes, sizes, sizes, texts, texts)
places = st.builds(Setting, specs, batches, st.just(16), gpus, regimes)
trials = st.builds(TrialRecord, st.just(1), places, environments, outcomes, facts, texts)
configs = st.builds(
    lambda spec, batch, *rest: BestConfig(Shape.of(spec, batch), *rest, batch=str(batch), measured_at=utc_now()),
    specs, batches, gpus, variants, timings, timings, st.sampled_from(Verdict), st.booleans(), environments)


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory):
    with Store.open(tmp_path_factory.mktemp("db") / "tuner.db") as store:
        store.start_run({})
        yield store


@settings(max_examples=25, deadline=None)
@given(trial=trials)
def test_a_trial_comes_back_as_it_was(shared_store: Store, trial: TrialRecord):
    shared_store.add_trial(trial)
    setting = trial.setting
    found = shared_store.trials(setting.spec, setting.page_size, setting.gpu, str(setting.batch))
    assert found[-1] == trial


@settings(max_examples=25, deadline=None)
@given(config=configs)
def test_a_best_config_comes_back_as_it_was(shared_store: Store, config: BestConfig):
    shared_store.put_best(config)
    found = shared_store.best_configs(spec=config.shape.spec, bucket=config.shape.bucket, page_size=16,
                                      gpu_name=config.gpu.name, regime=config.timing.regime)
    assert config in found
    assert found[0].speedup > 0


def test_nan_and_infinity_come_back(store: Store, make_trial: Callable[..., TrialRecord], setting: Setting):
    store.start_run({})
    variant = make_trial().outcome.variant
    for ratio in (math.nan, math.inf):
        store.add_trial(make_trial(Wrong(variant, Check(ratio))))
    first, second = (trial.outcome for trial in store.trials(setting.spec, 16, setting.gpu))
    assert isinstance(first, Wrong)
    assert math.isnan(first.check.worst_ratio)
    assert second == Wrong(variant, Check(math.inf))


def test_characters_that_a_database_refuses_are_replaced(store: Store, make_trial: Callable[..., TrialRecord],
                                                      setting: Setting):
    store.start_run({})
    store.add_trial(make_trial(Failed(make_trial().outcome.variant, "compile", "bad \udcff byte \0 here")))
    (trial,) = store.trials(setting.spec, 16, setting.gpu)
    assert isinstance(trial.outcome, Failed)
    assert trial.outcome.reason == "bad ? byte ? here"


def test_facts_without_registers_and_stack_are_read_back(make_trial: Callable[..., TrialRecord]):
    record = dataclasses.replace(make_trial(), facts=StaticFacts(1024, None, None, "mma.sync", "c0de"))
    assert trial_of(TrialRow.of(record)) == record


@pytest.mark.parametrize(("column", "value"), [
    ("spec", "nothing"), ("batch", "3 sequences"), ("variant", "?"), ("variant", None), ("regime", "graph"),
    ("gpu_capability", "9"), ("outcome", "fine"), ("samples_ms", "[0.1, "), ("samples_ms", "[]"),
    ("samples_ms", '["a"]'), ("samples_ms", None), ("plan_ms", None), ("check_level", None), ("code_hash", None),
])
def test_reading_a_poisoned_trial_raises_a_caught_error(make_trial: Callable[..., TrialRecord], column: str,
                                                     value: object):
    row = TrialRow.of(make_trial())
    assert trial_of(row) == make_trial()
    setattr(row, column, value)
    with pytest.raises(UNREADABLE):
        trial_of(row)


@pytest.mark.parametrize(("column", "value"), [
    ("spec", ""), ("bucket", "1-2"), ("batch", "garbage"), ("batch", "1x1@1"), ("plan_ms", -1.0),
    ("variant", "unified:page_size=32,block_m=16"), ("verdict", "good"),
    ("samples_ms", "7"), ("default_samples_ms", "[-1]"), ("default_regime", "x-y-z"), ("gpu_num_sms", "many"),
])
def test_reading_a_poisoned_config_raises_a_caught_error(make_config: Callable[..., BestConfig], column: str,
                                                      value: object):
    row = BestRow.of(make_config())
    assert config_of(row) == make_config()
    setattr(row, column, value)
    with pytest.raises(UNREADABLE):
        config_of(row)
