from __future__ import annotations

import time
from pathlib import Path

import pytest

from attention_tuner.tuner.measure import gpu_state
from attention_tuner.tuner.measure.gpu_state import (
    GpuProcess,
    GpuState,
    ThrottleWatch,
    foreign_processes,
    foreign_sentence,
    read_gpu_state,
)

UUID = "GPU-6d2b3f1e-0000-1111-2222-333344445555"
STATE = "1980, 2619, 1980, 3201, 698.25, 700.00, 61, Enabled, Enabled, {reasons}"


def fake_tool(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """An `nvidia-smi` that is this shell script."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_the_state_is_what_the_tool_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f'echo "$@" > {tmp_path}/asked; echo "{STATE.format(reasons="0x0000000000000004")}"'
    fake_tool(tmp_path, monkeypatch, script)
    state = read_gpu_state(UUID)
    assert state == GpuState(1980, 2619, 1980, 3201, 698.25, 700, 61, "Enabled", "Enabled", ("power cap",))
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
    state = read_gpu_state(UUID)
    assert state is not None
    assert state.is_throttled is throttled


def test_what_a_gpu_does_not_tell_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = "1980, [N/A], N/A, 3201, [Unknown Error], 700.00, 61, Enabled, [N/A], [N/A]"
    fake_tool(tmp_path, monkeypatch, f'echo "{told}"')
    state = read_gpu_state(UUID)
    assert state == GpuState(1980, None, None, 3201, None, 700, 61, "Enabled", "[N/A]")


@pytest.mark.parametrize("script", ["exit 6", "true", "kill -9 $$"])
def test_a_tool_that_gives_no_answer_is_no_state_and_no_process(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_tool(tmp_path, monkeypatch, script)
    assert read_gpu_state(UUID) is None
    assert foreign_processes(UUID, ()) == []


def test_a_tool_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tool(tmp_path, monkeypatch, "exec sleep 1000")
    monkeypatch.setattr(gpu_state, "READ_LIMIT_S", 0.1)
    assert read_gpu_state(UUID) is None


def test_without_the_tool_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_gpu_state(UUID) is None
    assert foreign_processes(UUID, ()) == []


def test_foreign_processes_are_those_of_others_on_the_same_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = (f"{UUID}, 11, 520, python3", f"{UUID}, 12, [N/A], /opt/a, b/server", "GPU-other, 13, 9, python3",
            f"{UUID}, 14, 3, own", f"{UUID}, [N/A], [N/A], [Not Found]")  # fmt: skip
    fake_tool(tmp_path, monkeypatch, "\n".join(f'echo "{row}"' for row in rows))
    found = foreign_processes(UUID, {14})
    assert found == [GpuProcess(11, "python3", 520), GpuProcess(12, "/opt/a, b/server")]
    sentence = foreign_sentence(found)
    assert "python3 (pid 11), /opt/a, b/server (pid 12)" in sentence


def test_a_watch_says_when_the_gpu_was_throttled() -> None:
    states = iter([GpuState(), GpuState(reasons=("hardware thermal slowdown",)), None])
    with ThrottleWatch(UUID, lambda uuid: next(states)) as watch:
        begin = time.monotonic()
        while not watch.throttled(0, time.monotonic()):
            assert time.monotonic() < begin + 30
            time.sleep(0.01)
        seen = time.monotonic()
    assert watch.throttled(begin, seen)
    assert not watch.throttled(0, begin - 1)
    assert not watch.throttled(seen + 1, seen + 2)


def test_a_watch_of_no_gpu_sees_nothing() -> None:
    def look(uuid: str) -> GpuState:
        raise AssertionError("there is nothing to look at")

    with ThrottleWatch(None, look) as watch:
        assert not watch.throttled(0, time.monotonic())


@pytest.mark.gpu
def test_the_present_gpu_tells_its_clocks_and_power() -> None:
    from attention_tuner.kernel_templates.launch.device import present_uuid

    uuid = present_uuid()
    assert uuid is not None
    state = read_gpu_state(uuid)
    assert state is not None
    for value in (state.sm_clock_mhz, state.max_sm_clock_mhz, state.power_w, state.power_limit_w, state.temperature_c):
        assert value is not None
        assert value > 0
    assert not state.is_throttled
