import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

import job_faults as faults
import pytest
from job_faults import wait_until

from attention_tuner.kernel_templates.errors import TunerError
from attention_tuner.kernel_templates.outcome import JobError
from attention_tuner.tuner.processes import process
from attention_tuner.tuner.processes.child import Setup
from attention_tuner.tuner.processes.process import LOG_BYTES, ChildProcess, JobTimeoutError

LIMIT_S = 60.0


@pytest.fixture
def child() -> Iterator[ChildProcess]:
    with ChildProcess(Setup()) as child:
        yield child


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_dead(pid: int | None) -> None:
    assert pid is not None
    wait_until(lambda: not is_alive(pid))


def test_a_job_runs_in_a_session_of_its_own(child: ChildProcess) -> None:
    assert child.pid is None
    pid, session = child.run(faults.Ask("(os.getpid(), os.getsid(0))"), LIMIT_S)
    assert pid == session == child.pid != os.getpid()


def test_an_exception_names_the_variant_and_harms_nothing(child: ChildProcess) -> None:
    child.run(faults.Echo(1), LIMIT_S)
    pid = child.pid
    with pytest.raises(JobError, match=r"^ValueError: first line$") as caught:
        child.run(faults.Raise(), LIMIT_S)
    assert (caught.value.stage, caught.value.variant) == ("check", faults.VARIANT)
    # A traceback that lives on would keep a variant's tensors on the GPU.
    assert child.run(faults.IsHeld(), LIMIT_S) is False
    assert child.pid == pid


def test_the_stage_of_one_job_is_not_blamed_on_the_next(child: ChildProcess) -> None:
    with pytest.raises(JobError):
        child.run(faults.Raise(), LIMIT_S)
    with pytest.raises(JobError) as caught:
        child.run(faults.ReturnUnpicklable(), LIMIT_S)
    assert (caught.value.stage, caught.value.variant) == ("", None)


def test_a_hang_is_killed_at_its_limit(child: ChildProcess) -> None:
    child.run(faults.Echo(1), LIMIT_S)
    pid = child.pid
    with pytest.raises(JobTimeoutError, match=r"^gave no result within 0\.5 s$") as caught:
        child.run(faults.Hang(), 0.5)
    assert (caught.value.stage, caught.value.variant) == ("time", faults.VARIANT)
    assert pid is not None
    assert not is_alive(pid)
    assert child.run(faults.Echo("next"), LIMIT_S) == "next"


def test_what_a_job_started_dies_with_it(child: ChildProcess, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with ThreadPoolExecutor() as threads:
        job = threads.submit(child.run, faults.HangWithHelper(str(pid_file)), LIMIT_S)
        wait_until(lambda: pid_file.exists() and bool(pid_file.read_text()))
        child.close()
        with pytest.raises(JobError):
            job.result()
    wait_until_dead(int(pid_file.read_text()))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_death_is_named_by_its_signal(child: ChildProcess, number: signal.Signals) -> None:
    with pytest.raises(JobError, match=f"^killed by {number.name}$") as caught:
        child.run(faults.Die(number), LIMIT_S)
    assert caught.value.variant == faults.VARIANT
    assert [child.run(faults.Echo(i), LIMIT_S) for i in (1, 2)] == [1, 2]


def test_a_death_between_two_jobs_costs_neither(child: ChildProcess) -> None:
    child.run(faults.Echo(1), LIMIT_S)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    wait_until_dead(child.pid)
    assert child.run(faults.Echo(2), LIMIT_S) == 2


def kill_when_it_hangs(child: ChildProcess, file: Path) -> None:
    wait_until(file.exists)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)


def test_a_job_whose_process_is_killed_from_outside_is_run_again(child: ChildProcess, tmp_path: Path) -> None:
    child.run(faults.Echo(1), LIMIT_S)
    pid = child.pid
    with ThreadPoolExecutor() as threads:
        threads.submit(kill_when_it_hangs, child, tmp_path / "begun")
        assert child.run(faults.HangOnce(str(tmp_path / "begun")), LIMIT_S) == "done"
    assert child.pid not in (None, pid)
    # A job that had not begun did not kill the process.
    os.kill(child.pid or 0, signal.SIGTERM)
    assert child.run(faults.Echo(2), LIMIT_S) == 2


def test_a_job_that_is_run_again_gets_the_time_that_is_left(child: ChildProcess, tmp_path: Path) -> None:
    child.run(faults.Echo(1), LIMIT_S)
    file = tmp_path / "pid"
    limit_s = 5.0

    def kill_first() -> None:
        wait_until(lambda: file.exists() and bool(file.read_text()))
        kill_when_it_hangs(child, file)

    with ThreadPoolExecutor() as threads:
        threads.submit(kill_first)
        with pytest.raises(JobTimeoutError) as caught:
            child.run(faults.HangWithHelper(str(file)), limit_s)
    assert float(caught.value.reason.split()[-2]) < limit_s


def test_a_death_is_explained_by_what_was_said(child: ChildProcess) -> None:
    saying = "starting\nLLVM ERROR: cannot select\nPLEASE submit a bug report\n"
    with pytest.raises(JobError, match=r"^killed by SIGABRT: LLVM ERROR: cannot select$"):
        child.run(faults.Die(signal.SIGABRT, saying), LIMIT_S)
    thrown = "terminate called after throwing an instance of 'Error'\n  what():  CUDA error: illegal access\nmore\n"
    with pytest.raises(JobError, match=r"^killed by SIGABRT: CUDA error: illegal access$"):
        child.run(faults.Die(signal.SIGABRT, thrown), LIMIT_S)
    with pytest.raises(JobError, match=r"^killed by SIGABRT: last words$"):
        child.run(faults.Die(signal.SIGABRT, "first words\nlast words\n"), LIMIT_S)
    with pytest.raises(JobError, match=r"^killed by SIGABRT: only words$"):
        child.run(faults.Die(signal.SIGABRT, "only words"), LIMIT_S)


def test_an_exit_is_named_by_its_status(child: ChildProcess) -> None:
    with pytest.raises(JobError, match=r"^exited with status 3$"):
        child.run(faults.Exit(), LIMIT_S)


def test_nothing_that_a_child_prints_is_seen(child: ChildProcess, capfd: pytest.CaptureFixture[str]) -> None:
    child.run(faults.Shout(10), LIMIT_S)
    with pytest.raises(JobError):
        child.run(faults.Die(signal.SIGABRT, "dying"), LIMIT_S)
    assert capfd.readouterr() == ("", "")


def test_what_a_child_prints_is_bounded(child: ChildProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_TICK_S", 0.05)
    child.run(faults.Shout(2 * LOG_BYTES, then_s=1.0), LIMIT_S)
    assert os.fstat(child._log.fileno()).st_size < LOG_BYTES


@pytest.mark.parametrize("job", [faults.ReturnUnpicklable(), faults.Unreadable()])
def test_what_cannot_be_pickled_fails_its_job_only(child: ChildProcess, job: faults.Echo) -> None:
    child.run(faults.Echo(1), LIMIT_S)
    pid = child.pid
    with pytest.raises(JobError):
        child.run(job, LIMIT_S)
    assert child.run(faults.Echo(2), LIMIT_S) == 2
    assert child.pid == pid


def test_a_child_dies_with_its_parent() -> None:
    script = """
import sys
import job_faults as faults
from attention_tuner.tuner.processes import process
from attention_tuner.tuner.processes.child import Setup
from attention_tuner.tuner.processes.process import ChildProcess
child = ChildProcess(Setup())
child.run(faults.Echo(1), 20)
print(child.pid, flush=True)
child.run(faults.Hang(), 1000)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
    assert is_alive(pid)
    parent.kill()
    parent.wait()
    wait_until_dead(pid)


def test_an_interrupt_is_the_parents_to_handle(child: ChildProcess) -> None:
    child.run(faults.Echo(1), LIMIT_S)
    assert child.pid is not None
    timer = threading.Timer(0.2, os.kill, (child.pid, signal.SIGINT))
    timer.start()
    assert child.run(faults.Sleep(0.5), LIMIT_S) == "slept"
    timer.join()


def test_an_answer_after_an_interrupted_wait_is_not_the_next_jobs(child: ChildProcess) -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    child.run(faults.Echo(1), LIMIT_S)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            child.run(faults.Sleep(0.5), LIMIT_S)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert child.run(faults.Echo("next"), LIMIT_S) == "next"


def test_environment_and_niceness_are_the_childs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMOVED_THERE", "1")
    with ChildProcess(Setup(niceness=5), {"ADDED_THERE": "yes", "REMOVED_THERE": None}) as child:
        question = "(os.environ.get('ADDED_THERE'), 'REMOVED_THERE' in os.environ, os.nice(0))"
        assert child.run(faults.Ask(question), LIMIT_S) == ("yes", False, min(19, os.nice(0) + 5))
    assert "ADDED_THERE" not in os.environ


def test_close_ends_a_running_job_from_another_thread(child: ChildProcess) -> None:
    child.run(faults.Echo(1), LIMIT_S)
    timer = threading.Timer(0.3, child.close)
    timer.start()
    with pytest.raises(JobError):
        child.run(faults.Hang(), LIMIT_S)
    timer.join()
    with pytest.raises(JobError, match=r"closed"):
        child.run(faults.Echo(1), LIMIT_S)


def test_a_process_that_cannot_start_is_nobodys_fault() -> None:
    with (
        ChildProcess(Setup(preload=("no_such_module",))) as child,
        pytest.raises(TunerError, match=r"could not start: exited with status 1: .*no_such_module") as caught,
    ):
        child.run(faults.Echo(1), LIMIT_S)
    assert not isinstance(caught.value, JobError)


def test_a_cached_object_is_found_until_another_key_is_cached(child: ChildProcess) -> None:
    first = child.run(faults.Cache("a"), LIMIT_S)
    assert child.run(faults.Cache("a"), LIMIT_S) == first
    child.run(faults.Cache("b"), LIMIT_S)
    assert child.run(faults.Cache("a"), LIMIT_S) != first


def test_a_larger_cache_holds_the_keys_used_last() -> None:
    with ChildProcess(Setup(cache_size=2)) as child:
        first, second = (child.run(faults.Cache(key), LIMIT_S) for key in "ab")
        assert child.run(faults.Cache("a"), LIMIT_S) == first
        child.run(faults.Cache("c"), LIMIT_S)
        # The key that was unused for the longest had to go.
        assert child.run(faults.Cache("a"), LIMIT_S) == first
        assert child.run(faults.Cache("b"), LIMIT_S) != second


@pytest.mark.gpu
def test_running_out_of_memory_leaves_it_to_the_next_job(child: ChildProcess) -> None:
    free = child.run(faults.FreeMemory(), 120)
    pid = child.pid
    with pytest.raises(JobError, match=r"^OutOfMemoryError"):
        child.run(faults.OutOfMemory(), 120)
    assert child.run(faults.FreeMemory(), 120) > 0.95 * free
    assert child.pid == pid


def test_a_process_can_be_started_ahead_of_its_first_job() -> None:
    with ChildProcess(Setup()) as child:
        child.start()
        pid = child.pid
        assert child.ready(60)
        child.start()
        assert child.run(faults.Ask("os.getpid()"), 60) == pid
        os.kill(pid or 0, signal.SIGKILL)
        wait_until_dead(pid)
        assert child.ready(60)
        assert child.pid not in (None, pid)
    assert not child.ready(60)


def test_waiting_for_a_process_that_starts_slowly_ends_in_time() -> None:
    with ChildProcess(Setup(preload=("slow_to_import",)), {"SLOW_S": "2"}) as child:
        assert not child.ready(0.1)
        assert child.ready(60)


def test_a_process_that_cannot_start_says_so_when_it_is_waited_for() -> None:
    with ChildProcess(Setup(preload=("no_such_module",))) as child, pytest.raises(TunerError, match="no_such_module"):
        child.ready(60)


def test_starting_a_process_ends_at_the_deadline_too() -> None:
    with ChildProcess(Setup(preload=("slow_to_import",)), {"SLOW_S": "1000"}) as child:
        with pytest.raises(JobError, match="before it could begin"):
            child.run(faults.Echo(1), LIMIT_S, deadline=time.monotonic() + 0.1)
        assert child.pid is None
        with pytest.raises(JobError, match="before it could begin"):
            child.run(faults.Echo(1), LIMIT_S, deadline=time.monotonic())
        assert child.pid is None
