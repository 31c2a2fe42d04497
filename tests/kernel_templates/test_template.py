"""What a template declares is all that there is to it: a toy one of another package is used like our own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attention_tuner.kernel_templates.batch import Batch, BatchBucket
from attention_tuner.kernel_templates.errors import VariantError
from attention_tuner.kernel_templates.fused import FUSED
from attention_tuner.kernel_templates.gpu import INTERPRETER, TARGETS
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.template import template_of, templates, why_invalid
from attention_tuner.kernel_templates.unified import UNIFIED
from attention_tuner.kernel_templates.variant import Variant

SPEC = AttentionSpec(32, 8, 128)
HYBRID, DECODE, PREFILL = (BatchBucket.of(Batch.parse(text)) for text in ("1x64@9,4x1@9", "4x1@9", "1x64@9"))
GPU = TARGETS["sm_90"]


def test_a_batch_without_a_part_needs_one_body():
    for bucket, names in ((DECODE, ("block_m", "decode_block_m")), (PREFILL, ("decode_block_m", "block_m"))):
        for variant in FUSED.variants(bucket, GPU, 16):
            assert variant.number(names[0]) == variant.number(names[1])
    assert any(v.number("block_m") != v.number("decode_block_m") for v in FUSED.variants(HYBRID, GPU, 16))


def test_the_interpreter_runs_variants_that_it_cannot_tell_apart_once():
    found = list(FUSED.variants(HYBRID, INTERPRETER, 16))
    assert len(found) < len(list(FUSED.variants(HYBRID, GPU, 16))) / 20
    assert {(v.number("num_warps"), v.number("num_stages"), v.text("kv_load")) for v in found} == {(1, 1, "pointer")}


def test_variants_that_share_code_differ_only_in_the_plan():
    variant = next(FUSED.variants(HYBRID, GPU, 16))
    assert FUSED.code_key(variant.replace(waves=8)) == FUSED.code_key(variant.replace(waves=0))
    assert FUSED.code_key(variant.replace(num_warps=8)) != FUSED.code_key(variant.replace(num_warps=4))


UNIFIED_VALUES = {"block_m": 16, "block_n": 32, "num_segments": 1, "num_warps": 4, "num_stages": 3}


@pytest.mark.parametrize(
    ("template", "page_size", "changes", "reason"),
    [
        ("none", 16, {}, "template is not installed"),
        ("unified", 16, {"waves": 1}, "dimensions are not the template's"),
        ("unified", 16, {"block_m": 24}, "not among the template's choices"),
        ("unified", 40, {}, "multiple of 16"),
        ("unified", 16, {"block_m": 128, "num_warps": 2}, "registers"),
        ("unified", 16, {}, None),
    ],
)
def test_each_rejection_has_its_reason(template: str, page_size: int, changes: dict[str, int], reason: str | None):
    found = why_invalid(Variant.of(template, page_size, UNIFIED_VALUES | changes), SPEC, GPU)
    assert found == reason or (reason is not None and reason in (found or ""))


def test_an_unknown_template_names_those_installed():
    with pytest.raises(VariantError, match="'none'; installed are unified, fused"):
        template_of(Variant.of("none", 16, {}))
    assert list(templates().values())[:2] == [UNIFIED, FUSED]


TOY = '''
from attention_tuner.kernel_templates.template import Constraint, Dimension, Template
from attention_tuner.kernel_templates.reference import paged_attention

TOY = Template("toy", "toy_template:EagerLauncher", (Dimension("speed", (1, 2, 3)),),
               (Constraint("too fast", lambda variant, spec, gpu: variant.number("speed") < 3),))

def __getattr__(name):
    from attention_tuner.kernel_templates.launch import Launcher
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
from attention_tuner.kernel_templates.launch import make_launcher
from attention_tuner.kernel_templates.sources import kernel_hash
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.search_spaces.space import survey
from attention_tuner.tuner.check import Checker
spec, batch = AttentionSpec(4, 2, 64), Batch.parse("1x3@20")
found = survey(spec, BatchBucket.of(batch), 16, INTERPRETER, ("toy",))
assert dict(found.rejected) == {"too fast": 1}, found.rejected
assert [v.number("speed") for v in found.valid] == [1, 2]
assert kernel_hash("toy") != kernel_hash("fused")
check = Checker(spec, batch, 16, "cpu").check(make_launcher(found.valid[0], spec, INTERPRETER))
print("toy passed" if check.passed else check.detail)
"""


def test_another_package_adds_a_template_in_one_module(tmp_path: Path):
    (tmp_path / "toy_template.py").write_text(TOY)
    info = tmp_path / "toy_template-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-template\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[attention_tuner.templates]\ntoy = toy_template:TOY\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", USE_TOY]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "toy passed\n", done.stderr
