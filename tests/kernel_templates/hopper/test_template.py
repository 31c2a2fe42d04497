import dataclasses

import pytest
from gluon_samples import HOPPER, SPEC, variant_of

from attention_tuner.kernel_templates.batch import Batch, BatchBucket
from attention_tuner.kernel_templates.gpu import INTERPRETER, TARGETS, Gpu
from attention_tuner.kernel_templates.hopper.template import GLUON_HOPPER, shared_memory_bytes
from attention_tuner.kernel_templates.registry import why_invalid
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.variant import Value


@pytest.mark.parametrize("gpu", [*(gpu for name, gpu in TARGETS.items() if name != "sm_90"), INTERPRETER])
def test_it_is_for_hopper_alone(gpu: Gpu):
    assert why_invalid(variant_of(), SPEC, HOPPER) is None
    assert why_invalid(variant_of(), SPEC, gpu) == "it needs a GPU of capability 9.0"


def test_its_stages_fit_shared_memory():
    assert why_invalid(variant_of(num_stages=3), SPEC, HOPPER) is None
    reason = "its stages exceed the GPU's shared memory"
    assert why_invalid(variant_of(num_stages=4), SPEC, HOPPER) == reason
    assert why_invalid(variant_of(num_stages=4, block_n=64), SPEC, HOPPER) is None
    small = dataclasses.replace(HOPPER, shared_memory_bytes=shared_memory_bytes(variant_of(), SPEC))
    assert why_invalid(variant_of(), SPEC, small) is None
    small = dataclasses.replace(small, shared_memory_bytes=small.shared_memory_bytes - 1)
    assert why_invalid(variant_of(), SPEC, small) == reason


def test_large_heads_leave_shared_memory_for_narrow_tiles_only():
    wide = AttentionSpec(8, 1, 256)
    assert why_invalid(variant_of(block_n=64), wide, HOPPER) is None
    assert why_invalid(variant_of(block_n=128), wide, HOPPER) == "its stages exceed the GPU's shared memory"


def test_float16_keeps_its_partial_results_in_float32():
    half = AttentionSpec(32, 8, 128, "float16")
    assert why_invalid(variant_of(), half, HOPPER) is None
    reason = why_invalid(variant_of(partials="bfloat16"), half, HOPPER)
    assert reason == "partial results in bfloat16 are too coarse for another dtype"


def test_a_batch_of_one_kind_has_one_schedule_and_weight():
    bucket = BatchBucket.of(Batch.parse("64x1@4000"))
    grid = GLUON_HOPPER.grid(bucket, HOPPER)
    assert grid["schedule"] == ("long_first",)
    assert grid["long_weight"] == (1,)
    assert len(grid["waves"]) > 1


@pytest.mark.parametrize("values", [
    {"sliding_window": 9}, {"logits_soft_cap": 9.0}, {"has_sinks": True}, {"has_alibi": True}, {"has_tree_mask": True},
    {"kv_dtype": "float8_e5m2"}, {"kv_dtype": "float8_e5m2", "q_dtype": "float8_e5m2"}, {"dtype": "float32"},
    {"head_dim": 96}, {"v_head_dim": 64},
], ids=str)  # fmt: skip
def test_a_layer_with_what_it_lacks_is_refused_by_name(values: dict[str, Value]):
    spec = dataclasses.replace(SPEC, **values)  # pyright: ignore
    reason = why_invalid(variant_of(partials="float32"), spec, HOPPER)
    assert reason is not None
    assert reason.startswith("it has no sliding window, soft cap, sinks, ALiBi, tree mask, fp8 cache, float32, nor")
