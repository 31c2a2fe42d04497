from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import attention_tuner.db.table as module
from attention_tuner.db import ConfigTable
from attention_tuner.kernel_templates.batch import Batch, BatchBucket
from attention_tuner.kernel_templates.errors import TunerError
from attention_tuner.kernel_templates.gpu import INTERPRETER, Gpu
from attention_tuner.kernel_templates.heuristic import heuristic_variant
from attention_tuner.kernel_templates.outcome import BestConfig, Environment, Regime, Timing
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.template import template_of, why_invalid

Make = Callable[..., BestConfig]
HYBRID = "1x512@16384,63x1@32768"


def ask(table: ConfigTable, config: BestConfig, batch: str | BatchBucket, gpu: Gpu | None = None):
    asked = Batch.parse(batch) if isinstance(batch, str) else batch
    return table.lookup(config.shape.spec, asked, config.variant.page_size, gpu or config.gpu)


def test_the_four_sources(make_config: Make):
    config = make_config(HYBRID)
    table = ConfigTable.of([config])
    exact, bucket = ask(table, config, HYBRID), ask(table, config, "1x513@16384,63x1@32768")
    assert (exact.source, exact.variant, exact.config, exact.distance) == ("exact", config.variant, config, 0)
    assert (bucket.source, bucket.config, bucket.distance) == ("bucket", config, 0)
    assert ask(table, config, config.shape.bucket).source == "bucket"
    neighbour = ask(table, config, "1x1024@16384,63x1@32768")
    assert (neighbour.source, neighbour.config, neighbour.distance) == ("neighbour", config, 1)
    heuristic = ask(ConfigTable.of([]), config, HYBRID)
    assert (heuristic.source, heuristic.config, heuristic.stale, heuristic.distance) == ("heuristic", None, False, None)
    assert heuristic.variant == heuristic_variant(config.shape.spec, config.shape.bucket, 16, config.gpu)


def test_the_nearest_neighbour_answers(make_config: Make):
    near, far = make_config("2x512@16384,63x1@32768"), make_config("8x512@16384,63x1@32768")
    for order in ([near, far], [far, near]):
        assert ask(ConfigTable.of(order), near, HYBRID).config == near


def test_a_neighbour_settles_to_the_parts_that_are_there(make_config: Make):
    config = make_config(HYBRID)
    answer = ask(ConfigTable.of([config]), config, "64x1@32768")
    assert answer.source == "neighbour"
    assert answer.variant == config.variant.replace(block_m=16, block_n=32)
    assert answer.variant == template_of(config.variant).settle(config.variant, BatchBucket.of(Batch.parse("64x1@9")))


def test_a_neighbour_without_the_asked_part_has_nothing_to_say(make_config: Make):
    decode, chunk = make_config("64x1@32768"), make_config("1x512@16384")
    assert ask(ConfigTable.of([decode, chunk]), decode, HYBRID).source == "heuristic"


@pytest.mark.parametrize("gpu", [
    Gpu("NVIDIA H100", (9, 0), 132, 232448, 62914560),
    Gpu("NVIDIA H200", (9, 0), 66, 232448, 62914560),
    Gpu("NVIDIA H200", (10, 0), 132, 232448, 62914560),
])
def test_gpus_do_not_share_configs(make_config: Make, gpu: Gpu):
    config = make_config()
    assert ask(ConfigTable.of([config]), config, HYBRID, gpu).source == "heuristic"


def test_layers_and_pages_do_not_share_configs(make_config: Make):
    config = make_config()
    table = ConfigTable.of([config])
    batch = Batch.parse(HYBRID)
    assert table.lookup(AttentionSpec(32, 8, 128, "float16"), batch, 16, config.gpu).source == "heuristic"
    assert table.lookup(config.shape.spec, batch, 32, config.gpu).source == "heuristic"


def test_the_driver_of_the_asking_gpu_does_not_matter(make_config: Make):
    config = make_config()
    assert ask(ConfigTable.of([config]), config, HYBRID, replace(config.gpu, driver="")).source == "exact"


def test_interpreter_and_gpu_do_not_share_configs(make_config: Make):
    interpreted = Timing((5.0,), Regime("interpreter"))
    right = make_config(gpu=INTERPRETER, timing=interpreted)
    posing_as_gpu = make_config(timing=interpreted)
    posing_as_interpreter = make_config(gpu=INTERPRETER)
    named_alike = replace(INTERPRETER, name="NVIDIA H200", num_sms=132)
    table = ConfigTable.of([posing_as_gpu, posing_as_interpreter, replace(right, gpu=named_alike)])
    assert ask(table, posing_as_gpu, HYBRID).source == "heuristic"
    assert ask(table, posing_as_interpreter, HYBRID).source == "heuristic"
    assert ask(ConfigTable.of([right]), right, HYBRID).source == "exact"


def test_a_variant_that_cannot_run_here_is_passed_over(make_config: Make):
    good = make_config("8x512@16384,63x1@32768")
    variant = good.variant
    bad = [
        make_config(variant=replace(variant, template="gone")),
        make_config(variant=variant.replace(block_m=17)),
        make_config(variant=variant.replace(kv_load="tma")),
        make_config(variant=replace(variant, values=variant.values[1:])),
        make_config(variant=variant.replace(block_m="wide")),
    ]
    answer = ask(ConfigTable.of([*bad, good]), good, HYBRID)
    assert (answer.source, answer.config) == ("neighbour", good)
    assert ask(ConfigTable.of(bad), good, HYBRID).source == "heuristic"


def test_stale_configs_are_served_behind_fresh_ones(make_config: Make):
    fresh = make_config("1x513@16384,63x1@32768")
    now = fresh.environment
    for change in ({"kernel_hash": "x"}, {"triton": "3.6.0"}, {"driver": "550"}):
        stale = make_config(environment=replace(now, **change))
        alone = ask(ConfigTable.of([stale], lambda template, gpu: now), stale, HYBRID)
        assert (alone.source, alone.stale) == ("exact", True)
        both = ask(ConfigTable.of([stale, fresh], lambda template, gpu: now), stale, HYBRID)
        assert (both.source, both.stale, both.config) == ("bucket", False, fresh)
        assert not ask(ConfigTable.of([stale]), stale, HYBRID).stale


def precedence(config: BestConfig) -> list[tuple[str, BestConfig]]:
    """Whose config answers `HYBRID`, the first before all others."""
    stale = replace(config.environment, triton="3.6.0")
    like_it, near = "1x513@16384,63x1@32768", "2x512@16384,63x1@32768"

    def at(batch: str, ms: float, **changes: Any) -> BestConfig:
        timing = replace(config.timing, samples_ms=(ms,))
        return replace(config, shape=replace(config.shape, bucket=BatchBucket.of(Batch.parse(batch))), batch=batch,
                       timing=timing, **changes)

    return [
        ("database", at(HYBRID, 9.0, full_check=False)),
        ("shipped", at(HYBRID, 8.0)),
        ("database", at(like_it, 7.0)),
        ("shipped", at(like_it, 6.0)),
        ("database", at(HYBRID, 5.0, environment=stale)),
        ("shipped", at(HYBRID, 4.0, environment=stale)),
        ("database", at(like_it, 3.0, environment=stale)),
        ("shipped", at(like_it, 2.0, environment=stale)),
        ("database", at(near, 1.0)),
        ("shipped", at(near, 0.5)),
    ]


def test_the_users_own_come_before_those_that_ship(make_config: Make):
    config = make_config(HYBRID)
    rows = precedence(config)
    expected = [("exact", False)] * 2 + [("bucket", False)] * 2 + [("exact", True)] * 2 + [("bucket", True)] * 2
    expected += [("neighbour", False)] * 2
    for index, (source, stale) in enumerate(expected):
        own, shipped = ([row for whose, row in rows[index:] if whose == origin] for origin in ("database", "shipped"))
        table = ConfigTable.of(own, lambda template, gpu: config.environment, shipped)
        answer = ask(table, config, HYBRID)
        assert (answer.origin, answer.config) == rows[index]
        assert (answer.source, answer.stale) == (source, stale)
    assert ask(ConfigTable.of([]), config, HYBRID).origin is None


def test_what_ships_for_another_gpu_does_not_answer(make_config: Make):
    config = make_config(HYBRID)
    table = ConfigTable.of([], None, [config])
    assert ask(table, config, HYBRID).origin == "shipped"
    for other in ({"name": "NVIDIA H100"}, {"num_sms": 66}, {"capability": (10, 0)}):
        assert ask(table, config, HYBRID, replace(config.gpu, **other)).source == "heuristic"


def test_another_torch_is_not_stale(make_config: Make):
    config = make_config()
    now = replace(config.environment, torch="2.11.0")
    assert not ask(ConfigTable.of([config], lambda template, gpu: now), config, HYBRID).stale


def test_the_environment_is_that_of_the_template_on_the_asking_gpu(make_config: Make):
    config = make_config()
    asked: list[tuple[str, str]] = []

    def environment_of(template: str, gpu: Gpu) -> Environment:
        asked.append((template, gpu.driver))
        return config.environment

    ask(ConfigTable.of([config], environment_of), config, HYBRID, replace(config.gpu, driver="999"))
    assert asked == [("fused", "999")]


def test_among_configs_of_a_bucket_checked_and_served_regimes_come_first(make_config: Make):
    graph = make_config()
    eager = make_config(timing=replace(graph.timing, regime=Regime("eager")))
    warm = make_config(timing=replace(graph.timing, regime=Regime("graph", "warm")))
    provisional = make_config(full_check=False)
    for first, second in [(graph, eager), (graph, warm), (warm, eager), (eager, provisional)]:
        for order in ([first, second], [second, first]):
            assert ask(ConfigTable.of(order), graph, HYBRID).config == first


def test_the_id_stands_for_the_content(make_config: Make):
    configs = [make_config(), make_config("64x1@4096"), make_config(full_check=False)]
    table = ConfigTable.of(configs)
    shuffled = random.Random(0).sample(configs, 3)
    assert ConfigTable.of(shuffled).id == table.id
    assert len(table) == 3
    ids = {ConfigTable.of(part).id for part in ([], configs[:1], configs[:2], configs)}
    other_gpu = ConfigTable.of([make_config(gpu=replace(configs[0].gpu, driver="1"))]).id
    assert len(ids | {other_gpu}) == 5
    # Whose a config is decides which one answers.
    of_both = {ConfigTable.of(configs[:2], None, configs[2:]).id, ConfigTable.of(configs[2:], None, configs[:2]).id}
    assert len(ids | of_both) == 6
    assert ConfigTable.of(configs[:1], None, configs[1:]).configs == tuple(configs)


def test_a_step_with_a_new_batch_asks_for_nothing_again(make_config: Make, monkeypatch: pytest.MonkeyPatch):
    config = make_config(HYBRID)
    configs = [make_config(f"1x512@16384,{n}x1@32768") for n in range(2, 64)]
    calls: Counter[str] = Counter()

    def environment_of(template: str, gpu: Gpu) -> Environment:
        calls["environment"] += 1
        return config.environment

    def judge(*asked: Any) -> str | None:
        calls["valid"] += 1
        return why_invalid(*asked)

    monkeypatch.setattr(module, "why_invalid", judge)
    table = ConfigTable.of([config, *configs], environment_of)
    first = ask(table, config, "1x513@16384,63x1@32768")
    before = calls.copy()
    for context in range(16384, 16484):
        assert ask(table, config, f"1x512@{context},63x1@32767") is first
    assert calls == before
    for batch in ("1x900@16384,63x1@32768", "1x512@16384,9x1@7", "4x1@32768"):
        assert ask(table, config, batch).source == "neighbour"
    assert calls["environment"] == 1
    assert calls["valid"] < 2 * len(configs)


def test_exact_is_the_batch_and_not_how_it_is_written(make_config: Make):
    config = make_config("1x512@16384,60x1@32768, 3x1@32768")
    other = make_config("1x513@16384,63x1@32768", full_check=False)
    table = ConfigTable.of([other, config])
    assert (ask(table, config, HYBRID).source, ask(table, config, HYBRID).config) == ("exact", config)
    assert (ask(table, config, other.batch).source, ask(table, config, other.batch).config) == ("exact", other)
    assert ask(table, config, "1x514@16384,63x1@32768").config == config
    assert ask(table, config, config.shape.bucket).config == config


def test_a_triton_of_unknown_version_is_stale(make_config: Make):
    config = make_config()
    unknown = replace(config.environment, triton="")
    for measured in (config, replace(config, environment=unknown)):
        assert ask(ConfigTable.of([measured], lambda template, gpu: unknown), config, HYBRID).stale


def test_configs_of_a_broken_template_are_set_aside(make_config: Make):
    config = make_config()

    def environment_of(template: str, gpu: Gpu) -> Environment:
        raise TunerError("its module is gone")

    table = ConfigTable.of([config, make_config("64x1@4096")], environment_of)
    with pytest.warns(UserWarning, match="configs of template 'fused' are set aside: its module is gone") as caught:
        assert [ask(table, config, batch).source for batch in (HYBRID, "64x1@4096")] == ["heuristic", "heuristic"]
    assert len(caught) == 1


def test_of_two_buckets_equally_near_the_fresh_one_answers(make_config: Make):
    stale = make_config("1x512@16384,32x1@65536", environment=replace(make_config().environment, triton="3.6.0"))
    fresh = make_config("1x512@16384,128x1@16384")
    for order in ([stale, fresh], [fresh, stale]):
        answer = ask(ConfigTable.of(order, lambda template, gpu: fresh.environment), fresh, HYBRID)
        assert (answer.config, answer.distance, answer.stale) == (fresh, 2, False)


def test_answers_are_remembered(make_config: Make):
    config = make_config()
    table = ConfigTable.of([config])
    assert ask(table, config, HYBRID) is ask(table, config, HYBRID)


batches = st.builds(Batch, st.lists(st.tuples(st.sampled_from((1, 2, 8, 9, 64, 512, 4096)), st.integers(0, 100_000)),
                                    min_size=1, max_size=20).map(tuple))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=batches, page_size=st.sampled_from((16, 48, 128)), arch=st.sampled_from(((8, 0), (9, 0), (0, 0))))
def test_every_answer_is_valid_here(make_config: Make, batch: Batch, page_size: int, arch: tuple[int, int]):
    spec = AttentionSpec(32, 8, 128)
    gpu = Gpu("any", arch, 132, 166912, 0)
    regime = Regime("interpreter" if gpu.is_interpreter else "graph")
    configs = [
        make_config(tuned, gpu=gpu, timing=Timing((1.0,), regime),
                    variant=replace(make_config().variant, page_size=page_size).replace(kv_load=load, block_n=block_n))
        for tuned in (HYBRID, "64x1@4096", "1x2048@0") for load in ("pointer", "tma") for block_n in (16, 128)
    ]
    answer = ConfigTable.of(configs).lookup(spec, batch, page_size, gpu)
    assert why_invalid(answer.variant, spec, gpu) is None
    assert answer.variant.page_size == page_size
    assert template_of(answer.variant).settle(answer.variant, BatchBucket.of(batch)) == answer.variant
