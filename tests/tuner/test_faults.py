"""Faults of a variant against the processes that compile and measure it, through the real loop on a CPU.

Each time it alone is blamed, everything else is measured and kept, and the run ends with the best of the rest.
"""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from fault_harness import SETTINGS, Impatient, MakeFaulty, Watcher
from faulty_template import GOOD

from attention_tuner.kernel_templates.gpu import TARGETS
from attention_tuner.tuner.processes.compile import COMPILER, CompilePool
from attention_tuner.tuner.processes.worker import GpuLock, Worker
from attention_tuner.tuner.settings import TaskResult


def test_an_illegal_address_is_blamed_on_its_variant(make_faulty: MakeFaulty) -> None:
    faulty = make_faulty("illegal_address")
    result = faulty.tune(Worker(interpret=True))
    faulty.check_blame(result, "check", r"^killed by SIGSEGV")


def test_an_endless_kernel_is_ended_and_blamed(make_faulty: MakeFaulty) -> None:
    faulty = make_faulty("endless_kernel")
    result = faulty.tune(Impatient(interpret=True, limit_s=10))
    faulty.check_blame(result, "check", r"^gave no result within 10 s")


def test_running_out_of_memory_costs_no_process(make_faulty: MakeFaulty) -> None:
    faulty = make_faulty("out_of_memory")
    worker = Worker(interpret=True)
    pids: set[int | None] = set()
    result = faulty.tune(worker, listener=Watcher(lambda done: pids.add(worker.pid)))
    faulty.check_blame(result, "check", r"allocate memory")
    # It costs no process: what the variant had allocated was given back.
    assert len(pids) == 1


def test_a_variant_that_kills_its_worker_is_blamed(make_faulty: MakeFaulty) -> None:
    faulty = make_faulty("sigkill")
    result = faulty.tune(Worker(interpret=True))
    faulty.check_blame(result, "check", r"^killed by SIGKILL")


@pytest.mark.parametrize("after_s", [0.0, 0.03])
def test_a_worker_that_is_killed_from_outside_costs_no_variant(make_faulty: MakeFaulty, after_s: float) -> None:
    faulty = make_faulty("out_of_memory")
    worker = Worker(interpret=True)
    pids: list[int] = []

    def kill(done: int) -> None:
        assert worker.pid is not None
        pids.append(worker.pid)
        if done == 2:
            threading.Timer(after_s, os.kill, (worker.pid, signal.SIGKILL)).start()

    result = faulty.tune(worker, listener=Watcher(kill))
    faulty.check_blame(result, "check", r"allocate memory")
    assert len(set(pids)) == 2


def test_an_endless_compile_is_ended_and_blamed(make_faulty: MakeFaulty) -> None:
    faulty = make_faulty("endless_compile", TARGETS["sm_90"])
    result = faulty.tune(Worker(interpret=True), CompilePool(1, limit_s=10, preload=(COMPILER,)))
    faulty.check_blame(result, "compile", r"^gave no result within 10 s")


def test_a_compiler_that_aborts_is_blamed(make_faulty: MakeFaulty) -> None:
    faulty = make_faulty("compiler_abort", TARGETS["sm_90"])
    result = faulty.tune(Worker(interpret=True), CompilePool(1))
    faulty.check_blame(result, "compile", r"^killed by SIGABRT: LLVM ERROR: Cannot select")


def test_a_variant_that_failed_is_not_tried_again(make_faulty: MakeFaulty) -> None:
    faulty = make_faulty("sigkill")
    faulty.tune(Worker(interpret=True))
    result = faulty.tune(Worker(interpret=True))
    assert (result.tried, result.reused) == (0, SETTINGS.trials)
    assert result.best is not None
    assert result.best.variant.text("fault") == GOOD


def test_two_tuners_on_one_gpu_never_launch_at_once(
    make_faulty: MakeFaulty, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "launches.txt"
    monkeypatch.setenv("LAUNCH_LOG", str(log))
    faulty = make_faulty("out_of_memory")

    def tuned(number: int) -> TaskResult:
        lock = GpuLock("GPU-0", tmp_path / "locks")
        return replace(faulty, path=tmp_path / f"{number}.db").tune(Worker(interpret=True, lock=lock))

    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(tuned, range(2)))
    assert [result.tried for result in results] == [SETTINGS.trials] * 2
    assert all(result.best is not None for result in results)
    launches = sorted(tuple(map(float, line.split())) for line in log.read_text().splitlines())
    assert len({process for _, _, process in launches}) == 2
    # No launch of one begins while one of the other runs.
    assert all(end <= begin for (_, end, _), (begin, _, _) in pairwise(launches))
