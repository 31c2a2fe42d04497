"""What a template declares is all that there is to it: a toy one of another package is used like our own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attention_tuner.kernel_templates.batch import Batch, BatchBucket
from attention_tuner.kernel_templates.errors import TunerError, VariantError
from attention_tuner.kernel_templates.gpu import INTERPRETER, TARGETS
from attention_tuner.kernel_templates.launch.launcher import Tensors, make_launcher
from attention_tuner.kernel_templates.oracle.inputs import make_tensors
from attention_tuner.kernel_templates.registry import template_of, templates, why_invalid
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.template import Dimension, Template
from attention_tuner.kernel_templates.triton_family.templates import FUSED, PERSISTENT, TWO_LAUNCH, UNIFIED
from attention_tuner.kernel_templates.variant import Variant

SPEC = AttentionSpec(32, 8, 128)
HYBRID, DECODE, PREFILL = (BatchBucket.of(Batch.parse(text)) for text in ("1x64@9,4x1@9", "4x1@9", "1x64@9"))
GPU = TARGETS["sm_90"]
OWN = list(templates())


def test_a_batch_without_a_part_needs_one_body():
    for bucket, names in ((DECODE, ("block_m", "decode_block_m")), (PREFILL, ("decode_block_m", "block_m"))):
        for variant in FUSED.variants(bucket, GPU, 16):
            assert variant.number(names[0]) == variant.number(names[1])
    assert any(v.number("block_m") != v.number("decode_block_m") for v in FUSED.variants(HYBRID, GPU, 16))


def test_the_interpreter_runs_variants_that_it_cannot_tell_apart_once():
    found = list(FUSED.variants(HYBRID, INTERPRETER, 16))
    assert len(found) < len(list(FUSED.variants(HYBRID, GPU, 16))) / 10
    assert {(v.number("num_warps"), v.number("num_stages"), v.text("kv_load")) for v in found} == {(1, 1, "pointer")}


# Cut into several key ranges, so that every kernel of a template is launched.
CUT, SMALL = Batch.parse("1x20@300,2x1@300"), AttentionSpec(4, 1, 64)


def code_of(variant: Variant, tensors: Tensors) -> list[Any]:
    """The kernels that `variant` launches for `CUT`, with their compile-time arguments and the dtypes of the others."""
    launcher, found = make_launcher(variant, SMALL, GPU), list[Any]()
    launcher.start = lambda kernel, grid, arguments, constants: found.append(
        (kernel, constants, [getattr(argument, "dtype", None) for argument in arguments])
    )
    launcher.plan(CUT, "cpu")
    launcher.run(tensors)
    return found


@pytest.mark.parametrize("template", templates().values(), ids=list(templates()))
def test_choices_share_code_exactly_where_the_launches_differ_in_no_constant(template: Template):
    values = {d.name: d.choices[0] for d in template.dimensions}
    values |= {"waves": 1} if "waves" in values else {"num_segments": 2}
    base, tensors = Variant.of(template.name, 128, values), make_tensors(SMALL, CUT, 128, "cpu", seed=0)
    code = code_of(base, tensors)
    for dimension, choice in ((d, choice) for d in template.dimensions for choice in d.choices):
        other = base.replace(**{dimension.name: choice})
        if why_invalid(other, SMALL, GPU) is None and not template.never_splits_kv(other):
            is_same = template.code_key(other) == template.code_key(base)
            assert (code_of(other, tensors) == code) is is_same, f"{dimension.name}={choice}"


def test_hybrid_batches_try_fewer_of_the_choices():
    warps = {v.number("num_warps") for v in FUSED.variants(HYBRID, GPU, 16)}
    assert warps < {v.number("num_warps") for v in FUSED.variants(DECODE, GPU, 16)}


@pytest.mark.parametrize("dimension", [
    Dimension("warps", (1, 2), hybrid=(2, 4)),
    Dimension("warps", (1, 2), part="long", counterpart="decode_warps"),
    Dimension("warps", (1, 2), same_code=(1, 4)),
])
def test_what_a_dimension_can_become_is_among_its_choices(dimension: Dimension):
    with pytest.raises(TunerError, match="dimension 'warps' of template 't' lacks the choice 4, which"):
        Template("t", "m:C", (dimension, Dimension("decode_warps", (1, 4))))


def test_a_choice_is_listed_once():
    for dimension in (Dimension("warps", (1, 2, 2)), Dimension("warps", (1, 2), hybrid=(2, 2))):
        with pytest.raises(TunerError, match="dimension 'warps' of template 't' lists a choice twice"):
            Template("t", "m:C", (dimension,))


def test_some_of_the_variants_are_made_in_their_order():
    every = list(FUSED.variants(DECODE, GPU, 16))
    kept = (index % 3 == 0 for index in range(len(every)))
    assert list(FUSED.variants(DECODE, GPU, 16, kept)) == every[::3]


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
