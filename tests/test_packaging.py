"""What ships: every package and data file of the folders, and nothing else of the root."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("kernel_templates", "search_spaces", "db", "runtime", "tuner")
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]


def files(pattern: str) -> set[Path]:
    return {path for folder in FOLDERS for path in (ROOT / folder).rglob(pattern)}


def test_every_folder_with_modules_is_a_listed_package() -> None:
    folders = {path.parent.relative_to(ROOT) for path in files("*.py")}
    assert {".".join(("attention_tuner", *folder.parts)) for folder in folders} | {"attention_tuner"} == set(
        SETUPTOOLS["packages"]
    )
    assert all((ROOT / folder / "__init__.py").is_file() for folder in folders)


def test_every_data_file_ships() -> None:
    shipped = {
        path
        for package, patterns in SETUPTOOLS["package-data"].items()
        for pattern in patterns
        for path in ROOT.joinpath(*package.split(".")[1:]).glob(pattern)
    }
    data = {path for path in files("*.*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert data
    assert data <= shipped
    assert ROOT / "py.typed" in shipped
    assert set((ROOT / "db" / "configs").glob("*.json")) <= shipped
    assert ROOT / "db" / "configs" / "README.md" in shipped


def test_the_root_holds_one_module() -> None:
    assert [path.name for path in ROOT.glob("*.py")] == ["__init__.py"]
