from collections.abc import Iterator

import job_faults as faults
import pytest

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.default import default_variant
from attention_tuner.kernel_templates.errors import JobError
from attention_tuner.kernel_templates.gpu import INTERPRETER
from attention_tuner.kernel_templates.outcome import Failed, Regime, Timed, Timing
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.tuner.jobs import DescribeJob, MeasureJob, RaceJob, RatesJob, Task
from attention_tuner.tuner.worker import Worker

LIMIT_S = 60.0
TASK = Task(AttentionSpec(4, 2, 64), Batch.parse("1x16@32,2x1@40"), 16)
UNKNOWN = Variant.of("no_such_template", 16, {"block_m": 16})


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker(interpret=True) as worker:
        yield worker


@pytest.fixture(scope="module")
def default() -> Variant:
    return default_variant(TASK.spec, TASK.batch, TASK.page_size)


def test_an_interpreting_worker_says_so(worker: Worker) -> None:
    description = worker.run(DescribeJob(), LIMIT_S)
    assert description.gpu == INTERPRETER
    assert description.triton.startswith("3.")
    assert description.torch.startswith("2.")


def test_a_worker_either_interprets_or_compiles(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    ask = faults.Ask("(context.interpret, os.environ.get('TRITON_INTERPRET'))")
    with Worker(interpret=False) as compiling:
        assert compiling.run(ask, LIMIT_S) == (False, None)
    assert worker.run(ask, LIMIT_S) == (True, "1")


def test_a_variant_is_checked_and_timed(worker: Worker, default: Variant) -> None:
    outcome = worker.run(MeasureJob(TASK, default, samples=3), LIMIT_S)
    assert isinstance(outcome, Timed), outcome
    assert outcome.check.passed
    assert outcome.timing.regime == Regime("interpreter")
    assert len(outcome.timing.samples_ms) == 3
    assert outcome.timing.plan_ms > 0


def test_a_variant_that_cannot_run_fails_alone(worker: Worker, default: Variant) -> None:
    outcome = worker.run(MeasureJob(TASK, UNKNOWN, samples=1), LIMIT_S)
    assert isinstance(outcome, Failed)
    assert outcome.stage == "check"
    assert "no_such_template" in outcome.reason
    assert isinstance(worker.run(MeasureJob(TASK, default, samples=1), LIMIT_S), Timed)


def test_a_measurement_that_hangs_fails_alone(worker: Worker, default: Variant) -> None:
    huge = Task(TASK.spec, Batch.parse("1x512@4096"), 16)
    outcome = worker.run(MeasureJob(huge, default, samples=1), 2.0)
    assert outcome == Failed(default, "check", "gave no result within 2 s")
    assert isinstance(worker.run(MeasureJob(TASK, default, samples=1), LIMIT_S), Timed)


def test_a_race_times_all_and_drops_the_one_that_fails(worker: Worker, default: Variant) -> None:
    other = default.replace(num_warps=8)
    race = worker.run(RaceJob(TASK, (default, UNKNOWN, other), rounds=2, seed=1), LIMIT_S)
    assert isinstance(race[UNKNOWN], Failed)
    for variant in (default, other):
        timing = race[variant]
        assert isinstance(timing, Timing)
        assert len(timing.samples_ms) == 2


def test_a_job_without_a_variant_raises(worker: Worker) -> None:
    with pytest.raises(JobError, match="no NVIDIA GPU"):
        worker.run(RatesJob(), LIMIT_S)


@pytest.mark.gpu
def test_an_illegal_access_is_one_variants_and_costs_the_process(default: Variant) -> None:
    with Worker(interpret=False) as worker:
        good = MeasureJob(TASK, default, samples=3)
        assert isinstance(worker.run(good, 120), Timed)
        pid = worker.pid
        outcome = worker.run(faults.IllegalAccess(TASK, default, samples=3), 120)
        assert isinstance(outcome, Failed)
        assert "illegal memory access" in outcome.reason
        outcome = worker.run(good, 120)
        assert isinstance(outcome, Timed)
        assert outcome.timing.regime == Regime("graph", "cold")
        assert worker.pid != pid
