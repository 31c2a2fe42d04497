"""The kernels against the oracle, through the interpreter: templates, splits, pages, groups, dtypes, layouts."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from attention_tuner.kernel_templates.batch import Batch, BatchBucket
from attention_tuner.kernel_templates.gpu import INTERPRETER
from attention_tuner.kernel_templates.heuristic import candidates, default_variant, heuristic_variant
from attention_tuner.kernel_templates.launch.device import present_gpu
from attention_tuner.kernel_templates.launch.launcher import make_launcher
from attention_tuner.kernel_templates.oracle.inputs import make_tensors
from attention_tuner.kernel_templates.oracle.reference import paged_attention
from attention_tuner.kernel_templates.registry import why_invalid
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.tuner.measure.check import Checker

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


SEQUENCES = st.one_of(
    st.tuples(st.integers(1, 8), st.integers(0, 120)),
    st.tuples(st.integers(9, 24), st.integers(0, 60)),
)
BATCHES = st.lists(SEQUENCES, min_size=1, max_size=4).map(lambda sequences: Batch(tuple(sequences)))
SPECS = st.builds(
    lambda heads, dim, dtype: AttentionSpec(*heads, dim, dtype),
    st.sampled_from(((4, 2), (2, 2), (7, 1), (17, 1))), st.sampled_from((64, 64, 64, 128, 256)),
    st.sampled_from(("bfloat16", "float16")),
)  # fmt: skip
PAGES = st.sampled_from((16, 32, 48, 128, 528))
UNIFIED = st.fixed_dictionaries(
    {"block_m": st.sampled_from((16, 32, 64)), "block_n": st.sampled_from((16, 32, 64)),
     "num_segments": st.sampled_from((1, 2, 16)), "num_warps": st.just(4), "num_stages": st.just(2)}
)  # fmt: skip
FUSED = st.fixed_dictionaries(
    {"block_m": st.sampled_from((16, 64, 128)), "block_n": st.sampled_from((16, 32, 64)),
     "decode_block_m": st.sampled_from((16, 32)), "decode_block_n": st.sampled_from((16, 64)),
     "kv_load": st.sampled_from(("pointer", "tma")), "order": st.sampled_from(("items", "heads")),
     "waves": st.sampled_from((0, 1, 8)), "long_weight": st.sampled_from((1, 4)),
     "schedule": st.sampled_from(("long_first", "interleaved")), "partials": st.sampled_from(("float32", "bfloat16")),
     "reduction": st.sampled_from(("kernel", "last_program")),
     "num_warps": st.just(4), "num_stages": st.just(2)}
)  # fmt: skip

PERSISTENT = st.builds(
    lambda values, programs, block_n: values | {"programs_per_sm": programs, "num_stages": 3, "block_n": block_n,
                                                "decode_block_n": 64, "waves": max(1, values["waves"] // 2)},
    FUSED, st.sampled_from((1, 4)), st.sampled_from((32, 64)),
)  # fmt: skip

interpreted = settings(
    deadline=None, max_examples=8, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def check(variant: Variant, spec: AttentionSpec, batch: Batch, seed: int, packed: bool = False) -> None:
    checker = Checker(spec, batch, variant.page_size, "cpu", seed,
                      make_tensors(spec, batch, variant.page_size, "cpu", seed, packed))
    found = checker.check(make_launcher(variant, spec, INTERPRETER))
    assert found.passed, f"{variant.key()} on {batch}: {found.detail}"


@given(BATCHES, SPECS, PAGES, UNIFIED, st.integers(0, 99), st.booleans())
@interpreted
def test_unified_is_right(
    batch: Batch, spec: AttentionSpec, page_size: int, values: dict[str, int], seed: int, packed: bool
):
    variant = Variant.of("unified", page_size, values)
    assume(why_invalid(variant, spec, INTERPRETER) is None)
    check(variant, spec, batch, seed, packed)


@given(BATCHES, SPECS, PAGES, FUSED, st.integers(0, 99), st.booleans())
@interpreted
def test_fused_is_right(
    batch: Batch, spec: AttentionSpec, page_size: int, values: dict[str, int | str], seed: int, packed: bool
):
    variant = Variant.of("fused", page_size, values)
    assume(why_invalid(variant, spec, INTERPRETER) is None)
    check(variant, spec, batch, seed, packed)


@given(BATCHES, SPECS, PAGES, PERSISTENT, st.integers(0, 99), st.booleans())
@interpreted
def test_persistent_is_right(
    batch: Batch, spec: AttentionSpec, page_size: int, values: dict[str, int | str], seed: int, packed: bool
):
    variant = Variant.of("persistent", page_size, values)
    assume(why_invalid(variant, spec, INTERPRETER) is None)
    check(variant, spec, batch, seed, packed)


@pytest.mark.parametrize("template", ["unified", "fused"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_group_larger_than_a_tile_is_split(template: str, dtype: str):
    check(variant_of(template, 16), AttentionSpec(71, 1, 64, dtype), Batch.parse("1x2@40,1x9@3"), 0)


def test_head_size_256_is_right():
    check(variant_of("fused", 16), AttentionSpec(2, 1, 256), Batch.parse("1x12@40,2x1@50"), 0)


@pytest.mark.parametrize("template", ["unified", "fused"])
def test_packed_keys_and_values_give_the_same_bits_as_separate_ones(template: str):
    spec, batch = AttentionSpec(4, 2, 64, "float16"), Batch.parse("1x16@60,2x1@90")
    launcher = make_launcher(variant_of(template, 32), spec, INTERPRETER)
    launcher.plan(batch, "cpu")
    tensors = make_tensors(spec, batch, 32, "cpu", 0, packed=True)
    separate = dataclasses.replace(
        tensors, k_cache=tensors.k_cache.contiguous(), v_cache=tensors.v_cache.contiguous(),
        out=torch.full_like(tensors.out, torch.nan),
    )  # fmt: skip
    assert not tensors.k_cache.is_contiguous()
    launcher.run(tensors)
    launcher.run(separate)
    oracle, _ = paged_attention(tensors, batch, spec, torch.float64)
    assert torch.equal(tensors.out, separate.out)
    assert torch.allclose(tensors.out.double(), oracle, atol=2e-2)


def test_interpreted_bfloat16_is_within_twice_the_error_of_eager():
    spec, batch = AttentionSpec(4, 2, 64), Batch.parse("1x16@100,2x1@90")
    tensors = make_tensors(spec, batch, 16, "cpu", 0, needles=False)
    launcher = make_launcher(variant_of("fused", 16), spec, INTERPRETER)
    launcher.plan(batch, "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        launcher.run(tensors)
    oracle, _ = paged_attention(tensors, batch, spec, torch.float64)
    eager, _ = paged_attention(tensors, batch, spec, torch.bfloat16)
    assert (tensors.out - oracle).norm() <= 2 * (eager - oracle).norm()


def rms_error(partials: str) -> float:
    """The error of a hybrid batch whose keys are cut into many ranges, relative to the output."""
    spec, batch = AttentionSpec(4, 2, 64), Batch.parse("1x12@200,1x1@300")
    tensors = make_tensors(spec, batch, 16, "cpu", 0, needles=False)
    launcher = make_launcher(variant_of("fused", 16).replace(partials=partials, waves=8), spec, INTERPRETER)
    launcher.plan(batch, "cpu")
    launcher.run(tensors)
    oracle, _ = paged_attention(tensors, batch, spec, torch.float64)
    return float((tensors.out - oracle).norm() / oracle.norm())


def test_partial_results_in_bfloat16_add_less_than_half_to_the_error():
    exact, rounded = rms_error("float32"), rms_error("bfloat16")
    assert exact < rounded < 1.5 * exact


def test_two_launches_are_right():
    check(variant_of("two_launch", 48), AttentionSpec(7, 1, 64), Batch.parse("1x12@40,2x1@90,1x8@3,1x9@0"), 0)


def variant_of(template: str, page_size: int) -> Variant:
    values: dict[str, int | str] = {"block_m": 32, "block_n": 16, "num_warps": 4, "num_stages": 2}
    if template == "unified":
        return Variant.of(template, page_size, values | {"num_segments": 2})
    values |= {"decode_block_m": 16, "decode_block_n": 16, "kv_load": "pointer", "order": "items", "waves": 4}
    if template == "two_launch":
        return Variant.of(template, page_size, values | {"decode_num_warps": 2})
    return Variant.of(template, page_size, values | {
        "long_weight": 2, "schedule": "interleaved", "partials": "float32", "reduction": "kernel",
    })  # fmt: skip


GPU_LAYERS = [(32, 8, 128, "bfloat16"), (8, 1, 128, "float16"), (7, 1, 64, "bfloat16"), (71, 1, 64, "bfloat16"),
              (4, 4, 256, "bfloat16")]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 128, 528])
@pytest.mark.parametrize("layer", GPU_LAYERS, ids=str)
def test_on_a_gpu(layer: tuple[int, int, int, str], page_size: int):
    gpu = present_gpu()
    assert gpu is not None
    spec, batch = AttentionSpec(*layer), Batch.parse("1x512@3000,7x1@2047,1x1@20000,3x6@700,1x100@0")
    checker = Checker(spec, batch, page_size, "cuda", 0,
                      make_tensors(spec, batch, page_size, "cuda", 0, packed=page_size == 128))
    shared = {"num_warps": 4, "num_stages": 2, "order": "heads", "long_weight": 2, "schedule": "interleaved"}
    plain = {"partials": "float32", "reduction": "kernel"}
    variants = [
        default_variant(spec, batch, page_size),
        heuristic_variant(spec, BatchBucket.of(batch), page_size, gpu),
        variant_of("unified", page_size),
        *(
            Variant.of("fused", page_size, shared | plain | {
                "block_m": 64, "block_n": 64, "decode_block_m": 16, "decode_block_n": 32,
                "kv_load": load, "waves": waves,
            })
            for load in ("pointer", "tma") for waves in (0, 4)
        ),
        *(
            Variant.of(template, page_size, values | {"block_m": 128, "num_warps": 8, "partials": partials,
                                                      "reduction": "last_program"})
            for template, values in (
                ("fused", variant_of("fused", page_size).as_dict()),
                ("persistent", variant_of("fused", page_size).as_dict() | {
                    "block_n": 64, "decode_block_n": 64, "num_stages": 3, "programs_per_sm": 2}),
            )
            for partials in ("float32", "bfloat16")
        ),
        variant_of("two_launch", page_size),
    ]  # fmt: skip
    valid = [variant for variant in variants if why_invalid(variant, spec, gpu) is None]
    assert len(valid) >= 4
    for variant in valid:
        found = checker.check(make_launcher(variant, spec, gpu))
        assert found.passed, f"{variant.key()}: {found.detail}"


@pytest.mark.gpu
def test_a_cache_of_more_than_2_to_the_31_elements_on_a_gpu():
    gpu = present_gpu()
    assert gpu is not None
    spec, batch = AttentionSpec(32, 8, 128), Batch.parse("24x1@100000,1x64@30000")
    checker = Checker(spec, batch, 128, "cuda")
    assert checker.tensors.k_cache.numel() > 2**31
    likely = {variant.template: variant for variant in candidates(spec, BatchBucket.of(batch), 128, gpu)}
    fused = likely.pop("fused")
    for variant in (*likely.values(), fused.replace(kv_load="pointer"), fused.replace(kv_load="tma")):
        found = checker.check(make_launcher(variant, spec, gpu))
        assert found.passed, found.detail


SPEC, BATCH = AttentionSpec(4, 2, 64, "float16"), Batch.parse("1x12@50,2x1@70")
VALUES = {
    "block_m": 16, "block_n": 32, "decode_block_m": 16, "decode_block_n": 64, "num_warps": 4, "num_stages": 3,
    "kv_load": "pointer", "order": "items", "programs_per_sm": 1, "waves": 4, "long_weight": 2,
    "schedule": "interleaved", "partials": "float32", "reduction": "kernel",
}  # fmt: skip


@pytest.mark.parametrize("order", ["items", "heads"])
@pytest.mark.parametrize("programs", [1, 3, 1000])
def test_any_number_of_programs_gives_the_same_bits(order: str, programs: int):
    checker = Checker(SPEC, BATCH, 16, "cpu")
    launcher = make_launcher(Variant.of("persistent", 16, VALUES | {"order": order}), SPEC, INTERPRETER)
    assert checker.check(launcher).passed
    expected = checker.tensors.out.clone()
    start = launcher.start

    def fewer(kernel: Any, grid: tuple[int, ...], *rest: Any) -> None:
        start(kernel, (programs,) if len(grid) == 1 else grid, *rest)

    launcher.start = fewer
    assert checker.check(launcher).passed
    assert torch.equal(checker.tensors.out, expected)
