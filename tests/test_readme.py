"""What the README says is done, is done: its commands exist, its Python runs, its figures are those recorded."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from attention_tuner.tuner.cli import PROGRAM, app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    lines = [line.removeprefix("$ ") for text in blocks("sh") + blocks("console") for line in text.splitlines()]
    parts = [part.strip() for line in lines for part in line.split("&&")]
    return [part for part in parts if part.startswith(f"{PROGRAM} ")]


def test_the_second_command_is_what_ci_runs():
    assert blocks("sh")[1].strip() in (ROOT / ".ci" / "run").read_text().splitlines()


@pytest.mark.parametrize("command", commands())
def test_every_command_is_accepted(command: str):
    name, *arguments = shlex.split(command)[1:]
    found = get_command(app).commands[name]  # pyright: ignore
    # Reads the arguments, and runs nothing.
    found.make_context(name, arguments)


def test_every_command_of_the_program_is_mentioned():
    for name in get_command(app).commands:  # pyright: ignore
        assert re.search(rf"\b{name}\b", README), name


def test_the_python_example_runs(tmp_path: Path):
    (example,) = blocks("python")
    environment = {"PYTHONPATH": ":".join(sys.path), "ATTENTION_TUNER_DB": str(tmp_path / "none.db"), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", example], env=environment, capture_output=True, text=True, check=False)
    assert re.match(r"(heuristic|exact|bucket|neighbour) \w+:page_size=16,", done.stdout), done.stderr


def test_the_table_holds_what_was_recorded():
    rows = re.findall(r"^\| Llama 3 (8B|70B).*?\| (16|128) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+)x \| (\w+) \|$", README,
                      re.MULTILINE)  # fmt: skip
    recorded = [
        (result["page_size"], result["best"])
        for name in ("llama-3-8b", "llama-3-70b-tp8")
        for result in json.loads((ROOT / f"benchmarks/results/h200_tune/{name}.json").read_text())["results"]
    ]
    assert len(rows) == len(recorded) == 20
    for (_, page, default, best, speedup, verdict), (page_size, config) in zip(rows, recorded, strict=True):
        assert int(page) == page_size
        assert float(default) == round(config["default_time"]["median_ms"], 3)
        assert float(best) == round(config["time"]["median_ms"], 3)
        assert float(speedup) == round(config["speedup"], 2)
        assert verdict == config["verdict"]
