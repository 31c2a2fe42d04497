from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import job_faults as faults
import pytest
from job_faults import wait_until

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.gpu import INTERPRETER
from attention_tuner.kernel_templates.heuristic import default_variant
from attention_tuner.kernel_templates.outcome import Failed, JobError, Regime, Timed, Timing
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.task import Task
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.tuner.measure.jobs import MeasureJob, PrepareJob, RaceJob
from attention_tuner.tuner.measure.rates import RatesJob
from attention_tuner.tuner.processes.worker import FreeJob, GpuLock, Worker

UUID = "GPU-6d2b3f1e-0000-1111-2222-333344445555"
HOLDER = """
import sys, time, pathlib
from attention_tuner.tuner.processes.worker import GpuLock
with GpuLock(sys.argv[1], pathlib.Path(sys.argv[2])).held():
    print("held", flush=True)
    time.sleep(1000)
"""
TURNS = """
import sys, time, pathlib
from attention_tuner.tuner.processes.worker import GpuLock
lock = GpuLock(sys.argv[1], pathlib.Path(sys.argv[2]))
print("ready", flush=True)
sys.stdin.readline()
for _ in range(10):
    with lock.held():
        start = time.monotonic()
        time.sleep(0.02)
        print(start, time.monotonic(), flush=True)
"""
LIMIT_S = 120.0
TASK = Task(AttentionSpec(2, 1, 64, dtype="float16"), Batch.parse("1x3@20,1x1@70"), 16)
UNKNOWN = Variant.of("no_such_template", 16, {"block_m": 16})


@pytest.fixture(scope="module")
def lock(tmp_path_factory: pytest.TempPathFactory) -> GpuLock:
    return GpuLock(UUID, tmp_path_factory.mktemp("locks"))


@pytest.fixture(scope="module")
def worker(lock: GpuLock) -> Iterator[Worker]:
    with Worker(interpret=True, lock=lock) as worker:
        yield worker


@pytest.fixture(scope="module")
def default() -> Variant:
    return default_variant(TASK.spec, TASK.batch, TASK.page_size)


def is_held(lock: GpuLock) -> bool:
    try:
        with lock.held(0):
            return False
    except JobError:
        return True


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


def test_a_measurement_that_hangs_fails_alone_and_one_that_the_deadline_ends_is_blamed_on_no_variant(
    worker: Worker, default: Variant
) -> None:
    hanging = faults.HangingMeasurement(TASK, default, samples=1)
    assert worker.ready(LIMIT_S)
    assert worker.run(hanging, 0.5) == Failed(default, "check", "gave no result within 0.5 s")
    assert worker.ready(LIMIT_S)
    with pytest.raises(JobError, match=r"gave no result|could begin") as caught:
        worker.run(hanging, LIMIT_S, time.monotonic() + 0.5)
    assert caught.value.variant is None
    assert worker.pid is None
    assert isinstance(worker.run(MeasureJob(TASK, default, samples=1), LIMIT_S), Timed)


def test_a_race_times_all_and_drops_the_one_that_fails(worker: Worker, lock: GpuLock, default: Variant) -> None:
    other = default.replace(num_warps=8)
    job = RaceJob(TASK, (default, UNKNOWN, other), rounds=2, seed=1)
    race = worker.run(job, LIMIT_S, time.monotonic() + LIMIT_S)
    assert isinstance(race.timings[UNKNOWN], Failed)
    assert race.is_steady
    assert race.sentinels_ms == ()
    for variant in (default, other):
        timing = race.timings[variant]
        assert isinstance(timing, Timing)
        assert len(timing.samples_ms) == 2
    assert not is_held(lock)


def test_one_code_and_launch_is_measured_once(worker: Worker, default: Variant) -> None:
    def measure(variant: Variant, code: str = "c", seed: int = 5) -> Timed:
        outcome = worker.run(MeasureJob(TASK, variant, samples=2, seed=seed, code=code), LIMIT_S)
        assert isinstance(outcome, Timed), outcome
        return outcome

    first, twin = measure(default), default.replace(num_warps=8)
    assert first.same_as is None
    assert measure(twin) == Timed(twin, first.check, first.timing, same_as=default)
    # Other code, another launch, other inputs.
    for other in (measure(twin, code="d"), measure(default.replace(num_segments=2)), measure(twin, seed=6)):
        assert other.same_as is None
        assert other.timing.samples_ms != first.timing.samples_ms


def test_the_objects_of_a_task_can_be_prepared_and_freed(worker: Worker) -> None:
    cached = faults.Ask("[type(one).__name__ for one in context._cache.values()]")
    assert worker.run(PrepareJob(TASK, 0, Regime("interpreter")), LIMIT_S) > 0
    assert worker.run(cached, LIMIT_S) == ["Workbench"]
    worker.free()
    assert worker.run(cached, LIMIT_S) == []


def test_a_job_has_the_gpu_to_itself_and_no_longer(worker: Worker, lock: GpuLock, tmp_path: Path) -> None:
    running = worker.submit(faults.WaitFor(str(tmp_path / "go")), LIMIT_S)
    wait_until(lambda: is_held(lock))
    assert not running.done()
    (tmp_path / "go").touch()
    running.result()
    assert not is_held(lock)


def test_a_gpu_that_another_run_keeps_until_the_deadline_is_blamed_on_no_variant(
    worker: Worker, lock: GpuLock, default: Variant
) -> None:
    with lock.held(), pytest.raises(JobError, match=f"another run kept GPU {UUID}"):
        worker.run(MeasureJob(TASK, default, samples=1), LIMIT_S, deadline=time.monotonic() + 0.1)


def test_only_the_job_itself_counts_as_busy_and_against_its_limit(worker: Worker, lock: GpuLock) -> None:
    assert worker.ready(LIMIT_S)
    busy_s = worker.busy_s
    with lock.held():
        waiting = worker.submit(faults.Sleep(0.2), 1.9)
        time.sleep(2)
        assert not waiting.done()
    assert waiting.result() == "slept"
    assert 0.2 <= worker.busy_s - busy_s < 1.9


def test_a_worker_can_be_started_ahead_and_a_killed_one_is_not_started_again_to_be_freed() -> None:
    with Worker.on(INTERPRETER) as other:
        assert other.interpret
        # Nobody else can be disturbed on the CPU.
        assert other.uuid is None
        other.free()
        assert other.pid is None
        other.start()
        pid = other.pid
        assert pid is not None
        assert not other.ready(0)
        assert other.ready(LIMIT_S)
        first, second = other.submit(faults.Sleep(0.0), LIMIT_S), other.submit(faults.Ask("os.getpid()"), LIMIT_S)
        assert second.result() == pid
        assert first.result() == "slept"
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: other.pid is None)
        other.free()
        assert other.pid is None


def test_closing_ends_a_running_job() -> None:
    with Worker(interpret=True) as other:
        running = other.submit(faults.Sleep(1000), LIMIT_S)
    with pytest.raises(JobError, match=r"closed|SIGKILL"):
        running.result()


def test_closing_ends_the_wait_for_a_gpu_that_another_run_keeps(lock: GpuLock) -> None:
    with lock.held():
        other = Worker(interpret=True, lock=lock)
        waiting = other.submit(faults.Sleep(0), LIMIT_S)
        other.close()
        with pytest.raises((JobError, CancelledError)):
            waiting.result(0)


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
        # An address far outside is "illegal", or of no memory at all, depending on where the cache lies.
        assert "CUDA error" in outcome.reason
        outcome = worker.run(good, 120)
        assert isinstance(outcome, Timed)
        assert outcome.timing.regime == Regime("graph", "cold")
        assert worker.pid != pid


@pytest.mark.gpu
def test_a_race_on_a_gpu_has_sentinels_and_the_gpu_to_itself(default: Variant) -> None:
    from attention_tuner.kernel_templates.launch.device import present_gpu

    gpu = present_gpu()
    assert gpu is not None
    with Worker.on(gpu) as worker:
        uuid = worker.uuid
        assert uuid is not None
        race = worker.run(RaceJob(TASK, (default, default.replace(num_warps=8)), rounds=12), 120)
    assert race.blocks == 4
    assert 4 <= len(race.sentinels_ms) <= 8
    for timing in race.timings.values():
        assert isinstance(timing, Timing)
        assert timing.regime == Regime("graph", "cold")
        if race.is_steady:
            assert len(timing.samples_ms) == 12
    with GpuLock(uuid).held(0), Worker.on(gpu) as late, pytest.raises(JobError, match=uuid):
        late.run(FreeJob(), 120, time.monotonic() + 0.1)


def start(script: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, UUID, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    with start(HOLDER, tmp_path) as process:
        assert line(process) == "held\n"
        yield process
        process.kill()


def test_waiting_for_a_gpu_that_another_process_holds_ends_at_the_deadline(
    holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    deadline = time.monotonic() + 0.2
    with pytest.raises(JobError, match=f"another run kept GPU {UUID}"), GpuLock(UUID, tmp_path).held(deadline):
        pass
    assert time.monotonic() >= deadline
    with GpuLock(f"{UUID}0", tmp_path).held(0):
        pass  # another GPU is free


def test_the_lock_of_a_process_that_was_killed_is_released(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    lock = GpuLock(UUID, tmp_path)
    threading.Timer(0.1, holder.send_signal, [signal.SIGKILL]).start()
    with lock.held(time.monotonic() + 60):
        assert holder.wait(60) == -signal.SIGKILL
    with lock.held(0):
        pass


def test_two_processes_take_turns_and_never_overlap(tmp_path: Path) -> None:
    with start(TURNS, tmp_path) as one, start(TURNS, tmp_path) as other:
        for process in (one, other):
            assert line(process) == "ready\n"
        for process in (one, other):
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        spans = sorted(
            (*map(float, line(process).split()), index)
            for index, process in enumerate((one, other))
            for _ in range(10)
        )
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    order = [index for *_, index in spans]
    changes = sum(a != b for a, b in itertools.pairwise(order))
    # 19 when they alternate from first to last; one may begin or end alone on a busy machine.
    assert changes >= 5


def test_the_lock_is_free_again_after_an_error(tmp_path: Path) -> None:
    lock = GpuLock(UUID, tmp_path)
    with pytest.raises(ValueError, match="inside"), lock.held():
        raise ValueError("inside")
    with lock.held(0):
        pass


def test_waiting_for_a_gpu_ends_when_the_one_who_waits_is_closed(
    holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    closed = threading.Event()
    threading.Timer(0.2, closed.set).start()
    with pytest.raises(JobError, match="closed"), GpuLock(UUID, tmp_path).held(time.monotonic() + 600, closed):
        pass


def test_where_there_can_be_no_lock_a_run_goes_on_and_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    lock = GpuLock(UUID, tmp_path / "file" / "locks")
    with pytest.warns(UserWarning, match=r"cannot be locked in .*file/locks': Not a directory"), lock.held():
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with lock.held():
            pass
    with pytest.raises(OSError, match="inside"), lock.held():
        raise OSError("inside")
