"""The suite interprets Triton kernels, except when it is asked for the tests that need a GPU."""

import os
import sys

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # Several test processes share few cores: more threads in each would only wait for one another.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Triton reads this when it is imported, and one process never both interprets and compiles.
    if config.option.markexpr != "gpu":
        assert "triton" not in sys.modules
        os.environ["TRITON_INTERPRET"] = "1"
