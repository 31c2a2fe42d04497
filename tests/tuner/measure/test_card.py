from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from attention_tuner.kernel_templates.outcome import JobError
from attention_tuner.tuner.measure import card
from attention_tuner.tuner.measure.card import (
    CardProcess,
    CardState,
    GpuLock,
    ThrottleWatch,
    card_state,
    foreign_processes,
    foreign_sentence,
)

UUID = "GPU-6d2b3f1e-0000-1111-2222-333344445555"
HOLDER = """
import sys, time, pathlib
from attention_tuner.tuner.card import GpuLock
with GpuLock(sys.argv[1], pathlib.Path(sys.argv[2])).held():
    print("held", flush=True)
    time.sleep(1000)
"""
TURNS = """
import sys, time, pathlib
from attention_tuner.tuner.card import GpuLock
lock = GpuLock(sys.argv[1], pathlib.Path(sys.argv[2]))
print("ready", flush=True)
sys.stdin.readline()
for _ in range(10):
    with lock.held():
        start = time.monotonic()
        time.sleep(0.02)
        print(start, time.monotonic(), flush=True)
"""
STATE = "1980, 2619, 1980, 3201, 698.25, 700.00, 61, Enabled, Enabled, {reasons}"


def fake_tool(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """An `nvidia-smi` that is this shell script."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


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


def test_waiting_for_a_card_that_another_process_holds_ends_at_the_deadline(
    holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    begin = time.monotonic()
    with pytest.raises(JobError, match=f"another run kept GPU {UUID}"), GpuLock(UUID, tmp_path).held(begin + 0.2):
        pass
    assert 0.2 <= time.monotonic() - begin < 5
    with GpuLock(f"{UUID}0", tmp_path).held(0):
        pass  # another card is free


def test_the_lock_of_a_process_that_was_killed_is_released(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    lock = GpuLock(UUID, tmp_path)
    threading.Timer(0.1, holder.send_signal, [signal.SIGKILL]).start()
    with lock.held(time.monotonic() + 30):
        assert holder.wait(10) == -signal.SIGKILL
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
    # 19 when neither ever runs twice in a row; the first may have begun alone, and the last ends alone.
    assert changes >= 10


def test_the_lock_is_free_again_after_an_error(tmp_path: Path) -> None:
    lock = GpuLock(UUID, tmp_path)
    with pytest.raises(ValueError, match="inside"), lock.held():
        raise ValueError("inside")
    with lock.held(0):
        pass


def test_waiting_for_a_card_ends_when_the_one_who_waits_is_closed(
    holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    closed = threading.Event()
    threading.Timer(0.2, closed.set).start()
    begin = time.monotonic()
    with pytest.raises(JobError, match="closed"), GpuLock(UUID, tmp_path).held(begin + 30, closed):
        pass
    # The timer began a little earlier.
    assert 0.1 <= time.monotonic() - begin < 10


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


def test_the_state_is_what_the_tool_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f'echo "$@" > {tmp_path}/asked; echo "{STATE.format(reasons="0x0000000000000004")}"'
    fake_tool(tmp_path, monkeypatch, script)
    state = card_state(UUID)
    assert state == CardState(1980, 2619, 1980, 3201, 698.25, 700, 61, "Enabled", "Enabled", ("power cap",))
    assert not state.is_throttled
    asked = (tmp_path / "asked").read_text()
    assert f"--id={UUID} --query-gpu=clocks.sm," in asked
    assert asked.rstrip().endswith("--format=csv,noheader,nounits")


@pytest.mark.parametrize(
    ("mask", "throttled"),
    [("0x0", False), ("0x5", False), ("0x8", True), ("0x24", True), ("0x40", True), ("0x80", True)],
)
def test_heat_and_power_supply_throttle_but_not_the_power_cap(
    mask: str, throttled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_tool(tmp_path, monkeypatch, f'echo "{STATE.format(reasons=mask)}"')
    state = card_state(UUID)
    assert state is not None
    assert state.is_throttled is throttled


def test_what_a_card_does_not_tell_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = "1980, [N/A], N/A, 3201, [Unknown Error], 700.00, 61, Enabled, [N/A], [N/A]"
    fake_tool(tmp_path, monkeypatch, f'echo "{told}"')
    state = card_state(UUID)
    assert state == CardState(1980, None, None, 3201, None, 700, 61, "Enabled", "[N/A]")


@pytest.mark.parametrize("script", ["exit 6", "true", "kill -9 $$"])
def test_a_tool_that_gives_no_answer_is_no_state_and_no_process(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_tool(tmp_path, monkeypatch, script)
    assert card_state(UUID) is None
    assert foreign_processes(UUID, ()) == []


def test_a_tool_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tool(tmp_path, monkeypatch, "exec sleep 1000")
    monkeypatch.setattr(card, "READ_LIMIT_S", 0.1)
    assert card_state(UUID) is None


def test_without_the_tool_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert card_state(UUID) is None
    assert foreign_processes(UUID, ()) == []


def test_foreign_processes_are_those_of_others_on_the_same_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = (f"{UUID}, 11, 520, python3", f"{UUID}, 12, [N/A], /opt/a, b/server", "GPU-other, 13, 9, python3",
            f"{UUID}, 14, 3, own", f"{UUID}, [N/A], [N/A], [Not Found]")  # fmt: skip
    fake_tool(tmp_path, monkeypatch, "\n".join(f'echo "{row}"' for row in rows))
    found = foreign_processes(UUID, {14})
    assert found == [CardProcess(11, "python3", 520), CardProcess(12, "/opt/a, b/server")]
    sentence = foreign_sentence(found)
    assert "python3 (pid 11), /opt/a, b/server (pid 12)" in sentence


def test_a_watch_says_when_the_card_was_throttled() -> None:
    states = iter([CardState(), CardState(reasons=("hardware thermal slowdown",)), None])
    with ThrottleWatch(UUID, lambda uuid: next(states)) as watch:
        begin = time.monotonic()
        while not watch.throttled(0, time.monotonic()):
            assert time.monotonic() < begin + 30
            time.sleep(0.01)
        seen = time.monotonic()
    assert watch.throttled(begin, seen)
    assert not watch.throttled(0, begin - 1)
    assert not watch.throttled(seen + 1, seen + 2)


def test_a_watch_of_no_card_sees_nothing() -> None:
    def look(uuid: str) -> CardState:
        raise AssertionError("there is nothing to look at")

    with ThrottleWatch(None, look) as watch:
        assert not watch.throttled(0, time.monotonic())


@pytest.mark.gpu
def test_the_present_card_tells_its_clocks_and_power() -> None:
    from attention_tuner.kernel_templates.launch.device import present_uuid

    uuid = present_uuid()
    assert uuid is not None
    state = card_state(uuid)
    assert state is not None
    for value in (state.sm_clock_mhz, state.max_sm_clock_mhz, state.power_w, state.power_limit_w, state.temperature_c):
        assert value is not None
        assert value > 0
    assert not state.is_throttled
