"""Measure the code: files and lines per folder, imports, parameters, options, and modules used by a call.

    PYTHONPATH=FOLDER python benchmarks/structure.py --out structure.json

FOLDER holds a link or checkout called `attention_tuner`, which is the tree measured. A module counts as passed if one
of its functions runs during a call of `tune` (in any of its processes), `HybridAttention.plan` or
`HybridAttention.run`, in Triton's interpreter on a small batch.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import attention_tuner

ROOT = Path(attention_tuner.__file__).parent
FOLDERS = ("kernel_templates", "search_spaces", "db", "runtime", "tuner")
PARAMETERS, LINES, KERNEL_LINES = 6, 60, 120

# Appends to the file $PASSED, once, each module of the package in which a function runs after the module is imported.
WATCH = """
import os, sys, threading
_out = os.environ.get("PASSED")
if _out:
    _root, _seen = os.environ["PASSED_ROOT"], set()
    _armed = os.environ.get("PASSED_ARMED") == "1"
    def _is_import(frame):
        while frame is not None:
            if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(_root):
                return not frame.f_code.co_filename.endswith("__main__.py")
            frame = frame.f_back
        return False
    def _profile(frame, event, argument):
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(_root) and path not in _seen and not _is_import(frame):
            _seen.add(path)
            with open(_out, "a") as file:
                file.write(path[len(_root) + 1:] + chr(10))
    if _armed:
        threading.setprofile(_profile)
        sys.setprofile(_profile)
"""

TUNE = """
import runpy, sys
sys.argv = ["attention-tuner", "tune", "--spec", "num_q_heads=4,num_kv_heads=2,head_dim=64,dtype=float16",
            "--batch", "1x16@32,2x1@40", "--trials", "4"]
runpy.run_module("attention_tuner.tuner", run_name="__main__")
"""
CALLS = """
import sys, sitecustomize, torch
from attention_tuner import AttentionSpec, HybridAttention
spec = AttentionSpec(4, 2, 64, "float16")
attention = HybridAttention(spec, page_size=16, max_tokens=64, max_seqs=4)
q = torch.randn(7, 4, 64, dtype=torch.float16)
k_cache, v_cache = torch.randn(2, 15, 16, 2, 64, dtype=torch.float16)
block_table = torch.randperm(15).int().view(3, 5)
def watched(call):
    sys.setprofile(sitecustomize._profile)
    call()
    sys.setprofile(None)
PLAN = lambda: attention.plan([5, 1, 1], [40, 70, 12])
RUN = lambda: attention.run(q, k_cache, v_cache, block_table)
"""


def modules() -> dict[str, Path]:
    """The product's modules by dotted name."""
    found: dict[str, Path] = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """The modules of the package that `name` imports when it is imported."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
            for alias in node.names:
                full = ".".join([*base, alias.name])
                found.add(full if full in known else ".".join(base))
    return (found & set(known)) - {name}


def longest_chain(graph: dict[str, set[str]]) -> list[str]:
    """The longest path along imports, first the importer."""
    best: dict[str, list[str]] = {}

    def chain(name: str, above: frozenset[str]) -> list[str]:
        if name not in best:
            below = [chain(other, above | {name}) for other in sorted(graph[name]) if other not in above]
            best[name] = [name, *max(below, key=len, default=[])]
        return best[name]

    return max((chain(name, frozenset()) for name in graph), key=len)


def functions(path: Path) -> Iterator[tuple[str, int, int, bool, bool]]:
    """Name, lines and parameters of each function, and whether it is a kernel or a command."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = sum(a.arg not in ("self", "cls") for a in arguments)
            is_command = "command" in decorators or "callback" in decorators or "commands_" in path.name
            yield node.name, (node.end_lineno or 0) - node.lineno + 1, count, "jit" in decorators, is_command


def options() -> dict[str, int]:
    """The number of options of each command of the console."""
    import typer

    from attention_tuner.tuner.console.app import app

    found: dict[str, int] = {}

    def visit(prefix: str, command: object) -> None:
        for name, below in getattr(command, "commands", {}).items():
            visit(f"{prefix} {name}".strip(), below)
        if not hasattr(command, "commands"):
            found[prefix] = sum(p.param_type_name == "option" for p in command.params)

    visit("", typer.main.get_command(app))
    return found


def passed(code: str, armed: bool) -> list[str]:
    """The modules that `code` passes in any of its processes."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(WATCH)
        out = Path(folder, "passed")
        environment = os.environ | {
            "PASSED": str(out), "PASSED_ROOT": str(ROOT), "PASSED_ARMED": "01"[armed], "TRITON_INTERPRET": "1",
            "ATTENTION_TUNER_DB": str(Path(folder, "tuner.db")),
            "PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]),
        }  # fmt: skip
        subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)
        return sorted(set(out.read_text().split()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    known = modules()
    every = [(f"{name}:{f[0]}", *f[1:]) for name, path in known.items() for f in functions(path)]
    sizes: dict[str, list[int]] = {}
    for path in known.values():
        sizes.setdefault(str(path.relative_to(ROOT).parent), []).append(len(path.read_text().splitlines()))
    tests = list((ROOT / "tests").rglob("*.py"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    by_command = options()
    watched = {
        "tune": passed(TUNE, armed=True),
        "plan": passed(CALLS + "watched(PLAN)", armed=False),
        "run": passed(CALLS + "PLAN()\nwatched(RUN)", armed=False),
    }
    chain = longest_chain({name: imports(name, path, known) for name, path in known.items()})
    document = {
        "files and lines by folder": {folder: [len(lines), sum(lines)] for folder, lines in sorted(sizes.items())},
        "files": len(known),
        "lines": sum(map(sum, sizes.values())),
        "test files and lines": [len(tests), sum(len(path.read_text().splitlines()) for path in tests)],
        "modules passed": {name: [len(found), found] for name, found in watched.items()},
        "longest import chain": [len(chain), chain],
        f"functions with more than {PARAMETERS} parameters": [
            [name, count] for name, _, count, is_kernel, is_command in every
            if count > PARAMETERS and not is_kernel and not is_command
        ],
        f"functions over {LINES} lines (kernels {KERNEL_LINES})": [
            [name, lines] for name, lines, _, is_kernel, _ in every if lines > (KERNEL_LINES if is_kernel else LINES)
        ],
        "options by command": by_command,
        "options": sum(by_command.values()),
        "README lines and words": [len(readme.splitlines()), len(readme.split())],
    }  # fmt: skip
    text = json.dumps(document, indent=1) + "\n"
    if asked.out:
        asked.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
