import itertools
from collections import Counter

import pytest

from attention_tuner.kernel_templates.batch import Batch, BatchBucket
from attention_tuner.kernel_templates.errors import VariantError
from attention_tuner.kernel_templates.gpu import INTERPRETER, TARGETS, Gpu
from attention_tuner.kernel_templates.heuristic import (
    candidates,
    default_variant,
    heuristic_variant,
    may_depend_on_waves,
)
from attention_tuner.kernel_templates.limits import registers_of
from attention_tuner.kernel_templates.registry import template_of, why_invalid
from attention_tuner.kernel_templates.spec import HEAD_DIMS, AttentionSpec
from attention_tuner.kernel_templates.variant import Variant

SMALL = Gpu("small", (7, 5), 40, 64 * 1024, 0)
GPUS = [*TARGETS.values(), INTERPRETER, SMALL]
BATCHES = ["1x512@16384,63x1@32768", "4x1@48", "32x6@20000", "1x8192@0"]


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
    sizes = [(size, value) for size in (32, 72, 128, 256, 264, 512) for value in {size, 512}]
    for group, (head_dim, v_head_dim) in itertools.product((1, 16, 17, 33, 65, 128, 200), sizes):
        spec = AttentionSpec(group, 1, head_dim, dtype, kv_dtype, v_head_dim=v_head_dim)
        # Split, whole, and long.
        for batch in ("1x1@1000", "300x1@1000", "1x512@10"):
            variant = default_variant(spec, Batch.parse(batch), 16)
            assert why_invalid(variant, spec, gpu) is None, (spec, batch)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_the_likeliest_variant_is_valid_for_every_layer_page_and_gpu(gpu: Gpu):
    heads, pages = itertools.cycle(((32, 8), (71, 1), (4, 4))), itertools.cycle((16, 48, 528, 128, 64))
    for head_dim, batch in itertools.product((dim for dim in HEAD_DIMS if dim <= 256), BATCHES):
        spec, page_size = AttentionSpec(*next(heads), head_dim), next(pages)
        variant = heuristic_variant(spec, BatchBucket.of(Batch.parse(batch)), page_size, gpu)
        assert why_invalid(variant, spec, gpu) is None, spec


FEATURES: list[dict[str, object]] = [
    {"dtype": "float32"}, {"dtype": "float32", "head_dim": 256}, {"kv_dtype": "float8_e5m2", "head_dim": 72},
    {"kv_dtype": "float8_e4m3fn"}, {"v_head_dim": 256}, {"head_dim": 192, "v_head_dim": 128, "sliding_window": 100},
    {"has_sinks": True, "has_alibi": True, "has_tree_mask": True, "logits_soft_cap": 9.0},
]  # fmt: skip


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("values", FEATURES, ids=str)
def test_every_layer_has_a_heuristic_and_a_default_where_anything_can_run(gpu: Gpu, values: dict[str, object]):
    for text, heads in zip(BATCHES, ((32, 8), (71, 1), (128, 1), (4, 4)), strict=True):
        spec, batch = AttentionSpec(*heads, **({"head_dim": 64} | values)), Batch.parse(text)  # pyright: ignore
        if spec.kv_dtype == "float8_e4m3fn" and (0, 0) < gpu.capability < (8, 9):
            with pytest.raises(VariantError, match="numbers in float8_e4m3fn need a GPU"):
                heuristic_variant(spec, BatchBucket.of(batch), 16, gpu)
            continue
        for page_size in (16, 128, 2048):
            variant = heuristic_variant(spec, BatchBucket.of(batch), page_size, gpu)
            assert why_invalid(variant, spec, gpu) is None
            if gpu.name != "small":
                assert why_invalid(default_variant(spec, batch, page_size), spec, gpu) is None


# Beyond 256 all are padded to 512.
LARGE: list[dict[str, object]] = [
    {"head_dim": 512}, {"head_dim": 264}, {"head_dim": 64, "v_head_dim": 512}, {"head_dim": 504, "v_head_dim": 32},
    {"head_dim": 384, "dtype": "float16", "kv_dtype": "float8_e5m2"}, {"head_dim": 512, "dtype": "float32"},
]  # fmt: skip


@pytest.mark.parametrize("gpu", GPUS[:-1], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("values", LARGE, ids=str)
def test_layers_of_large_heads_have_a_heuristic_and_a_default_on_every_target(gpu: Gpu, values: dict[str, object]):
    for text, heads, page_size in zip(BATCHES, ((32, 8), (71, 1), (4, 4), (71, 1)), (16, 528, 128, 16), strict=True):
        spec, batch = AttentionSpec(*heads, **values), Batch.parse(text)  # pyright: ignore
        variant = heuristic_variant(spec, BatchBucket.of(batch), page_size, gpu)
        assert why_invalid(variant, spec, gpu) is None
        assert why_invalid(default_variant(spec, batch, page_size), spec, gpu) is None


def test_heads_too_large_for_a_gpu_are_refused():
    with pytest.raises(VariantError, match="its tiles exceed the GPU's shared memory"):
        heuristic_variant(AttentionSpec(32, 8, 512), BatchBucket.of(Batch.parse("32x6@20000")), 16, SMALL)


def test_large_heads_have_warps_enough_for_their_accumulators():
    bucket = BatchBucket.of(Batch.parse(BATCHES[0]))
    for head_dim, warps in ((64, 4), (256, 4), (512, 8)):
        variant = heuristic_variant(AttentionSpec(8, 2, head_dim), bucket, 16, TARGETS["sm_100"])
        assert (variant.number("block_m"), variant.number("num_warps")) == (64, warps)
    for text, value_dim in itertools.product(BATCHES, (256, 512)):
        spec, bucket = AttentionSpec(8, 2, 64, v_head_dim=value_dim), BatchBucket.of(Batch.parse(text))
        for variant in candidates(spec, bucket, 16, TARGETS["sm_100"]):
            values = variant.as_dict()
            for part in ("", "decode_"):
                warps = int(values.get(f"{part}num_warps", variant.number("num_warps")))
                assert value_dim <= 128 * warps
                assert warps == 8 or int(values.get(f"{part}block_m", 16)) * value_dim <= registers_of(warps)


def test_verification_gets_taller_tiles_than_decode():
    spec = AttentionSpec(32, 8, 128)
    rows = [
        heuristic_variant(spec, BatchBucket.of(Batch.parse(text)), 16, TARGETS["sm_100"]).number("decode_block_m")
        for text in ("32x1@20000", "32x6@20000")
    ]
    assert rows == [16, 32]


def test_a_page_that_no_variant_reads_is_refused():
    with pytest.raises(VariantError, match="pages of 24: the page size is no multiple of 16"):
        heuristic_variant(AttentionSpec(4, 2, 64), BatchBucket.of(Batch.parse("1x1@1")), 24, TARGETS["sm_90"])


@pytest.mark.parametrize("batch", BATCHES)
def test_the_candidates_are_several_and_all_valid(batch: str):
    spec, bucket = AttentionSpec(32, 8, 128), BatchBucket.of(Batch.parse(batch))
    for page_size in (16, 128):
        found = candidates(spec, bucket, page_size, TARGETS["sm_90"])
        assert len(set(found)) == len(found) >= 4
        assert all(why_invalid(variant, spec, TARGETS["sm_90"]) is None for variant in found)
        loads = {v.text("kv_load") for v in found if v.template == "fused"}
        assert loads >= ({"tma"} if page_size == 128 else {"pointer"})


def test_both_schedules_are_tried_for_hybrid_batches_only():
    spec = AttentionSpec(32, 8, 128)
    schedules = [
        {v.text("schedule") for v in candidates(spec, BatchBucket.of(Batch.parse(text)), 16, TARGETS["sm_90"])
         if v.template != "two_launch"}
        for text in BATCHES
    ]
    assert schedules == [{"long_first", "interleaved"}, {"long_first"}, {"long_first"}, {"long_first"}]


@pytest.mark.parametrize("batch", BATCHES)
def test_hopper_tries_its_own_template_first(batch: str):
    spec, bucket = AttentionSpec(32, 8, 128), BatchBucket.of(Batch.parse(batch))
    for page_size in (16, 48, 128):
        templates = [v.template for v in candidates(spec, bucket, page_size, TARGETS["sm_90"])]
        assert templates[:3] == ["gluon_hopper"] * 3
        assert templates[-1] in {"fused", "persistent"}
    assert candidates(spec, bucket, 16, TARGETS["sm_100"])[0].template == "fused"


@pytest.mark.parametrize(
    ("batch", "whole"),
    [
        ("256x1@1023", True),
        # As many keys in all, of which one sequence has half; too many keys; programs too few; a chunk beside them.
        ("1x1@130000,255x1@511", False),
        ("256x1@4095", False),
        ("8x1@1023", False),
        ("256x1@1023,1x512@512", False),
    ],
)
def test_many_sequences_of_few_keys_are_left_whole(batch: str, whole: bool):
    bucket = BatchBucket.of(Batch.parse(batch))
    for gpu in ("sm_80", "sm_90"):
        first = candidates(AttentionSpec(8, 1, 128), bucket, 16, TARGETS[gpu])[0]
        assert (first.template == "unified") is whole
        assert template_of(first).never_splits_kv(first) is whole


def test_of_eight_times_as_many_tiles_small_programs_come_first():
    bucket = BatchBucket.of(Batch.parse("256x1@1023"))
    first, second, *_ = candidates(AttentionSpec(32, 8, 128), bucket, 16, TARGETS["sm_90"])
    assert (first.template, first.number("num_warps"), second.template) == ("fused", 2, "unified")


@pytest.mark.parametrize(
    ("num_segments", "batch", "depends"),
    [
        (1, "64x1@8191", True),
        (16, "64x1@8191", False),
        (1, "1x512@32000", True),
        # Many tiles; few keys in tiles enough, and too few; a chunk beside them, one without context, and a large one.
        (1, "256x1@8191", False),
        (1, "64x1@1023", False),
        (1, "8x1@1023", True),
        (1, "1x512@512,64x1@8191", False),
        (1, "1x1024@0", False),
        (1, "1x8192@65536", False),
    ],
)
def test_a_variant_that_never_splits_kv_may_depend_on_the_count_of_tiles(num_segments: int, batch: str, depends: bool):
    values = {"block_m": 16, "block_n": 32, "num_segments": num_segments, "num_warps": 4, "num_stages": 3}
    variant, bucket = Variant.of("unified", 16, values), BatchBucket.of(Batch.parse(batch))
    assert may_depend_on_waves(variant, AttentionSpec(32, 8, 128), bucket, TARGETS["sm_90"]) is depends


@pytest.mark.parametrize(
    ("heads", "batch", "page_size", "expected"),
    [
        # Keys enough for items of four waves, or of two where there is one head; and too few.
        ((32, 8), "1x512@16384,63x1@32768", 16, {"waves": 4, "dispatch": "grid"}),
        ((32, 8), "1x512@3584,31x1@4095", 16, {"waves": 1, "dispatch": "persistent"}),
        ((32, 8), "1x512@3584,31x1@4095", 128, {"decode_block_m": 64, "kv_load": "tma"}),
        ((8, 1), "1x512@16384,63x1@32768", 16, {"waves": 2, "dispatch": "grid"}),
        ((8, 1), "1x512@3584,31x1@4095", 128, {"waves": 2, "dispatch": "dynamic"}),
        # A prompt of two rounds of tiles, one of fewer, and a chunk.
        ((32, 8), "1x8192@0", 16, {"waves": 0}),
        ((4, 1), "1x4096@0", 16, {"waves": 1}),
        ((32, 8), "1x2048@30720", 16, {"waves": 1}),
        # Short sequences of which each is cut into many pieces, and few.
        ((8, 1), "4x1@65535", 16, {"decode_block_n": 128, "num_warps": 4}),
        ((8, 1), "1x1@2000", 16, {"waves": 1, "reduction": "last_program"}),
        ((32, 8), "4x1@65535", 16, {"waves": 1, "reduction": "last_program"}),
    ],
)
def test_on_hopper_the_batch_says_what_comes_first(
    heads: tuple[int, int], batch: str, page_size: int, expected: dict[str, object]
):
    first = candidates(AttentionSpec(*heads, 128), BatchBucket.of(Batch.parse(batch)), page_size, TARGETS["sm_90"])[0]
    assert first.as_dict().items() >= expected.items()


@pytest.mark.parametrize(
    ("heads", "batch", "expected"),
    [
        ((8, 1), "1x512@16384,63x1@32768", {"block_n": 32, "waves": 4}),
        ((32, 8), "1x512@16384,63x1@32768", {"block_n": 64, "waves": 2}),
        # Of a long batch tiles for less than half of the multiprocessors, and for more.
        ((8, 1), "1x512@30720", {"waves": 4}),
        ((32, 8), "1x512@30720", {"waves": 1}),
        ((32, 8), "64x1@16383", {"decode_block_n": 128, "waves": 4}),
    ],
)
def test_elsewhere_the_batch_says_what_comes_first_too(
    heads: tuple[int, int], batch: str, expected: dict[str, object]
):
    first = candidates(AttentionSpec(*heads, 128), BatchBucket.of(Batch.parse(batch)), 16, TARGETS["sm_80"])[0]
    assert first.template == "fused"
    assert first.as_dict().items() >= expected.items()


def test_tiles_of_large_heads_take_two_stages_where_more_do_not_fit():
    bucket = BatchBucket.of(Batch.parse("1x8192@0"))
    stages = {
        dim: {v.number("num_stages") for v in candidates(AttentionSpec(8, 2, dim), bucket, 16, TARGETS["sm_80"])
              if v.template == "fused" and v.number("block_n") == 128}
        for dim in (64, 128)
    }  # fmt: skip
    assert stages == {64: {3}, 128: {2}}


@pytest.mark.parametrize("gpu", ["sm_80", "sm_90"])
@pytest.mark.parametrize("batch", BATCHES)
def test_a_short_search_tries_two_of_each_template_that_suits_the_batch(batch: str, gpu: str):
    bucket = BatchBucket.of(Batch.parse(batch))
    is_hybrid = bucket.has_part("long") and bucket.has_part("short")
    for heads, page_size in itertools.product(((32, 8), (8, 1)), (16, 128)):
        # The default is the first of sixteen.
        tried = candidates(AttentionSpec(*heads, 128), bucket, page_size, TARGETS[gpu])[:15]
        count = Counter(variant.template for variant in tried)
        assert count["persistent"] == 2
        assert count["two_launch"] == (2 if is_hybrid else 0)
        assert count["fused"] >= 4


def test_hybrid_batches_on_hopper_try_both_kinds_side_by_side_whichever_unit_is_next():
    spec, bucket = AttentionSpec(32, 8, 128), BatchBucket.of(Batch.parse(BATCHES[0]))
    found = [v for v in candidates(spec, bucket, 16, TARGETS["sm_90"]) if v.template == "gluon_hopper"]
    assert {(v.text("dispatch"), v.text("schedule")) for v in found} >= {
        ("grid", "interleaved"), ("dynamic", "interleaved"), ("dynamic", "long_first"), ("persistent", "long_first"),
    }  # fmt: skip
    assert {v.text("reduction") for v in found} == {"kernel", "last_program"}
    # Heads of 256 have few stages, and none the less a candidate for each kind of batch.
    for text in BATCHES:
        wide = candidates(AttentionSpec(8, 2, 256), BatchBucket.of(Batch.parse(text)), 16, TARGETS["sm_90"])
        assert wide[0].template == "gluon_hopper"
        assert wide[0].number("num_stages") == 2
