import sys
from pathlib import Path

import pytest

# Child processes are given the parent's path, and unpickle jobs of `job_faults` by that name.
sys.path.append(str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or fills the user's cache of compiled kernels."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
