"""The suite interprets Triton kernels, except when it is asked for the tests that need a GPU."""

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # Several test processes share few cores: more threads in each would only wait for one another.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Triton reads this when it is imported, and one process never both interprets and compiles.
    if config.option.markexpr != "gpu":
        assert "triton" not in sys.modules
        os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True, scope="module")
def _give_memory_back() -> Iterator[None]:
    """After a module the C library returns freed memory, which a process of few large tensors would keep."""
    yield
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
