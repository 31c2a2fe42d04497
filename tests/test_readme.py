"""Checks of the documents: commands parse, Python runs, links lead somewhere, tables hold the recorded figures."""

from __future__ import annotations

import functools
import json
import re
import shlex
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from attention_tuner.db import shipped_configs
from attention_tuner.tuner.console.app import PROGRAM, app

ROOT = Path(__file__).parents[1]
DOCUMENTS = [path for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
             if path.exists()]
TEXT = {path: path.read_text() for path in DOCUMENTS}
# A snippet that says so in a comment needs a GPU, or what an earlier snippet made there.
NEEDS_GPU = re.compile(r"#.*\b(GPU|CUDA)\b|cuda\.CUDAGraph")


def blocks(language: str) -> list[tuple[Path, str]]:
    """The fenced blocks of a language, with their documents."""
    pattern = rf"^```{language}\n(.*?)^```"
    return [(path, each) for path, text in TEXT.items() for each in re.findall(pattern, text, re.DOTALL | re.MULTILINE)]


def commands() -> list[str]:
    """The command lines of this program in the documents' shell blocks."""
    lines = [line.removeprefix("$ ") for language in ("sh", "console", "bash") for _, text in blocks(language)
             for line in text.replace("\\\n", " ").splitlines()]
    parts = [part.strip() for line in lines for part in line.split("&&")]
    return [part for part in parts if part.startswith(f"{PROGRAM} ")]


def group(command: Any) -> dict[str, Any]:
    """The commands below `command`, by name."""
    return getattr(command, "commands", {})


def test_ci_runs_the_tests_as_the_readme_says():
    found = [line for path, text in blocks("sh") if path.name == "README.md" for line in text.splitlines()]
    command = "pip install '.[test]' && pytest -n 2"
    assert command in found
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()


@pytest.mark.parametrize("command", dict.fromkeys(commands()))
def test_a_command_line_is_accepted(command: str):
    words, found = shlex.split(command, comments=True)[1:], get_command(app)
    while words and words[0] in group(found):
        found = group(found)[words.pop(0)]
    # Reads the arguments, and runs nothing.
    found.make_context(found.name, words, resilient_parsing=words == ["--help"])


def test_the_readme_can_be_read_in_one_sitting():
    text = TEXT[ROOT / "README.md"]
    assert len(text.splitlines()) <= 200
    assert len(text.split()) <= 1600


def test_every_command_is_named():
    text = "\n".join(TEXT.values())
    names = list(group(get_command(app)))
    names += [f"report {name}" for name in group(group(get_command(app))["report"])]
    assert names
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []


def test_links_to_files_lead_somewhere():
    links = [(path, link) for path, text in TEXT.items() for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)]
    local = [(path, link) for path, link in links if "://" not in link and not link.startswith("mailto:")]
    assert local
    assert [f"{path.name}: {link}" for path, link in local if not (path.parent / link).exists()] == []


def test_python_compiles():
    snippets = blocks("python")
    assert snippets
    for path, text in snippets:
        compile(text, path.name, "exec")


def snippets_of_a_cpu() -> list[Any]:
    """The Python of each document that needs no GPU: one script each snippet."""
    return [pytest.param(text, id=f"{path.name}-{index}") for index, (path, text) in enumerate(blocks("python"))
            if not needs_gpu(text)]


def needs_gpu(text: str) -> bool:
    """True if a snippet needs a GPU, or does not stand alone."""
    return bool(NEEDS_GPU.search(text)) and "TRITON_INTERPRET" not in text


@pytest.mark.parametrize("snippet", snippets_of_a_cpu())
def test_python_that_needs_no_gpu_runs(snippet: str, tmp_path: Path):
    environment = {"PATH": "", "PYTHONPATH": ":".join(sys.path), "ATTENTION_TUNER_DB": str(tmp_path / "none.db"),
                   "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", snippet], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("path", dict.fromkeys(path for path, _ in blocks("python")), ids=lambda path: path.name)
def test_python_of_a_document_runs_in_its_order_on_a_gpu(path: Path):
    script = "\n".join(text for each, text in blocks("python") if each == path)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@functools.cache
def rows_of(pattern: str) -> list[tuple[str, ...]]:
    """The table rows of all documents that match."""
    return [row for text in TEXT.values() for row in re.findall(pattern, text, re.MULTILINE)]


def test_tables_of_peers_hold_what_was_recorded():
    cells = json.loads((ROOT / "benchmarks/results/h200_peers/peers.json").read_text())["cells"].values()
    times = {
        (cell["workload"], cell["page_size"]): {
            entry["name"]: statistics.median(entry["samples_ms"])
            for entry in cell["entries"] if entry["state"] == "timed"
        }
        for cell in cells
    }  # fmt: skip
    number = r"([\d.]+)"
    columns = rf"{number} \| {number} [^|]+\| {number}"
    rows = rows_of(rf"^\| (\w[\w@]+) \| {columns} \| {number} \| {columns} \|$")
    assert {row[0] for row in rows} == {cell["workload"] for cell in cells}
    for workload, *texts in rows:
        found: list[float] = []
        for page_size in (16, 128):
            ms = times[workload, page_size]
            ours = min(value for name, value in ms.items() if name.startswith("ours:"))
            peer = min(value for name, value in ms.items() if not name.startswith("ours:"))
            found += [round(ours, 4), round(peer, 4), round(peer / ours, 2)]
            found += [round(ms["vllm_triton"] / ours, 2)] if page_size == 16 else []
        assert [float(text) for text in texts] == found


def test_tables_of_shipped_configs_hold_their_numbers():
    configs = shipped_configs()
    counts = Counter((f"{c.shape.spec.num_q_heads}/{c.shape.spec.num_kv_heads}", c.variant.page_size) for c in configs)
    rows = rows_of(r"^\| (\d+/\d+) \| (\d+) \| (\d+) \|$")
    assert {(heads, size): int(n) for heads, *ns in rows for size, n in zip((16, 128), ns, strict=True)} == counts


def test_the_losses_that_ship_are_those_recorded():
    results = [f"benchmarks/results/{name}_h200.json" for name in ("buckets", "leave_one_out")]
    recorded = [loss for path in results for loss in json.loads((ROOT / path).read_text())["losses"]]
    assert json.loads((ROOT / "db/configs/NVIDIA_H200.json").read_text())["losses"] == recorded
