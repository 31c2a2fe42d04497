import math
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.outcome import Check, Failed, JobError, Regime, Timed, Timing
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.task import Task
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.tuner.measure import jobs
from attention_tuner.tuner.measure.blocks import Raced
from attention_tuner.tuner.measure.jobs import MeasureJob, RaceJob, RaceResult
from attention_tuner.tuner.processes.child import Context, Job

TASK = Task(AttentionSpec(8, 2, 64), Batch.parse("1x16@32"), 16)
ONE, TWO, THREE = (Variant.of("toy", 16, {"block_m": m}) for m in (16, 32, 64))
TIMING = Timing((1.0,), Regime("eager"))


def never(job: Job[Any]) -> Any:
    raise AssertionError(f"{job} must not run again")


def test_jobs_load_no_torch() -> None:
    script = "import sys, attention_tuner.tuner.measure.jobs; sys.exit(bool({'torch', 'triton'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_measurement_fails_at_the_stage_it_had_reached() -> None:
    job = MeasureJob(TASK, ONE, 5)
    assert job.result_after(JobError("killed", "time", ONE), never) == Failed(ONE, "time", "killed")
    assert job.result_after(JobError("hung"), never) == Failed(ONE, "check", "hung")


@pytest.mark.parametrize(
    ("rival_ms", "ms", "spare", "asked"),
    [
        # Nobody to be held against, and nearly as good as the best: all samples, of which those at hand count.
        (None, 9.0, 1, [1, 3]),
        (1.0, 1.2, 3, [2]),
        # Slower by a quarter, and by far.
        (1.0, 1.3, 1, [1]),
        (1.0, 1.3, 0, [1, 1]),
        (1.0, 3.1, 1, []),
        (1.0, 3.1, 0, [1]),
    ],
)
def test_what_cannot_win_is_sampled_less(
    rival_ms: float | None, ms: float, spare: int, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def samples(count: int) -> tuple[float, ...]:
        taken.append(count)
        return (ms,) * count

    taken: list[int] = []
    watch = SimpleNamespace(spare=(ms,) * spare, samples=samples, regime=Regime("graph"))
    checker = SimpleNamespace(check=lambda _: Check(0.5))
    launcher = SimpleNamespace(launch_key=lambda: "launch")
    bench = SimpleNamespace(planned=lambda *_: (launcher, 0.5), stopwatch=lambda *_, is_loaded: is_loaded and watch,
                            checker=lambda _: checker, measured={})  # fmt: skip
    monkeypatch.setattr(jobs, "_workbench", lambda *_: bench)
    outcome = MeasureJob(TASK, ONE, 5, rival_ms=rival_ms, code="c").run(Context(False, lambda _: None))
    assert taken == asked
    assert isinstance(outcome, Timed)
    assert outcome.timing == Timing((ms,) * (spare + sum(asked)), Regime("graph"), 0.5)


def test_a_race_goes_on_without_the_one_to_blame() -> None:
    def again(job: Job[RaceResult]) -> RaceResult:
        assert job == RaceJob(TASK, (ONE, THREE), 10, seed=4)
        return RaceResult({ONE: TIMING, THREE: TIMING}, 4, 1, (0.1,) * 5)

    job = RaceJob(TASK, (ONE, TWO, THREE), 10, seed=4)
    lost = Failed(TWO, "time", "hung")
    result = job.result_after(JobError("hung", "time", TWO), again)
    assert result == RaceResult({ONE: TIMING, TWO: lost, THREE: TIMING}, 4, 1, (0.1,) * 5)


def test_a_race_of_one_that_fails_is_not_run_again() -> None:
    job = RaceJob(TASK, (ONE,), 10)
    result = job.result_after(JobError("hung", "time", ONE), never)
    assert result == RaceResult({ONE: Failed(ONE, "time", "hung")})


def test_a_race_is_steady_when_as_many_blocks_count_as_were_asked_for() -> None:
    assert RaceResult({}, blocks=3).is_steady
    assert RaceResult({}, 3, 2, (0.1,) * 5).is_steady
    assert not RaceResult({}, 3, 3, (0.1,) * 5).is_steady
    assert not RaceResult({}, 3, 6, (0.1,) * 6).is_steady


def test_what_comes_before_the_blocks_of_a_race_counts_against_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    patience: list[float] = []

    def planned(*_: object) -> tuple[None, float]:
        time.sleep(0.1)
        return None, 0.0

    def run_blocks(course: object, variants: tuple[Variant, ...], rounds: int, seed: int, patience_s: float) -> Any:
        patience.append(patience_s)
        return Raced(dict.fromkeys(variants, (1.0,)), 1)

    watch = SimpleNamespace(launches=1, regime=Regime("interpreter"))
    bench = SimpleNamespace(planned=planned, stopwatch=lambda *_: watch, uuid=None)
    monkeypatch.setattr(jobs, "_workbench", lambda *_: bench)
    monkeypatch.setattr(jobs, "run_blocks", run_blocks)
    job = RaceJob(TASK, (ONE, TWO), 1, deadline=time.monotonic() + 1000)
    job.run(Context(True, lambda _: None))
    RaceJob(TASK, (ONE,), 1).run(Context(True, lambda _: None))
    assert 5 < patience[0] <= 1000 - 0.2 - jobs.ANSWER_S
    assert patience[1] == math.inf


def test_a_race_that_is_lost_afterwards_still_tells_who_was_to_blame_before() -> None:
    def again(job: Job[RaceResult]) -> RaceResult:
        raise JobError("killed by SIGKILL")

    result = RaceJob(TASK, (ONE, TWO), 10).result_after(JobError("hung", "time", TWO), again)
    assert result == RaceResult({TWO: Failed(TWO, "time", "hung")})
