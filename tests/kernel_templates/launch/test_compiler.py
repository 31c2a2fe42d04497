"""Compiles for GPUs that are not here, in child processes: this one interprets."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from attention_tuner.kernel_templates.batch import Batch, BatchBucket
from attention_tuner.kernel_templates.errors import TunerError
from attention_tuner.kernel_templates.gpu import TARGETS
from attention_tuner.kernel_templates.heuristic import default_variant, heuristic_variant
from attention_tuner.kernel_templates.launch import compiler
from attention_tuner.kernel_templates.launch.compiler import compile_variant
from attention_tuner.kernel_templates.limits import SCRATCH_BYTES, shared_memory_bytes
from attention_tuner.kernel_templates.outcome import StaticFacts
from attention_tuner.kernel_templates.registry import template_of, why_invalid
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.template import Body
from attention_tuner.kernel_templates.triton_family.templates import bodies as fused_bodies
from attention_tuner.kernel_templates.triton_family.templates import unified_body as unified_bodies
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.tuner.processes.compile import CompileJob, CompilePool

SPEC, WIDE, WIDEST = AttentionSpec(32, 8, 128), AttentionSpec(32, 8, 256), AttentionSpec(8, 2, 512)
WIDEST32 = AttentionSpec(8, 2, 512, "float32")
BATCH = Batch.parse("1x64@100,2x1@100")
Job = tuple[str, AttentionSpec, Variant]
EXCEEDS = "its tiles exceed the GPU's shared memory"


def unified(block_m: int, block_n: int, num_warps: int = 4, num_stages: int = 3) -> Variant:
    values = {"block_m": block_m, "block_n": block_n, "num_segments": 1, "num_warps": num_warps}
    return Variant.of("unified", 128, values | {"num_stages": num_stages})


def fused(kv_load: str) -> Variant:
    return Variant.of("fused", 128, {
        "block_m": 64, "block_n": 64, "decode_block_m": 16, "decode_block_n": 32, "num_warps": 4, "num_stages": 2,
        "kv_load": kv_load, "order": "items", "waves": 1, "long_weight": 1,
        "schedule": "long_first", "partials": "float32", "reduction": "kernel",
    })  # fmt: skip


MERGED = {"schedule": "interleaved", "partials": "bfloat16", "reduction": "last_program"}
PERSISTENT = Variant.of("persistent", 128, fused("pointer").as_dict() | MERGED | {
    "num_stages": 3, "programs_per_sm": 1,
})  # fmt: skip
TWO_LAUNCH = Variant.of("two_launch", 128, {
    "block_m": 64, "block_n": 64, "num_warps": 4, "decode_block_m": 16, "decode_block_n": 32, "decode_num_warps": 2,
    "num_stages": 2, "kv_load": "pointer", "order": "items", "waves": 1,
})  # fmt: skip

# Every feature at once, with the log-sum-exp; and each of the layouts that tiles of uneven heads and other dtypes have.
RICH = AttentionSpec(32, 8, 192, "bfloat16", "float8_e5m2", 1000, 30.0, True, True, v_head_dim=128, has_tree_mask=True)
LAYERS = [
    ("sm_90", RICH, unified(64, 64)),
    ("sm_90", RICH, PERSISTENT),
    ("sm_80", AttentionSpec(32, 8, 80, v_head_dim=256), unified(128, 64, 8)),
    ("sm_100", AttentionSpec(8, 8, 128, "float16", "float8_e4m3fn", has_sinks=True), fused("tma")),
    ("sm_89", dataclasses.replace(RICH, q_dtype="float8_e4m3fn"), unified(16, 32)),
    ("sm_90", AttentionSpec(32, 8, 128, kv_dtype="float8_e4m3fn", q_dtype="float8_e4m3fn"), fused("tma")),
    ("sm_90", AttentionSpec(8, 8, 128, "float32"), unified(16, 16)),
    ("sm_90", AttentionSpec(8, 2, 128, "float32", v_head_dim=64), fused("tma").replace(
        block_m=16, block_n=16, decode_block_n=16, num_stages=3)),
    ("sm_89", WIDEST32, unified(16, 16, 8, 1)),
]  # fmt: skip

LARGEST = [("sm_89", WIDEST, default_variant(WIDEST, BATCH, 16))]

# (target, layer, variant) to compile. With heads of 256 they are close to the limits of 99, 163 and 227 KiB, some
# above and some below.
COMPILED = [
    *((name, SPEC, fused("pointer")) for name in TARGETS),
    ("sm_90", SPEC, fused("tma")),
    ("sm_90", SPEC, TWO_LAUNCH),
    # The answer where nothing is tuned.
    ("sm_80", WIDE, heuristic_variant(WIDE, BatchBucket.of(BATCH), 16, TARGETS["sm_80"])),
    *LARGEST,
    ("sm_89", WIDE, unified(64, 64)),
    ("sm_89", WIDE, unified(64, 64, num_stages=1)),
    ("sm_80", WIDE, unified(128, 128, num_warps=8)),
    ("sm_90", WIDE, unified(64, 128, num_warps=8)),
    ("sm_100", WIDE, unified(64, 128)),
    *LAYERS,
]


@pytest.fixture(scope="module")
def facts() -> dict[Job, StaticFacts]:
    """What the compiler said, for GPUs that have all the shared memory asked for."""
    found: dict[Job, StaticFacts] = {}
    with CompilePool(processes=2) as pool:
        for name in TARGETS:
            for _, spec, variant in (one for one in COMPILED if one[0] == name):
                roomy = dataclasses.replace(TARGETS[name], shared_memory_bytes=2**30)
                pool.submit(CompileJob(variant, spec, roomy, BATCH, lse=spec == RICH))
            while pool.pending:
                for build in pool.results(10):
                    job, result = build.job, build.result
                    assert isinstance(result, StaticFacts), f"{name} {job.variant.key()}: {result}"
                    found[name, job.spec, job.variant] = result
    return found


def test_every_target_compiles_and_says_what_it_uses(facts: dict[Job, StaticFacts]):
    assert len(facts) == len(COMPILED)
    for fact in facts.values():
        assert fact.shared_bytes > 0
        assert fact.registers is not None
        assert 16 <= fact.registers <= 255
        assert fact.stack_bytes is not None
        assert fact.stack_bytes >= 0
        assert len(fact.code_hash) == 16


def test_tall_tiles_use_the_tensor_core_instructions_of_their_generation(
    facts: dict[Job, StaticFacts],
):
    expected = {
        "sm_80": "mma.sync", "sm_89": "mma.sync", "sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma",
        "sm_120": "mma.sync",
    }  # fmt: skip
    assert {name: facts[name, SPEC, fused("pointer")].tensor_core for name in TARGETS} == expected
    assert facts["sm_90", SPEC, TWO_LAUNCH].tensor_core == expected["sm_90"]


def test_features_and_uneven_heads_keep_the_tensor_cores_and_float32_has_none(facts: dict[Job, StaticFacts]):
    for name, spec, variant in LAYERS:
        assert bool(facts[name, spec, variant].tensor_core) == (spec.dtype != "float32")
    for variant in (unified(64, 64), PERSISTENT):
        assert facts["sm_90", RICH, variant].tensor_core == "wgmma.mma_async"


def test_float32_holds_its_operands_in_registers(facts: dict[Job, StaticFacts]):
    for name, spec, variant in LAYERS:
        if spec.dtype == "float32":
            assert (facts[name, spec, variant].stack_bytes or 0) < 512


def test_the_default_and_the_heuristic_of_the_largest_heads_spill_little(facts: dict[Job, StaticFacts]):
    for name, spec, variant in LARGEST:
        assert (facts[name, spec, variant].stack_bytes or 0) <= 640, f"{name} {variant.key()}"


def test_what_is_accepted_fits_and_what_is_rejected_nearly_did_not(facts: dict[Job, StaticFacts]):
    rejected = 0
    for name, spec, variant in COMPILED:
        found, limit = facts[name, spec, variant].shared_bytes, TARGETS[name].shared_memory_bytes
        if why_invalid(variant, spec, TARGETS[name]) == EXCEEDS:
            assert found + probability_bytes(spec, variant) + SCRATCH_BYTES > limit, f"{name} {variant.key()}"
            rejected += 1
        else:
            assert found <= limit, f"{name} {variant.key()}"
    assert rejected >= 2


def test_the_estimate_is_at_most_a_tile_of_probabilities_too_high(facts: dict[Job, StaticFacts]):
    # What `gluon_hopper` takes is foretold exactly, and tested beside it.
    for name, spec, variant in (one for one in COMPILED if one[2].template != "gluon_hopper"):
        stages, values = variant.number("num_stages"), variant.as_dict()
        warps = (variant.number("num_warps"), int(values.get("decode_num_warps", variant.number("num_warps"))))
        most = max(
            shared_memory_bytes(b, spec, TARGETS[name], n, stages, template_of(variant).traits(variant).has_tma)
            for b, n in zip(bodies(variant), warps, strict=False)
        )
        least = most - probability_bytes(spec, variant) - SCRATCH_BYTES
        assert least <= facts[name, spec, variant].shared_bytes <= most, f"{name} {variant.key()}"


def test_the_code_does_not_depend_on_the_batch():
    variant = Variant.of("unified", 16, unified(16, 16).as_dict() | {"num_segments": 16})
    found: list[StaticFacts] = []
    with CompilePool(processes=2) as pool:
        # Of one sequence, few, or many to merge.
        for text in ("1x1@9", "1x1@60000", "64x1@60000"):
            pool.submit(CompileJob(variant, SPEC, TARGETS["sm_90"], Batch.parse(text)))
        while pool.pending:
            found += [build.result for build in pool.results(10) if isinstance(build.result, StaticFacts)]
    assert len(found) == 3
    assert len({facts.code_hash for facts in found}) == 1


def bodies(variant: Variant) -> tuple[Body, ...]:
    return unified_bodies(variant) if variant.template == "unified" else fused_bodies(variant)


def probability_bytes(spec: AttentionSpec, variant: Variant) -> int:
    return max(body.block_m * body.block_n for body in bodies(variant)) * spec.element_bytes


def test_a_process_that_interprets_does_not_compile():
    with pytest.raises(TunerError, match="cannot compile"):
        compile_variant(unified(16, 16), SPEC, TARGETS["sm_90"], BATCH)


class Missing:
    """How Triton's settings are without the tool."""

    @property
    def cuobjdump(self) -> str:
        raise RuntimeError("Cannot find cuobjdump")


@pytest.mark.parametrize("script", [None, "exit 1", "true", "not there"])
def test_a_cuobjdump_that_cannot_be_used_costs_only_what_it_would_say(
    script: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tool = tmp_path / "cuobjdump"
    if script not in (None, "not there"):
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
    nvidia = Missing() if script is None else SimpleNamespace(cuobjdump=SimpleNamespace(path=str(tool)))
    monkeypatch.setattr(compiler, "knobs", SimpleNamespace(nvidia=nvidia))
    with pytest.warns(UserWarning, match="registers and stack are not known"):
        assert compiler._resource_usage(b"") == (None, None)
