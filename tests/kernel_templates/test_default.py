import itertools

import pytest

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.default import default_variant
from attention_tuner.kernel_templates.gpu import TARGETS, Gpu
from attention_tuner.kernel_templates.registry import why_invalid
from attention_tuner.kernel_templates.spec import AttentionSpec


@pytest.mark.parametrize(
    ("heads", "batch", "block_m", "block_n", "num_segments"),
    [
        ((32, 8), "16x1@1000", 16, 16, 16),  # 16 sequences are all that 8 KV heads leave of 128 programs
        ((32, 8), "17x1@1000", 16, 32, 1),
        ((32, 8), "8x5@1000", 16, 16, 16),  # two blocks of four tokens each
        ((32, 8), "9x5@1000", 16, 32, 1),
        ((32, 8), "1x9@1000", 16, 32, 1),
        ((7, 1), "1x1@10", 16, 16, 16),
        ((71, 1), "1x1@10", 128, 16, 16),
        ((200, 1), "1x1@10", 128, 16, 16),
        ((20, 1), "1x512@10", 32, 32, 1),
    ],
)
def test_the_default_has_the_numbers_of_vllm(
    heads: tuple[int, int], batch: str, block_m: int, block_n: int, num_segments: int
):
    spec = AttentionSpec(*heads, 64)
    variant = default_variant(spec, Batch.parse(batch), 16)
    values = variant.as_dict()
    assert (values["block_m"], values["block_n"], values["num_segments"]) == (block_m, block_n, num_segments)
    assert (variant.template, values["num_warps"], values["num_stages"]) == ("unified", 4, 3)
    assert why_invalid(variant, spec, TARGETS["sm_90"]) is None


@pytest.mark.parametrize(
    ("spec", "block_m", "block_n", "num_stages"),
    [
        (AttentionSpec(32, 8, 256), 16, 32, 3),
        (AttentionSpec(32, 8, 264), 16, 16, 3),
        (AttentionSpec(71, 1, 256), 32, 16, 3),
        (AttentionSpec(71, 1, 512), 16, 16, 3),
        (AttentionSpec(71, 1, 64, v_head_dim=512), 16, 16, 3),
        (AttentionSpec(71, 1, 512, "float32"), 16, 16, 1),
    ],
)
def test_the_default_of_large_heads_has_smaller_tiles(
    spec: AttentionSpec, block_m: int, block_n: int, num_stages: int
):
    values = default_variant(spec, Batch.parse("17x1@1000"), 16).as_dict()
    assert (values["block_m"], values["block_n"], values["num_stages"]) == (block_m, block_n, num_stages)


@pytest.mark.parametrize("gpu", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize(("dtype", "kv_dtype"), [
    ("bfloat16", "auto"), ("float16", "auto"), ("bfloat16", "float8_e5m2"), ("float32", "auto"),
])  # fmt: skip
def test_the_default_fits_every_target(gpu: Gpu, dtype: str, kv_dtype: str):
    sizes = [(size, value) for size in (32, 64, 72, 128, 136, 192, 256, 264, 512) for value in {size, 128, 512}]
    for group, (head_dim, v_head_dim) in itertools.product((1, 7, 16, 17, 32, 33, 64, 65, 71, 128, 200), sizes):
        spec = AttentionSpec(group, 1, head_dim, dtype, kv_dtype, v_head_dim=v_head_dim)
        # Split, whole, and long.
        for batch in ("1x1@1000", "300x1@1000", "1x512@10"):
            variant = default_variant(spec, Batch.parse(batch), 16)
            assert why_invalid(variant, spec, gpu) is None, (spec, batch)
