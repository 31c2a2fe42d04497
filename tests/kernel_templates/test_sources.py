"""The kernel hash follows what the code means, and the environment names what runs here."""

import ast
import importlib
import importlib.metadata
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from attention_tuner.kernel_templates import sources
from attention_tuner.kernel_templates.errors import TunerError
from attention_tuner.kernel_templates.gpu import TARGETS
from attention_tuner.kernel_templates.registry import templates
from attention_tuner.kernel_templates.sources import canonical, environment, kernel_hash
from attention_tuner.kernel_templates.template import Dimension, Template

LAUNCHER = '''
"""Launches."""
from __future__ import annotations
import math
from typing import TYPE_CHECKING
from torch import nn
from .plan import STEP as step, cut
if TYPE_CHECKING:
    from .space import SPACE
# A comment.
WARPS: int = 4
def unused(): return SPACE
class Launcher(object):
    """Runs."""
    warps = WARPS
    def run(self, x, scale=1.5):
        """Run."""
        if x < 0:
            raise ValueError(f"{x} is negative")
        return cut(x) + math.floor(scale) * step + nn.relu(x)
'''
PLAN = '''
STEP = 16
def cut(x, rows=32):
    # Round up.
    return -(-x // rows) * wide(f"{x}:{rows}")
def wide(text):
    from .far import FAR
    return len(text) + FAR
def far_away(x): return x
'''
PACKAGE = {"__init__": "", "launcher": LAUNCHER, "plan": PLAN, "far": "FAR = 2", "space": "SPACE = (1, 2)"}
Hash = Callable[..., str]
NUMBERS = itertools.count()


@pytest.fixture
def hash_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hash]:
    """Makes a package of a launcher and returns its kernel hash; a new one each time, of another name."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(**changes: tuple[str, str]) -> str:
        name = f"some_package_{next(NUMBERS)}"
        (tmp_path / name).mkdir()
        files = dict(PACKAGE)
        for module, (old, new) in changes.items():
            assert old in files.get(module, old)
            files[module] = files.get(module, "").replace(old, new)
        for module, text in files.items():
            (tmp_path / name / f"{module}.py").write_text(text)
        importlib.invalidate_caches()
        monkeypatch.setitem(templates(), name, Template(name, f"{name}.launcher:Launcher", (Dimension("x", (1, 2)),)))
        return kernel_hash(name)

    yield make
    clear_caches()


def clear_caches() -> None:
    for cached in (kernel_hash, sources._tokens, sources._meanings, sources._parse, sources._path):
        cached.cache_clear()


@pytest.mark.parametrize(("module", "old", "new"), [
    ("launcher", "# A comment.", "# Another comment."),
    ("launcher", '"""Runs."""', '"""Runs what is planned."""'),
    ("launcher", '"""Launches."""', ""),
    ("launcher", "cut(x) + math.floor(scale) * step", "(cut( x )\n            + math.floor(scale) * step)"),
    ("launcher", "is negative", "is below 0"),
    ("launcher", "return SPACE", "return 1"),
    ("launcher", "WARPS: int = 4\ndef unused(): return SPACE", "def unused(): return SPACE\nWARPS: int = 4"),
    ("plan", "def far_away(x): return x", ""),
    ("space", "(1, 2)", "(1, 2, 3)"),
])  # fmt: skip
def test_what_does_not_change_the_launch_does_not_change_the_hash(hash_of: Hash, module: str, old: str, new: str):
    assert hash_of(**{module: (old, new)}) == hash_of()


@pytest.mark.parametrize(("module", "old", "new"), [
    ("launcher", "WARPS: int = 4", "WARPS: int = 8"),
    ("launcher", "scale=1.5", "scale=1.25"),
    ("launcher", "cut(x) +", "cut(x) -"),
    ("launcher", "x < 0", "x <= 0"),
    ("launcher", "raise ValueError(", "raise KeyError("),
    ("launcher", "import math\n", "import cmath as math\n"),
    ("launcher", "from torch import nn", "from torch.nn import functional as nn"),
    ("plan", "STEP = 16", "STEP = 32"),
    ("plan", "rows=32", "rows=64"),
    ("plan", "{x}:{rows}", "{x}{rows}"),
    ("plan", "STEP = 16", "STEP = 16\nprint(STEP)"),
    ("plan", "STEP = 16", "STEP = 16\nSTEP *= 2"),
    ("far", "FAR = 2", "FAR = 3"),
])  # fmt: skip
def test_what_changes_the_launch_changes_the_hash(hash_of: Hash, module: str, old: str, new: str):
    assert hash_of(**{module: (old, new)}) != hash_of()


def test_a_definition_may_move_to_another_module(hash_of: Hash):
    moved = hash_of(plan=("STEP = 16", "from .steps import STEP"), steps=("", "STEP = 16"))
    assert moved == hash_of()


def test_functions_that_call_each_other_may_move_to_another_module(hash_of: Hash):
    calls = "* wide(", "* back(x) * wide("
    back = "def back(x): return cut(x - 1) if x else 0"
    plan = PLAN.replace(*calls)
    together = hash_of(plan=(PLAN, f"{back}\n{plan}"))
    apart = {"plan": (PLAN, f"from .back import back\n{plan}"), "back": ("", f"from .plan import cut\n{back}")}
    assert hash_of(**apart) == together
    assert hash_of(**apart | {"back": ("", f"from .plan import cut\n{back}".replace("- 1", "- 2"))}) != together


def test_each_of_several_equal_names_counts_with_its_own_value(hash_of: Hash):
    launcher = """
from .a import first
from .b import second
from .c import third
class Launcher:
    def run(self): return first() - second() * third()
"""
    small, large = "STEP = 16", "STEP = 32"
    steps = [*itertools.product((small, large), repeat=3),
             (small, large, "from .a import STEP"), (small, large, "from .b import STEP")]  # fmt: skip
    found = {
        hash_of(launcher=(LAUNCHER, launcher), a=("", f"{a}\ndef first(): return STEP"),
                b=("", f"{b}\ndef second(): return STEP"), c=("", f"{c}\ndef third(): return STEP"))
        for a, b, c in steps
    }  # fmt: skip
    assert len(found) == len(steps)


def test_another_import_of_a_name_from_the_same_module_does_not_count(hash_of: Hash):
    unused = ("def far_away(x): return x", "def far_away(x):\n    from .far import FAR\n    return x")
    assert hash_of(plan=unused) == hash_of()


def test_the_order_of_assignments_to_one_name_counts(hash_of: Hash):
    first, second = (hash_of(plan=("STEP = 16", text)) for text in ("STEP = 3\nSTEP = 4", "STEP = 4\nSTEP = 3"))
    assert first != second


def test_the_definition_of_a_raised_error_counts(hash_of: Hash):
    launcher = LAUNCHER.replace("raise ValueError(", "raise Refused(") + "from .errors import Refused\n"
    first, second = (hash_of(launcher=(LAUNCHER, launcher), errors=("", f"class Refused({base}): pass"))
                     for base in ("ValueError", "KeyError"))  # fmt: skip
    assert first != second


def test_a_module_as_a_whole_counts_where_it_is_imported_or_makes_the_class_itself(hash_of: Hash):
    whole = ("from .far import FAR\n    return len(text) + FAR", "from . import far\n    return len(text) + far.FAR")
    assert hash_of(plan=whole) != hash_of(plan=whole, far=("FAR = 2", "FAR = 2; MORE = 3"))
    made = "class Launcher(object)", "__getattr__ = lambda name: 1\nclass Made(object)"
    more = made[0], made[1].replace("lambda name: 1", "lambda name: 2")
    assert hash_of(launcher=made) != hash_of(launcher=more)


def test_versions_of_python_parse_to_the_same_text():
    class FunctionDef(ast.FunctionDef):
        # Python 3.12 adds this field.
        _fields = (*ast.FunctionDef._fields, "type_params")

    parsed = ast.parse("def f(x): return f'{x}: {x:>8}é'").body[0]
    assert isinstance(parsed, ast.FunctionDef)
    newer = FunctionDef(**dict(ast.iter_fields(parsed)), type_params=[])
    assert canonical(newer) == canonical(parsed)
    assert "FunctionDef ( args arguments ( args [ arg ( arg 'x' ) ] ) body [ Return" in " ".join(canonical(parsed))
    whole, pieces = ast.parse("f'ab{1}'", mode="eval").body, ast.parse("f'ab{1}'", mode="eval").body
    assert isinstance(pieces, ast.JoinedStr)
    pieces.values[:1] = [ast.Constant("a"), ast.Constant(""), ast.Constant("b")]
    assert canonical(pieces) == canonical(whole)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """Holds the modules that are read from now on, by name; what a test puts there is read instead of the file."""
    texts: dict[str, bytes] = {}
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: texts.setdefault(f"{path.parent.name}.{path.stem}",
                                                                          read_bytes(path)))  # fmt: skip
    clear_caches()
    yield texts
    clear_caches()


def test_the_modules_that_plan_and_launch_count(read: dict[str, bytes]):
    kernel_hash("gluon_hopper")
    launch = {f"launch.{name}" for name in ("launcher", "memory", "plan", "room", "tiles", "work_list")}
    hopper = {f"hopper.{name}" for name in ("launcher", "kernel", "tiles", "merge")}
    assert read.keys() >= launch | hopper | {"triton_family.launchers", "triton_family.combine"}
    assert not read.keys() & {"kernel_templates.registry", "kernel_templates.heuristic"}


@pytest.mark.parametrize(("old", "new", "counts"), [
    (b'"num_warps", (1, 2, 4, 8)', b'"num_warps", (1, 2, 4, 8, 16)', False),
    (b"TMA needs a GPU", b"TMA requires a GPU", False),
    (b'Body(variant.number("block_m"), ', b'Body(2 * variant.number("block_m"), ', True),
])  # fmt: skip
def test_of_a_declaration_only_the_part_that_the_launcher_uses_counts(
    read: dict[str, bytes], old: bytes, new: bytes, counts: bool
):
    before, name = kernel_hash("fused"), "triton_family.templates"
    text = read[name]
    assert old in text
    clear_caches()
    read[name] = text.replace(old, new)
    assert (kernel_hash("fused") != before) is counts


@pytest.mark.parametrize(("old", "new"), [
    (b"name)(variant, spec, gpu, settings)", b"name)(variant, spec, gpu, DEFAULTS)"),
    (b"        _settle(called, seen)\n", b"        pass\n"),
])  # fmt: skip
def test_what_makes_a_launcher_counts_for_every_template(read: dict[str, bytes], old: bytes, new: bytes):
    before, name = {each: kernel_hash(each) for each in templates()}, "launch.launcher"
    text = read[name]
    assert old in text
    clear_caches()
    read[name] = text.replace(old, new)
    assert all(kernel_hash(each) != before[each] for each in templates())


def test_every_template_has_a_hash_of_its_own():
    found = {name: kernel_hash(name) for name in templates()}
    assert all(re.fullmatch("[0-9a-f]{16}", each) for each in found.values())
    assert len(set(found.values())) == len(found)


def test_a_template_that_is_not_installed_is_refused():
    with pytest.raises(TunerError, match="'none' is not installed"):
        kernel_hash("none")


@pytest.mark.parametrize("launcher", ["no_such_package.module:Launcher", "no_such_module:Launcher"])
def test_a_template_without_its_launcher_is_refused(monkeypatch: pytest.MonkeyPatch, launcher: str):
    monkeypatch.setitem(templates(), "gone", Template("gone", launcher, ()))
    with pytest.raises(TunerError, match=r"'gone' names module 'no_such_.*', which cannot be found"):
        kernel_hash("gone")


def test_an_environment_names_what_runs_here(monkeypatch: pytest.MonkeyPatch):
    found = environment("fused", TARGETS["sm_90"])
    assert (found.kernel_hash, found.driver) == (kernel_hash("fused"), "")
    assert found.triton == importlib.metadata.version("triton")
    # Installed under another name, such as pytorch-triton.
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "triton":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    sources._version.cache_clear()
    try:
        found = environment("fused", TARGETS["sm_90"])
        assert (found.triton, found.torch) == ("", real("torch"))
    finally:
        sources._version.cache_clear()
