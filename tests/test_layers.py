"""Which modules may import which: the layers, the folders that own a library, no cycles, and what must stay light."""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import attention_tuner

ROOT = Path(attention_tuner.__file__).parent
FOLDERS = ("kernel_templates", "search_spaces", "db", "runtime", "tuner")

ALLOWED = {
    "kernel_templates": {"kernel_templates"},
    "search_spaces": {"search_spaces", "kernel_templates"},
    "db": {"db", "kernel_templates"},
    "runtime": {"runtime", "db", "kernel_templates"},
    "tuner": {"tuner", "db", "search_spaces", "kernel_templates"},
}

OWNERS = {"triton": "kernel_templates", "sqlalchemy": "db", "alembic": "db", "rich": "tuner.console.output"}

RECORDS = ("errors", "gpu", "spec", "batch", "variant", "template", "registry", "outcome")
TORCH_FREE = (*RECORDS, "task", "heuristic", "launch.room", "triton_family.templates")

Imports = list[tuple[str, bool]]


def imports_of(path: Path, root: Path = ROOT) -> Imports:
    """Every module imported by the file at `path` as `(name, whether importing the file imports it)`.

    Names of this package begin with its folder, such as `db.store.Store`; those of others are the module alone.
    """
    package = path.relative_to(root).parent.parts
    found: Imports = []
    for node, immediate in _walk(ast.parse(path.read_text(encoding="utf-8")), immediate=True):
        if isinstance(node, ast.Import):
            found += [(alias.name, immediate) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}".lstrip(".") for alias in node.names] if node.level else [module]
            found += [(name, immediate) for name in names]
    return found


def _walk(node: ast.AST, immediate: bool) -> Iterator[tuple[ast.AST, bool]]:
    """The nodes below `node`; what stands in functions and under `if TYPE_CHECKING` is not immediate."""
    for child in ast.iter_child_nodes(node):
        later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
            isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        )
        yield child, immediate
        yield from _walk(child, immediate and not later)


@functools.cache
def sources() -> dict[str, Path]:
    """The file of every module of the folders by the module's name, such as `db.store`."""
    found: dict[str, Path] = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def modules() -> dict[str, Imports]:
    """The imports of every module of the folders."""
    return {name: imports_of(path) for name, path in sources().items()}


def loaded_by(statement: str) -> set[str]:
    """The top-level names that are loaded in a fresh process after `statement`."""
    code = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_there_is_something_to_look_at() -> None:
    for folder in FOLDERS:
        assert sum(name.startswith(f"{folder}.") for name in modules()) >= 3, folder


def test_a_folder_imports_only_the_layers_below() -> None:
    wrong = [
        f"{module} imports {name}"
        for module, names in modules().items()
        for name, _ in names
        if (layer := name.partition(".")[0]) in FOLDERS and layer not in ALLOWED[module.partition(".")[0]]
    ]
    assert wrong == []


@pytest.mark.parametrize(("library", "owner"), OWNERS.items())
def test_only_its_owner_imports_a_library(library: str, owner: str) -> None:
    users = {module for module, names in modules().items() for name, _ in names if name.partition(".")[0] == library}
    assert users
    assert [module for module in users if module != owner and not module.startswith(f"{owner}.")] == []


def test_no_cycle_among_modules_counting_the_imports_inside_functions() -> None:
    graph = {module: {_module_of(name) for name, _ in names} - {module, ""} for module, names in modules().items()}
    assert any(graph.values())
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(graph)


@pytest.mark.parametrize("folder", FOLDERS)
def test_sibling_folders_import_one_way(folder: str) -> None:
    graph: dict[str, set[str]] = {}
    for module, names in modules().items():
        # The registry lists the templates of the folders, and launchers ask it for them.
        if module.startswith(f"{folder}.") and module != "kernel_templates.registry":
            node = _node_of(module)
            imported = {_node_of(found) for name, _ in names if (found := _module_of(name)).startswith(f"{folder}.")}
            graph.setdefault(node, set()).update(imported - {node})
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) >= 3


def _node_of(module: str) -> str:
    """The folder below a top folder that `module` stands in, or the module itself where it stands in none."""
    layer, _, rest = module.partition(".")
    name = f"{layer}.{rest.partition('.')[0]}"
    return f"{name}/" if sources()[name].name == "__init__.py" else name


def _module_of(name: str) -> str:
    """The module of this package that `name` is or is defined in, or "" when it is of none."""
    while name and name not in sources():
        name = name.rpartition(".")[0]
    return name


def test_imports_within_the_package_are_relative() -> None:
    for name, path in sources().items():
        absolute = {
            module
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            for module in _absolute_imports(node)
            if module.partition(".")[0] in ("attention_tuner", *FOLDERS)
        }
        # Alembic runs its environment and its versions as loose files, where no relative import works.
        assert not absolute or name.startswith("db.migrations."), f"{name} imports {absolute}"


def _absolute_imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_module_never_imports_torch_or_triton(name: str) -> None:
    imported = {module.partition(".")[0] for module, _ in modules()[f"kernel_templates.{name}"]}
    assert not imported & {"torch", "triton"}


def test_records_and_rules_load_no_torch_and_no_triton() -> None:
    names = ", ".join(f"attention_tuner.kernel_templates.{name}" for name in TORCH_FREE)
    assert not loaded_by(f"import {names}") & {"torch", "triton", "optuna", "sqlalchemy"}


def test_the_templates_are_listed_without_torch_and_triton() -> None:
    statement = "from attention_tuner.kernel_templates.registry import templates; templates()"
    assert not loaded_by(statement) & {"torch", "triton"}


def test_db_loads_no_torch_no_triton_and_no_optuna() -> None:
    names = [module for module in modules() if module.startswith("db") and not module.startswith("db.migrations")]
    loaded = loaded_by(f"import {', '.join(f'attention_tuner.{name}' for name in names)}")
    assert "sqlalchemy" in loaded
    assert not loaded & {"torch", "triton", "optuna"}


def test_loading_a_table_loads_no_alembic(tmp_path: Path) -> None:
    # Which takes longer to import than ten thousand rows to load.
    path = str(tmp_path / "tuner.db")
    loaded = loaded_by(f"from attention_tuner.db import Store, load_table; Store.open({path!r}).close()")
    assert "alembic" in loaded
    loaded = loaded_by(f"from attention_tuner.db import load_table; load_table({path!r})")
    assert "alembic" not in loaded


def test_search_spaces_load_no_torch_and_no_triton() -> None:
    names = [module for module in modules() if module.startswith("search_spaces")]
    loaded = loaded_by(f"import {', '.join(f'attention_tuner.{name}' for name in names)}")
    assert not loaded & {"torch", "triton", "optuna"}


def test_the_reader_of_imports_sees_what_the_rules_need(tmp_path: Path) -> None:
    folder = tmp_path / "tuner"
    folder.mkdir()
    path = folder / "sample.py"
    path.write_text(
        "import torch.nn\nfrom . import study\nfrom ..db import store\nfrom ..db.table import ConfigTable\n"
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import triton\n"
        "def later():\n    from ..search_spaces import space\n"
    )
    found = imports_of(path, tmp_path)
    assert [name for name, immediate in found if immediate] == [
        "torch.nn", "tuner.study", "db.store", "db.table.ConfigTable", "typing",
    ]
    assert [name for name, immediate in found if not immediate] == ["triton", "search_spaces.space"]
