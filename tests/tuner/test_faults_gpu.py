"""The faults of `test_faults.py` on a GPU, where an illegal access and an endless kernel are the GPU's own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from fault_harness import SETTINGS, Impatient, MakeFaulty
from faulty_template import GOOD

from attention_tuner.kernel_templates.gpu import Gpu
from attention_tuner.kernel_templates.launch.device import present_gpu
from attention_tuner.tuner.processes.compile import CompilePool
from attention_tuner.tuner.processes.worker import Worker
from attention_tuner.tuner.settings import TaskResult

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    found = present_gpu()
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("fault", "stage", "reason"),
    [
        ("illegal_address", "check", r"illegal memory access"),
        ("endless_kernel", "check", r"^gave no result within 20 s"),
        ("out_of_memory", "check", r"^OutOfMemoryError"),
        ("endless_compile", "compile", r"^gave no result within 20 s"),
        ("compiler_abort", "compile", r"^killed by SIGABRT: LLVM ERROR: Cannot select"),
    ],
)
def test_one_variant_is_to_blame(make_faulty: MakeFaulty, gpu: Gpu, fault: str, stage: str, reason: str) -> None:
    faulty = make_faulty(fault, gpu)
    # One compile at a time keeps the order of the trials; a second one goes on beside a compile that does not end.
    pool = CompilePool(2 if stage == "compile" else 1, limit_s=20)
    result = faulty.tune(Impatient(interpret=False, limit_s=20), pool)
    faulty.check_blame(result, stage, reason)


def test_two_tuners_at_once_on_one_gpu(make_faulty: MakeFaulty, gpu: Gpu, tmp_path: Path) -> None:
    faulty = make_faulty("out_of_memory", gpu)

    def tuned(number: int) -> TaskResult:
        return replace(faulty, path=tmp_path / f"{number}.db").tune(Worker.on(gpu), CompilePool(1))

    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(tuned, range(2)))
    assert [result.tried for result in results] == [SETTINGS.trials] * 2
    for result in results:
        assert result.best is not None
        assert result.best.variant.text("fault") == GOOD
