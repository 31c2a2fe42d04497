import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Child processes are given the parent's path, and unpickle jobs of `job_faults` by that name.
sys.path.append(str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or fills the user's cache of compiled kernels."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def make_faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Installs the template with a fault for one test, and gives the search over its variants."""
    from fault_harness import Faulty, install

    from attention_tuner.kernel_templates.gpu import INTERPRETER, Gpu
    from attention_tuner.kernel_templates.registry import templates

    def make(fault: str, gpu: Gpu = INTERPRETER) -> Faulty:
        install(fault, tmp_path, monkeypatch)
        return Faulty(tmp_path / "tuner.db", fault, gpu)

    yield make
    templates.cache_clear()
