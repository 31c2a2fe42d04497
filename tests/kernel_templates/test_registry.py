"""The installed templates, and a toy one of another package that is used like this project's own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from attention_tuner.kernel_templates.errors import TunerError, VariantError
from attention_tuner.kernel_templates.gpu import TARGETS
from attention_tuner.kernel_templates.registry import template_of, templates, why_invalid
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.triton_family.templates import FUSED, PERSISTENT, TWO_LAUNCH, UNIFIED
from attention_tuner.kernel_templates.variant import Variant

SPEC, GPU = AttentionSpec(32, 8, 128), TARGETS["sm_90"]
OWN = list(templates())

UNIFIED_VALUES = {"block_m": 16, "block_n": 32, "num_segments": 1, "num_warps": 4, "num_stages": 3}


@pytest.mark.parametrize(
    ("template", "page_size", "changes", "reason"),
    [
        ("none", 16, {}, "template is not installed"),
        ("unified", 16, {"waves": 1}, "dimensions are not the template's"),
        ("unified", 16, {"block_m": 24}, "not among the template's choices"),
        ("unified", 40, {}, "multiple of 16"),
        ("unified", 16, {"block_m": 128, "num_warps": 1}, "registers"),
        ("unified", 16, {}, None),
    ],
)
def test_each_rejection_has_its_reason(template: str, page_size: int, changes: dict[str, int], reason: str | None):
    found = why_invalid(Variant.of(template, page_size, UNIFIED_VALUES | changes), SPEC, GPU)
    assert found == reason or (reason is not None and reason in (found or ""))


def test_an_unknown_template_names_those_installed():
    with pytest.raises(VariantError, match="'none'; installed are unified, fused, two_launch, persistent"):
        template_of(Variant.of("none", 16, {}))
    assert list(templates().values())[:4] == [UNIFIED, FUSED, TWO_LAUNCH, PERSISTENT]


TOY = '''
from attention_tuner.kernel_templates.template import Body, Constraint, Dimension, Template, Traits
from attention_tuner.kernel_templates.oracle.reference import paged_attention

TOY = Template("toy", "toy_template:EagerLauncher", (Dimension("speed", (1, 2, 3), same_code=(1, 2)),),
               (Constraint("too fast", lambda variant, spec, gpu: variant.number("speed") < 3),),
               lambda variant: Traits((Body(16, 32),), num_warps=4, segments=variant.number("speed")))

def __getattr__(name):
    from attention_tuner.kernel_templates.launch.launcher import Launcher
    class EagerLauncher(Launcher):
        def plan(self, batch, device):
            self.batch = batch
        def run(self, tensors):
            out, _ = paged_attention(tensors, self.batch, self.spec, tensors.q.dtype)
            tensors.out.copy_(out)
    if name == "EagerLauncher":
        return EagerLauncher
    raise AttributeError(name)
'''

USE_TOY = """
from attention_tuner.kernel_templates.batch import Batch, BatchBucket
from attention_tuner.kernel_templates.gpu import INTERPRETER
from attention_tuner.kernel_templates.launch.launcher import make_launcher
from attention_tuner.kernel_templates.registry import template_of
from attention_tuner.kernel_templates.sources import kernel_hash
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.task import Task
from attention_tuner.search_spaces.space import survey
from attention_tuner.tuner.costs import interpreted_seconds
from attention_tuner.tuner.measure.check import Checker
from attention_tuner.tuner.measure.race import simplicity
spec, batch = AttentionSpec(4, 2, 64), Batch.parse("1x3@20")
found = survey(spec, BatchBucket.of(batch), 16, INTERPRETER, ("toy",))
assert dict(found.rejected) == {"too fast": 1}, found.rejected
assert [v.number("speed") for v in found.valid] == [1, 2]
assert kernel_hash("toy") != kernel_hash("fused")
one, two = found.valid
toy = template_of(one)
assert toy.never_splits_kv(one) and not toy.never_splits_kv(two)
assert simplicity(one) < simplicity(two)
assert toy.code_key(one) == toy.code_key(two) != toy.code_key(two.replace(speed=3))
assert interpreted_seconds(Task(spec, batch, 16), one) > 0
check = Checker(spec, batch, 16, "cpu").check(make_launcher(found.valid[0], spec, INTERPRETER))
print("toy passed" if check.passed else check.detail)
"""


def install(folder: Path, name: str, module: str, points: str) -> None:
    """A package of one module, with these entry points."""
    (folder / f"{name}.py").write_text(module)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[attention_tuner.templates]\n{points}\n")


def test_another_package_adds_a_template_in_one_module(tmp_path: Path):
    install(tmp_path, "toy_template", TOY, "toy = toy_template:TOY")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", USE_TOY]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "toy passed\n", done.stderr


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a test may install a package called `plugin`."""
    monkeypatch.syspath_prepend(tmp_path)
    templates.cache_clear()
    yield tmp_path
    templates.cache_clear()
    sys.modules.pop("plugin", None)


@pytest.mark.parametrize(("module", "reason"), [
    ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    ("raise RuntimeError('no GPU')", "RuntimeError: no GPU"),
    ("def :", "SyntaxError"),
    ("OTHER = 1", "AttributeError"),
    ("TOY = 1", "it is no Template"),
])
def test_a_broken_template_is_set_aside_by_name(folder: Path, module: str, reason: str):
    install(folder, "plugin", module, "broken = plugin:TOY")
    with pytest.warns(UserWarning, match=rf"'broken' \(plugin:TOY\) .* set aside: {reason}") as caught:
        found = list(templates())
    assert found == OWN
    assert why_invalid(Variant.of("broken", 16, {}), SPEC, GPU) == "its template is not installed"
    assert len(caught) == 1


def test_two_templates_of_one_name_are_refused(folder: Path):
    twin = "from attention_tuner.kernel_templates.template import Template\nTWIN = Template('fused', 'm:C', ())"
    install(folder, "plugin", twin, "twin = plugin:TWIN")
    with pytest.raises(TunerError, match="two installed templates are called 'fused'"):
        templates()
