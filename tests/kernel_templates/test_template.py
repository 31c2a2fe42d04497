"""The dimensions that a template declares, and the code that its variants share."""

from __future__ import annotations

import math
from typing import Any

import pytest

from attention_tuner.kernel_templates.batch import Batch, BatchBucket
from attention_tuner.kernel_templates.errors import TunerError
from attention_tuner.kernel_templates.gpu import INTERPRETER, TARGETS
from attention_tuner.kernel_templates.launch.launcher import Tensors, make_launcher
from attention_tuner.kernel_templates.oracle.inputs import make_tensors
from attention_tuner.kernel_templates.registry import templates, why_invalid
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.template import Dimension, Template
from attention_tuner.kernel_templates.triton_family.templates import FUSED
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
    assert len(found) < math.prod(map(len, FUSED.grid(HYBRID, GPU).values())) / 10
    assert {(v.number("num_warps"), v.number("num_stages"), v.text("kv_load")) for v in found} == {(1, 1, "pointer")}


# Cut into several key ranges, so that every kernel of a template is launched.
CUT, SMALL = Batch.parse("1x20@300,2x1@300"), AttentionSpec(4, 1, 64)


def dtypes(argument: Any) -> Any:
    """The dtypes of the tensors in an argument, which may be a tuple of others."""
    return [dtypes(each) for each in argument] if isinstance(argument, tuple) else getattr(argument, "dtype", None)


def code_of(variant: Variant, tensors: Tensors) -> list[Any]:
    """The kernels that `variant` launches for `CUT`, with their compile-time arguments and the dtypes of the others."""
    launcher, found = make_launcher(variant, SMALL, GPU), list[Any]()
    launcher.start = lambda kernel, grid, arguments, constants: found.append(
        (kernel, constants, dtypes(arguments))
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
    assert {*FUSED.grid(HYBRID, GPU)["num_warps"]} < {*FUSED.grid(DECODE, GPU)["num_warps"]}


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
