"""The benchmarks of the lookup compute the right figures and run at a small size."""

from __future__ import annotations

import importlib
import json
import logging
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from attention_tuner.db import Setting, Store, TrialRecord, export_json, load_table, read_configs, shipped_configs
from attention_tuner.db.lookup.leave_one_out import leave_one_out
from attention_tuner.kernel_templates.batch import Batch, BatchBucket
from attention_tuner.kernel_templates.outcome import BestConfig, Check, Regime, Timed, Timing
from attention_tuner.search_spaces.suites import named_batches
from attention_tuner.tuner.measure.jobs import RaceJob, RaceResult
from attention_tuner.tuner.recording import Recording

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """Scripts raise the level of the log, in which other tests expect warnings."""
    logger = logging.getLogger("attention_tuner")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.fixture
def script(request: pytest.FixtureRequest) -> ModuleType:
    """The script that the test's parameter names."""
    return importlib.import_module(request.param)


def using(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("script", [name], indirect=True)


@pytest.fixture
def database(tmp_path: Path) -> str:
    """Two chunks whose winners were timed on both, in a database and in an export beside it."""
    one, other = (config for config in shipped_configs() if config.batch in ("1x2048@30720", "1x512@32256")
                  and config.variant.page_size == 16 and config.shape.spec.num_q_heads == 32)
    # Both split KV, so that each may answer for the other.
    one, other = (replace(config, variant=one.variant.replace(waves=waves))
                  for config, waves in ((one, 1), (other, 2)))  # fmt: skip
    export_json([one, other], tmp_path / "configs.json")
    with Store.open(tmp_path / "tuner.db") as store:
        store.put_best(one, other)
        run = store.start_run({})
        for config, times in ((one, (1.0, 1.02)), (other, (1.01, 1.0))):
            regime = config.timing.regime
            setting = Setting(config.shape.spec, Batch.parse(config.batch), 16, config.gpu, regime)
            for variant, ms in zip((one.variant, other.variant), times, strict=True):
                outcome = Timed(variant, Check(0.5), Timing((ms,), regime))
                store.add_trial(TrialRecord(run, setting, config.environment, outcome))
    return str(tmp_path / "tuner.db")


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *options: str) -> dict[str, object]:
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", "--out", str(tmp_path / "out.json"), *options])
    script.main()
    return json.loads((tmp_path / "out.json").read_text())


@using("synthetic")
def test_a_table_of_any_size_has_a_question_for_each_row(script: ModuleType) -> None:
    configs = script.configs(50)
    assert len({(c.shape.spec, c.batch, c.variant.page_size) for c in configs}) == 50
    assert script.configs(50) == configs
    assert all(BatchBucket.of(Batch.parse(c.batch)) == c.shape.bucket for c in configs)


@using("lookup_latency")
def test_latency_is_measured_at_each_size(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = ("--sizes", "10", "100", "--repeats", "500", "--cold-rows", "100")
    monkeypatch.setattr(script, "import_ms", lambda repeats: 1.0)
    found = run(script, monkeypatch, tmp_path, *options)
    assert [row["rows"] for row in found["lookup"]] == [10, 100]
    assert all(0 < row["hot_us"]["median"] <= row["hot_us"]["p99"] for row in found["lookup"])
    assert all(sum(row["lookups_by_source"].values()) == 2 * 500 + script.QUESTIONS for row in found["lookup"])
    names = ("ConfigTable.lookup", "LiveTable.lookup", "lookup", "unchanged_refresh")
    assert all(0 < found["ways"][name]["median"] <= found["ways"][name]["p99"] for name in names)
    assert found["ways"]["id_ms"] > 0
    assert found["cold_load"]["rows"] == 100
    assert all(found["cold_load"][name]["load_ms"] > 0 for name in ("database", "json"))


@using("concurrent_readers")
def test_a_reader_reports_results_that_were_never_written(script: ModuleType, database: str) -> None:
    config, other = read_configs(Path(database).with_name("configs.json")).configs
    reader = script.Reader(database, [config, replace(other, measured_at=config.measured_at)], ["1x1@20"])
    reader.open()
    reader.ask()
    assert reader.lookups == 3
    assert [text.partition(" instead of ")[0] for text in reader.wrong] == [repr(other)]
    first, second = config, replace(config, measured_at="2027-01-01T00:00:00+00:00")
    reader.seen = {"1x1@20": [first, replace(second, full_check=False)]}
    assert script.half_results(reader, [first, second]) == []
    assert script.half_results(reader, [second, first]) == ["results of 1x1@20 in the order [1, 0]"]
    half = replace(second, variant=other.variant)
    reader.seen = {"1x1@20": [half]}
    assert script.half_results(reader, [first, second]) == [f"never written: {replace(half, full_check=False)!r}"]
    assert len(script.distinct([first, second, config], 3)) == 1


@using("leave_one_out")
def test_losses_are_reported_for_every_reach(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, database: str
) -> None:
    # So far that each answers for the other.
    monkeypatch.setattr(script, "REACH", 3.0)
    found = run(script, monkeypatch, tmp_path, "--db", database, "--configs", str(tmp_path / "configs.json"))
    rows = {row["reach"]: row for row in found["by_reach"]}
    assert list(rows) == [*script.REACHES[:-1], None]
    assert rows[0.0]["sources"] == {"heuristic": 2}
    assert (rows[3.0]["sources"], rows[3.0]["never_timed"]) == ({"neighbour": 2}, 0)
    assert (rows[3.0]["median"], rows[3.0]["worst"]) == pytest.approx((0.015, 0.02))
    assert sorted(row["loss"] for row in found["shapes"]) == pytest.approx([0.01, 0.02])
    assert found["least_default_over_answer"] is None
    assert found["losses"] == [
        {"gpu_name": "NVIDIA H200", "source": "neighbour", "upto": 2.0, "shapes": 2, "loss": pytest.approx(0.015)}]


@using("leave_one_out")
def test_times_may_be_those_of_a_recording(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, database: str
) -> None:
    name = "h200_llama_3_8b"
    monkeypatch.setattr(script, "REACH", 3.0)
    configs = read_configs(tmp_path / "configs.json").configs
    found = run(script, monkeypatch, tmp_path, "--recording", name, "--configs", str(tmp_path / "configs.json"))
    # Only one of the two is recorded, and the other answers for it.
    (row,) = found["shapes"]
    recording = Recording.load(name)
    (task,) = (task for task in recording.tasks if str(task.batch) == "1x512@32256")
    optimum = recording.optimum(task)
    answered = recording.outcome(task, next(c.variant for c in configs if c.batch != row["batch"]))
    assert (row["batch"], row["source"]) == ("1x512@32256", "neighbour")
    assert isinstance(answered, Timed)
    assert optimum is not None
    assert (row["served_ms"], row["best_ms"]) == (answered.timing.median_ms, optimum.timing.median_ms)
    elsewhere = [replace(config, gpu=replace(config.gpu, name="NVIDIA H100")) for config in configs]
    assert not any(script.recorded_times(name, elsewhere).values())


class Races:
    """Stands in for the processes of a race: entrant number n takes n milliseconds."""

    racer = None
    asked: list[RaceJob]

    def __init__(self) -> None:
        self.worker, self.asked = self, []

    def submit(self, job: RaceJob, limit_s: float) -> Races:
        self.asked.append(job)
        return self

    def result(self) -> RaceResult:
        regime = Regime("graph")
        timings = {v: Timing((float(n),) * 8, regime) for n, v in enumerate(self.asked[-1].variants, 1)}
        return RaceResult(timings)

    def close(self) -> None:
        self.asked.append(self.asked[-1])


@using("leave_one_out")
def test_an_answer_races_against_the_best_and_the_default(script: ModuleType, database: str, tmp_path: Path) -> None:
    configs = read_configs(tmp_path / "configs.json").configs
    left_out = leave_one_out(configs, script.trial_times([database], configs).__getitem__)
    races = Races()
    found = script.raced(left_out[0], 8, races)
    served, best, default = races.asked[0].variants
    assert (served, best) == (left_out[0].answer.variant, left_out[0].config.variant)
    assert default == script.default_of(left_out[0].config)
    assert (found["over_best"]["median"], found["over_default"]["median"]) == pytest.approx((-1 / 2, -2 / 3))
    assert (found["failed"], list(found["samples_ms"])) == ({}, [v.key() for v in (served, best, default)])


@using("buckets")
def test_the_winners_of_a_wide_bucket_race(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, database: str
) -> None:
    configs = read_configs(tmp_path / "configs.json").configs
    monkeypatch.setattr(script, "command_executor", lambda gpu: Races())
    times = script.measured(configs, configs[0].gpu, 8)
    assert [list(times[config].values()) for config in configs] == [[1.0, 2.0]] * 2
    assert [next(iter(times[config])) for config in configs] == [config.variant for config in configs]
    assert [row["loss"] for row in script.losses(script.pairs(configs, 4.0), times)] == [1.0, 1.0]


@using("leave_one_out")
def test_a_source_of_times_is_needed(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="needs --db, --recording, or --measure"):
        run(script, monkeypatch, tmp_path)


@using("buckets")
def test_the_widest_bucket_is_recommended(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, database: str
) -> None:
    found = run(script, monkeypatch, tmp_path, "--db", database)
    assert [(row["width"], row["pairs"], row["worst"]) for row in found["widths"]] == [
        (pytest.approx(math.sqrt(2)), 0, None), (2.0, 0, None), (4.0, 2, pytest.approx(0.02)),
        (8.0, 2, pytest.approx(0.02))]
    assert (found["one_bucket"]["pairs"], found["recommended_width"]) == (0, None)
    widths = [{"width": width, "worst": worst} for width, worst in ((1.4, 0.0), (2.0, 0.01), (4.0, 0.05), (8.0, 0.02))]
    assert script.recommended(widths) == 2.0
    assert script.recommended([widths[0], {**widths[1], "worst": 0.05}]) == 1.4
    assert script.recommended([{**widths[0], "worst": 0.05}, widths[1]]) is None
    assert script.recommended(widths[2:]) is None
    assert script.recommended([widths[0], {**widths[1], "worst": None}, {**widths[2], "worst": 0.0}]) is None


@using("buckets")
def test_a_variant_that_never_splits_kv_does_not_answer_for_its_bucket(script: ModuleType) -> None:
    config = next(c for c in shipped_configs() if c.batch == "1x2048@30720" and c.variant.page_size == 16
                  and c.shape.spec.num_q_heads == 32)  # fmt: skip
    config = replace(config, variant=config.variant.replace(waves=0))
    cut = replace(config, batch="1x1900@30720", variant=config.variant.replace(waves=2))
    heuristic = script.answered(cut, config)
    assert (heuristic.source, heuristic.config) == ("heuristic", None)
    times = {cut: {cut.variant: 1.0, heuristic.variant: 1.1}, config: {cut.variant: 1.2, config.variant: 1.0}}
    found = script.summary(script.of_one_bucket([config, cut]), times)
    assert (found["pairs"], found["timed"], found["passed_over"]) == (2, 2, 1)
    assert found["worst"] == pytest.approx(0.2)
    # Only answers from a bucket count in the loss of a bucket.
    (loss,) = script.bucket_losses([config, cut], times)
    assert (loss.shapes, loss.loss) == (1, pytest.approx(0.2))


@using("buckets")
def test_shapes_share_a_bucket_if_no_size_differs_by_more(script: ModuleType) -> None:
    config = next(c for c in shipped_configs() if c.batch == "1x512@32256")

    def at(batch: str) -> BestConfig:
        return replace(config, batch=batch, shape=replace(config.shape, bucket=BatchBucket.of(Batch.parse(batch))))

    assert script.can_share(at("1x512@1024"), at("1x1024@512"), 2.0)
    assert not script.can_share(at("1x512@1024"), at("1x1025@512"), 2.0)
    assert not script.can_share(at("1x512@1024"), at("1x512@1024,1x1@9"), 99.0)


@using("buckets")
def test_the_loss_of_a_bucket_is_written_to_an_export_and_expected(script: ModuleType, tmp_path: Path) -> None:
    one = next(config for config in shipped_configs() if config.batch == "1x2048@30720")
    one = replace(one, variant=one.variant.replace(waves=1))
    other = replace(one, batch="1x1900@30720", variant=one.variant.replace(waves=2))
    assert BatchBucket.of(Batch.parse(other.batch)) == one.shape.bucket
    times = {config: {one.variant: ms, other.variant: 1.02} for config, ms in ((one, 1.0), (other, 1.03 * 1.02))}
    (loss,) = script.bucket_losses([one, other], times)
    assert (loss.gpu_name, loss.source, loss.upto, loss.shapes) == ("NVIDIA H200", "bucket", 0.0, 2)
    assert loss.loss == pytest.approx(0.025)
    path = tmp_path / "out.json"
    kept = replace(loss, source="neighbour")
    export_json([one], path, [replace(loss, loss=0.5), kept])
    script.write_losses(str(path), [], [one], ("bucket",))
    assert read_configs(path).losses == [kept]
    script.write_losses(str(path), [loss], [one], ("bucket",))
    assert read_configs(path).losses == [loss, kept]
    table = load_table(str(tmp_path / "none.db"), files=[path])
    answer = table.lookup(one.shape.spec, one.shape.bucket, one.variant.page_size, one.gpu)
    assert (answer.source, answer.loss) == ("bucket", pytest.approx(0.025))


def test_the_suite_of_buckets_has_batches_of_one_bucket_and_of_the_next() -> None:
    named = named_batches(str(FOLDER / "suites" / "buckets.json"))
    assert len(named) == 20
    for kind in ("decode", "long_decode", "verify", "chunk", "hybrid"):
        middle = BatchBucket.of(named[kind])
        others = {name: batch for name, batch in named.items() if name.startswith(f"{kind}_")}
        if twice := others.pop(f"{kind}_twice", None):
            assert all(b in (0, 2 * a) or a == b == 1 for a, b in
                       zip(middle.sizes, BatchBucket.of(twice).sizes, strict=True))  # fmt: skip
        assert len(others) >= 2
        assert {BatchBucket.of(batch) for batch in others.values()} == {middle}
