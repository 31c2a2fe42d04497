from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attention_tuner.db import ConfigTable
from attention_tuner.db.answer import Chain
from attention_tuner.db.lookup import table as module
from attention_tuner.db.lookup.table import Place
from attention_tuner.db.losses import Loss, Losses
from attention_tuner.kernel_templates.batch import Batch, BatchBucket
from attention_tuner.kernel_templates.errors import InputError, NotTunedError, TunerError
from attention_tuner.kernel_templates.gpu import INTERPRETER, Gpu
from attention_tuner.kernel_templates.heuristic import heuristic_variant
from attention_tuner.kernel_templates.outcome import BestConfig, Environment, Regime, Timing
from attention_tuner.kernel_templates.registry import template_of, why_invalid
from attention_tuner.kernel_templates.spec import AttentionSpec

Make = Callable[..., BestConfig]
HYBRID = "1x512@16384,63x1@32768"
FAR = Chain(reach=math.inf)
# All three sizes of the short or of the long part off by a factor of 2.
NEARBY = Chain(reach=3.0)


def ask(table: ConfigTable, config: BestConfig, batch: str | BatchBucket, gpu: Gpu | None = None):
    asked = Batch.parse(batch) if isinstance(batch, str) else batch
    return table.lookup(config.shape.spec, asked, config.variant.page_size, gpu or config.gpu)


def test_each_of_the_four_sources_answers(make_config: Make):
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
        assert ask(ConfigTable.of(order, chain=NEARBY), near, HYBRID).config == near


def test_a_neighbour_settles_to_the_parts_that_are_there(make_config: Make):
    config = make_config(HYBRID)
    answer = ask(ConfigTable.of([config], chain=FAR), config, "64x1@32768")
    assert answer.source == "neighbour"
    assert answer.variant == config.variant.replace(block_m=16, block_n=32)
    assert answer.variant == template_of(config.variant).settle(config.variant, BatchBucket.of(Batch.parse("64x1@9")))


def test_a_neighbour_without_the_asked_part_does_not_answer(make_config: Make):
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


def test_a_variant_that_cannot_run_here_does_not_answer(make_config: Make):
    good = make_config("2x512@8192,63x1@32768")
    variant = good.variant
    bad = [
        make_config(variant=replace(variant, template="gone")),
        make_config(variant=variant.replace(block_m=17)),
        make_config(variant=variant.replace(kv_load="tma")),
        make_config(variant=replace(variant, values=variant.values[1:])),
        make_config(variant=variant.replace(block_m="wide")),
    ]
    table = ConfigTable.of([*bad, good], chain=NEARBY)
    with pytest.warns(UserWarning, match="are set aside: the config 'gone:") as caught:
        answers = [ask(table, good, batch) for batch in (HYBRID, "1x1024@16384,63x1@32768")]
    assert [(answer.source, answer.config) for answer in answers] == [("neighbour", good)] * 2
    (warning,) = map(str, (each.message for each in caught))
    assert all(repr(each.variant.key()) in warning for each in bad)
    assert good.variant.key() not in warning
    with pytest.warns(UserWarning, match="are set aside"):
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
    """Owners and configs in the order in which they answer `HYBRID`."""
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


def test_the_users_configs_come_before_shipped_ones(make_config: Make):
    config = make_config(HYBRID)
    rows = precedence(config)
    expected = [("exact", False)] * 2 + [("bucket", False)] * 2 + [("exact", True)] * 2 + [("bucket", True)] * 2
    expected += [("neighbour", False)] * 2
    for index, (source, stale) in enumerate(expected):
        own, shipped = ([row for whose, row in rows[index:] if whose == origin] for origin in ("database", "shipped"))
        table = ConfigTable.of(own, lambda template, gpu: config.environment, shipped, NEARBY)
        answer = ask(table, config, HYBRID)
        assert (answer.origin, answer.config) == rows[index]
        assert (answer.source, answer.stale) == (source, stale)
    assert ask(ConfigTable.of([]), config, HYBRID).origin is None


def test_a_config_shipped_for_another_gpu_does_not_answer(make_config: Make):
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


def test_the_id_depends_on_the_content(make_config: Make):
    configs = [make_config(), make_config("64x1@4096"), make_config(full_check=False)]
    table = ConfigTable.of(configs)
    shuffled = random.Random(0).sample(configs, 3)
    assert ConfigTable.of(shuffled).id == table.id
    assert len(table) == 3
    ids = {ConfigTable.of(part).id for part in ([], configs[:1], configs[:2], configs)}
    other_gpu = ConfigTable.of([make_config(gpu=replace(configs[0].gpu, driver="1"))]).id
    assert len(ids | {other_gpu}) == 5
    # The owner of a config decides which one answers.
    of_both = {ConfigTable.of(configs[:2], None, configs[2:]).id, ConfigTable.of(configs[2:], None, configs[:2]).id}
    assert len(ids | of_both) == 6
    assert ConfigTable.of(configs[:1], None, configs[1:]).configs == tuple(configs)


def test_tables_that_answer_differently_have_other_ids(make_config: Make):
    slow, fast = make_config(timing=Timing((9.0,), Regime("graph"))), make_config()
    one, two = Place("file", [slow]), Place("file", [fast])
    tables = [ConfigTable(places) for places in ((one, two), (two, one), (Place("file", [slow, fast]),))]
    assert [ask(table, slow, HYBRID).config for table in tables] == [slow, fast, fast]
    chains = (Chain("bucket"), Chain(like=("NVIDIA H100",)), Chain(reach=2.0), Chain(reach=math.inf))
    tables += [ConfigTable((one, two), chain=chain) for chain in chains]
    assert len({table.id for table in tables}) == len(tables)
    # An empty place changes no answer.
    assert ConfigTable((Place("database", []), one, two)).id == tables[0].id
    assert ConfigTable((one, two), chain=Chain(reach=1)).id == tables[0].id


def test_a_new_batch_of_a_known_bucket_repeats_no_work(make_config: Make, monkeypatch: pytest.MonkeyPatch):
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
    for batch in ("1x900@16384,63x1@32768", "1x512@30000,63x1@32768", "1x512@30000,32x1@32768"):
        assert ask(table, config, batch).source == "neighbour"
    assert calls["environment"] == 1
    assert calls["valid"] < 2 * len(configs)


def test_an_exact_answer_does_not_depend_on_the_spelling_of_the_batch(make_config: Make):
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


def test_the_fresh_config_of_two_equally_near_buckets_answers(make_config: Make):
    stale = make_config("1x512@16384,32x1@65536", environment=replace(make_config().environment, triton="3.6.0"))
    fresh = make_config("1x512@16384,128x1@16384")
    for order in ([stale, fresh], [fresh, stale]):
        table = ConfigTable.of(order, lambda template, gpu: fresh.environment, chain=NEARBY)
        answer = ask(table, fresh, HYBRID)
        assert (answer.config, answer.distance, answer.stale) == (fresh, 2, False)


batches = st.builds(Batch, st.lists(st.tuples(st.sampled_from((1, 2, 8, 9, 64, 512, 4096)), st.integers(0, 100_000)),
                                    min_size=1, max_size=20).map(tuple))


@pytest.mark.filterwarnings("ignore:stored results that cannot be used")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


def test_of_equally_good_configs_the_earlier_place_answers(make_config: Make):
    slow, fast = make_config(timing=Timing((9.0,), Regime("graph"))), make_config()
    for first, second in ((slow, fast), (fast, slow)):
        table = ConfigTable([Place("file", [first]), Place("file", [second]), Place("shipped", [])])
        answer = ask(table, slow, HYBRID)
        assert (answer.config, answer.origin) == (first, "file")
        assert len(table) == 2


def test_a_strict_chain_refuses_and_says_what_it_accepts(make_config: Make):
    config = make_config()
    near, like_it = "1x1024@16384,63x1@32768", "1x513@16384,63x1@32768"
    for worst, served in (("exact", [HYBRID]), ("bucket", [HYBRID, like_it]), ("neighbour", [HYBRID, like_it, near])):
        table = ConfigTable.of([config], chain=Chain(worst))
        for batch in (HYBRID, like_it, near):
            if batch in served:
                assert ask(table, config, batch).config == config
                continue
            with pytest.raises(NotTunedError, match=f"accepted are exact.*{'' if worst == 'exact' else worst}"):
                ask(table, config, batch)
        with pytest.raises(NotTunedError, match="of source 'heuristic'"):
            table.lookup(config.shape.spec, Batch.parse(HYBRID), 32, config.gpu)


def test_a_gpu_lends_only_where_the_chain_names_it(make_config: Make):
    config = make_config()
    h100 = Gpu("NVIDIA H100", (9, 0), 114, 232448, 52428800)
    assert ask(ConfigTable.of([config]), config, HYBRID, h100).source == "heuristic"
    table = ConfigTable.of([config], chain=Chain(like=("NVIDIA H20", "NVIDIA H200")))
    answer = ask(table, config, HYBRID, h100)
    assert (answer.source, answer.lender, answer.config, answer.loss) == ("neighbour", "NVIDIA H200", config, None)
    own = ask(table, config, HYBRID)
    assert (own.source, own.lender) == ("exact", None)
    assert ask(table, config, HYBRID, replace(h100, capability=(10, 0))).source == "heuristic"
    small = replace(h100, shared_memory_bytes=16384)
    with pytest.warns(UserWarning, match="shared memory"):
        assert ask(table, config, HYBRID, small).config is None


def test_a_gpus_own_configs_come_before_lent_ones(make_config: Make):
    config = make_config()
    own = make_config("8x512@16384,63x1@32768", gpu=Gpu("NVIDIA H100", (9, 0), 114, 232448, 52428800))
    table = ConfigTable.of([config, own], chain=Chain(like=("NVIDIA H200",), reach=9.0))
    answer = ask(table, config, HYBRID, own.gpu)
    assert (answer.config, answer.lender) == (own, None)
    assert answer.distance == own.shape.bucket.distance(config.shape.bucket)


def test_fall_backs_are_logged_once(make_config: Make, caplog: pytest.LogCaptureFixture):
    config = make_config()
    table = ConfigTable.of([config], chain=NEARBY)
    with caplog.at_level("INFO", logger="attention_tuner"):
        for batch in (HYBRID, "1x1024@16384,63x1@32768", "1x2048@16384,63x1@32768"):
            ask(table, config, batch)
        assert [record.levelname for record in caplog.records] == ["INFO"]
        for page_size, batch in ((16, "64x1@40"), (16, "32x1@40"), (32, HYBRID), (32, "64x1@40")):
            table.lookup(config.shape.spec, Batch.parse(batch), page_size, config.gpu)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "WARNING"]
    assert "so the neighbour answers; the order is exact, bucket, neighbour, heuristic" in caplog.messages[0]
    assert "pages of 32: nothing is tuned" in caplog.messages[2]


def test_the_log_names_another_gpu_that_the_layer_is_tuned_on(make_config: Make, caplog: pytest.LogCaptureFixture):
    config = make_config()
    table = ConfigTable.of([config], chain=Chain(like=("NVIDIA H20",)))
    for batch in (HYBRID, "1x1024@16384,63x1@32768"):
        assert ask(table, config, batch, replace(config.gpu, name="NVIDIA H100")).source == "heuristic"
    (message,) = caplog.messages
    assert "(it is on NVIDIA H200), so the heuristic answers" in message
    caplog.clear()
    assert ask(ConfigTable.of([config]), config, HYBRID, replace(config.gpu, num_sms=66)).source == "heuristic"
    (message,) = caplog.messages
    assert "(it is on NVIDIA H200 with 132 SMs, where this one has 66), so the heuristic answers" in message


def test_stale_answers_are_logged_once(make_config: Make, caplog: pytest.LogCaptureFixture):
    config = make_config()
    now = replace(config.environment, kernel_hash="another")
    table = ConfigTable.of([config, make_config("64x1@4096")], lambda template, gpu: now)
    for batch in (HYBRID, "64x1@4096", "1x513@16384,63x1@32768"):
        assert ask(table, config, batch).stale
    (message,) = caplog.messages
    assert "measured with another kernel source, Triton or driver" in message


def even(make_config: Make, batch: str, waves: int = 0) -> BestConfig:
    config = make_config(batch)
    return replace(config, variant=config.variant.replace(waves=waves, block_m=16, block_n=32))


@pytest.mark.parametrize(("waves", "source"), [(0, "heuristic"), (2, "neighbour")])
def test_a_variant_that_never_splits_kv_answers_in_its_own_bucket_only(make_config: Make, waves: int, source: str):
    config = even(make_config, "256x1@16383", waves)
    table = ConfigTable.of([config], chain=NEARBY)
    assert ask(table, config, "256x1@16000").source == "bucket"
    assert ask(table, config, "128x1@16383").source == source


def test_a_neighbour_has_short_sequences_of_the_same_skew(make_config: Make):
    config = even(make_config, "256x1@16383", 2)
    table = ConfigTable.of([config], chain=NEARBY)
    assert ask(table, config, "128x1@16383").source == "neighbour"
    # The same number of keys, but one sequence has four times as many as each other one.
    assert ask(table, config, "1x1@65535,255x1@16190").source == "heuristic"
    # The skew does not matter to a batch without short sequences.
    hybrid = even(make_config, "1x512@16384,1x1@4000,7x1@10", 2)
    table = ConfigTable.of([hybrid], chain=Chain(reach=math.inf))
    assert ask(table, hybrid, "1x512@16384").source == "neighbour"


@pytest.mark.parametrize(
    ("batch", "other", "source"),
    [
        # 4 tiles for each SM; 16 tiles; so few keys that splitting them costs more; a chunk beside decode.
        ("64x1@16383", "60x1@16383", "heuristic"),
        ("256x1@16383", "240x1@16383", "bucket"),
        ("64x1@1023", "60x1@1023", "bucket"),
        ("1x512@16384,32x1@16383", "1x512@16384,30x1@16383", "bucket"),
    ],
)
def test_a_variant_that_never_splits_kv_answers_for_its_bucket_if_tiles_are_many(
    make_config: Make, batch: str, other: str, source: str
):
    config = even(make_config, batch)
    assert BatchBucket.of(Batch.parse(other)) == config.shape.bucket
    table = ConfigTable.of([config])
    assert ask(table, config, batch).source == "exact"
    assert ask(table, config, other).source == source
    assert table.lookup(config.shape.spec, config.shape.bucket, 16, config.gpu).source == source


def test_a_variant_that_splits_kv_answers_before_one_that_never_does(make_config: Make):
    config, cut, near = even(make_config, "64x1@16383"), *(even(make_config, b, 2) for b in ("60x1@16383", "64x1@9000"))
    slower = replace(cut, timing=replace(cut.timing, samples_ms=(2.0 * cut.timing.median_ms,)))
    for others, batch in (([slower], "60x1@16383"), ([near], "64x1@9000"), ([near, slower], "60x1@16383")):
        answer = ask(ConfigTable.of([config, *others]), config, "62x1@16383")
        assert answer.config is not None
        assert answer.config.batch == batch
    # A strict chain serves the config, since saying that nothing is tuned would be false.
    for worst, source in (("bucket", "bucket"), ("neighbour", "bucket"), ("heuristic", "heuristic")):
        table = ConfigTable.of([config], chain=Chain(worst))
        assert ask(table, config, "62x1@16383").source == source
    with pytest.raises(NotTunedError, match="of source 'bucket'"):
        ask(ConfigTable.of([config], chain=Chain("exact")), config, "62x1@16383")


def test_a_config_that_answers_for_its_own_batch_only_is_logged_once_and_no_miss(
    make_config: Make, caplog: pytest.LogCaptureFixture
):
    config = even(make_config, "64x1@16383")
    table = ConfigTable.of([config, even(make_config, "64x4@16380")])
    with caplog.at_level("INFO", logger="attention_tuner"):
        for batch in ("62x1@16383", "62x1@16383", "64x1@16383", "62x4@16380"):
            ask(table, config, batch)
    (message,) = caplog.messages
    assert "never splits KV and answers for its own batch only; the heuristic answers for the others" in message
    found = table.coverage()
    assert (found.counts["heuristic"], found.counts["exact"], found.misses) == (3, 1, ())


@pytest.mark.parametrize(("reach", "source"), [(0.9, "heuristic"), (1.0, "neighbour"), (math.inf, "neighbour")])
def test_a_neighbour_answers_within_reach(make_config: Make, reach: float, source: str):
    config = make_config()
    answer = ask(ConfigTable.of([config], chain=Chain(reach=reach)), config, "1x1024@16384,63x1@32768")
    assert answer.source == source
    assert ask(ConfigTable.of([config]), config, "1x1024@16384,63x1@32768").source == "neighbour"
    assert ask(ConfigTable.of([config]), config, "1x1024@16384,32x1@32768").source == "heuristic"


def test_a_loss_is_expected_by_source_and_distance(make_config: Make):
    config = make_config()
    losses = Losses([Loss("NVIDIA H200", "bucket", 0.0, 3, 0.01), Loss("NVIDIA H200", "neighbour", 1.0, 3, 0.04),
                     Loss("NVIDIA H200", "heuristic", 8.0, 3, 0.3)])
    table = ConfigTable([Place("database", [config])], losses=losses)
    batches = (HYBRID, "1x513@16384,63x1@32768", "1x1024@16384,63x1@32768")
    assert [ask(table, config, batch).loss for batch in batches] == [0.0, 0.01, 0.04]
    like_sampled, far = ask(table, config, "1x4096@16384,32x1@32768"), ask(table, config, "4000x1@500000")
    assert [(each.source, each.loss) for each in (like_sampled, far)] == [("heuristic", 0.3), ("heuristic", None)]
    assert like_sampled.distance is not None
    assert 4 < like_sampled.distance <= 8
    assert table.lookup(config.shape.spec, Batch.parse(HYBRID), 32, config.gpu).loss is None
    assert ask(ConfigTable.of([config]), config, batches[1]).loss is None


def test_a_batch_far_larger_than_any_tuned_one_is_answered(make_config: Make, caplog: pytest.LogCaptureFixture):
    config = make_config()
    huge = "512x8192@900000,60000x1@1000000"
    table = ConfigTable.of([config])
    assert [ask(table, config, huge).source for _ in range(3)] == ["heuristic"] * 3
    assert len(caplog.records) == 1
    answer = ask(ConfigTable.of([config], chain=FAR), config, huge)
    assert (answer.source, answer.config) == ("neighbour", config)
    assert answer.distance is not None
    assert answer.distance > 30


@pytest.mark.parametrize(("place", "value", "message"), [
    (0, "num_q_heads=32", "layer 'num_q_heads=32', of type str; expected an AttentionSpec"),
    (0, {}, "layer {}, of type dict"),
    (1, HYBRID, f"batch '{HYBRID}', of type str; expected a Batch or a BatchBucket"),
    (1, None, "batch None"),
    (2, "16", "page size '16', of type str; expected a whole number"),
    (2, [16], "page size"),
    (3, "NVIDIA H200", "GPU 'NVIDIA H200', of type str; expected a Gpu"),
])
def test_arguments_of_other_types_are_refused(make_config: Make, place: int, value: Any, message: str):
    config = make_config()
    asked: list[Any] = [config.shape.spec, config.shape.bucket, 16, config.gpu]
    asked[place] = value
    with pytest.raises(InputError, match=re.escape(message)):
        ConfigTable.of([config]).lookup(*asked)
