"""Public names: exactly these, each found in its module, and cheap to import."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import attention_tuner

PUBLIC = [
    "AttentionSpec",
    "Batch",
    "BatchBucket",
    "BestConfig",
    "ConfigTable",
    "Executor",
    "Gpu",
    "HybridAttention",
    "Settings",
    "Shape",
    "Store",
    "Task",
    "Tensors",
    "TunerError",
    "Variant",
    "__version__",
    "executor_on",
    "lookup",
    "make_launcher",
    "merge",
    "tune",
    "unified_attention",
]


def test_these_names_are_public() -> None:
    assert attention_tuner.__all__ == PUBLIC
    assert set(PUBLIC) <= set(dir(attention_tuner))


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_found_and_documented(name: str) -> None:
    value = getattr(attention_tuner, name)
    if name == "__version__":
        assert re.fullmatch(r"\d+\.\d+.*|unknown", value)
    else:
        assert value.__name__ == name
        assert value.__doc__


def test_type_checkers_see_the_same_names_in_the_same_modules() -> None:
    tree = ast.parse(Path(attention_tuner.__file__).read_text(encoding="utf-8"))
    (guarded,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname: f".{statement.module}"
        for statement in guarded.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert seen == attention_tuner._HOMES
    assert sorted([*seen, "__version__"]) == PUBLIC


def test_any_other_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'attention_tuner' has no attribute 'nothing'"):
        attention_tuner.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import attention_tuner", ["torch", "triton", "optuna", "sqlalchemy", "numpy", "typer", "rich"]),
        ("from attention_tuner import AttentionSpec, Batch, BestConfig, Variant", ["torch", "triton", "sqlalchemy"]),
        ("from attention_tuner import ConfigTable, Store, lookup", ["torch", "triton", "optuna"]),
    ],
)
def test_importing_loads_nothing_heavy(statement: str, unwanted: list[str]) -> None:
    code = f"import sys; {statement}; print(*(name for name in {unwanted} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_the_root_folder_may_be_loaded_under_another_name() -> None:
    spec = importlib.util.spec_from_file_location("checkout", attention_tuner.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.__all__ == PUBLIC
