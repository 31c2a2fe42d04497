from dataclasses import replace
from typing import Any

import pytest
import torch

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.errors import BatchError, SpecError, VariantError
from attention_tuner.kernel_templates.gpu import INTERPRETER
from attention_tuner.kernel_templates.heuristic import default_variant
from attention_tuner.kernel_templates.launch.arguments import NO_FEATURES
from attention_tuner.kernel_templates.launch.launcher import (
    Launcher,
    Settings,
    Tensors,
    features_of,
    make_launcher,
    offset_dtype,
    query_start_locs,
)
from attention_tuner.kernel_templates.spec import AttentionSpec

SPEC, BATCH = AttentionSpec(4, 2, 64), Batch.parse("1x16@32,2x1@40")


def test_a_variant_gets_the_launcher_of_its_template():
    launcher = make_launcher(default_variant(SPEC, BATCH, 16), SPEC, INTERPRETER)
    assert type(launcher).__name__ == "UnifiedLauncher"


def test_an_invalid_variant_is_refused_with_its_reason():
    variant = default_variant(SPEC, BATCH, 16).replace(block_m=24)
    with pytest.raises(VariantError, match="not among the template's choices"):
        make_launcher(variant, SPEC, INTERPRETER)


def test_query_tokens_start_one_sequence_after_the_other():
    assert query_start_locs(BATCH) == [0, 16, 17, 18]


def test_what_is_padded_has_room_for_the_next_power_of_two():
    sizes = [0, 1, 2, 3, 64, 65, 1000]
    for padded, expected in ((False, sizes), (True, [0, 1, 2, 4, 64, 128, 1024])):
        launcher = make_launcher(default_variant(SPEC, BATCH, 16), SPEC, INTERPRETER, Settings(padded=padded))
        assert [launcher.capacity(size) for size in sizes] == expected


def test_a_launch_is_a_variants_own_where_its_template_knows_no_better():
    class Plain(Launcher):
        def plan(self, batch: Batch, device: object) -> None: ...

        def run(self, tensors: object) -> None: ...

    variant = default_variant(SPEC, Batch.parse("2x1@48"), 16)
    assert Plain(variant, SPEC, INTERPRETER).launch_key() == variant.key()


def test_what_is_reserved_is_kept_to():
    class Plain(Launcher):
        def plan(self, batch: Batch, device: object) -> None:
            self.check_reserved(batch.num_seqs, batch.num_tokens)

        def run(self, tensors: object) -> None: ...

    launcher = Plain(default_variant(SPEC, Batch.parse("2x1@48"), 16), SPEC, INTERPRETER)
    launcher.plan(Batch.parse("9x99@1"), "cpu")
    launcher.reserve(2, 9, "cpu")
    launcher.plan(Batch.parse("1x8@1000000,1x1@0"), "cpu")
    for text in ("3x1@1", "1x10@1"):
        with pytest.raises(BatchError, match="up to 2 sequences and 9 query tokens, not for"):
            launcher.plan(Batch.parse(text), "cpu")


SINKS, LSE = torch.zeros(4), torch.zeros(3, 4)


def tensors(**features: Any) -> Tensors:
    empty = torch.empty(0)
    return Tensors(torch.empty(3, 4, 64), *[empty] * 6, **features)


def test_the_features_of_a_launch_are_its_tensors():
    assert features_of(tensors(), SPEC) is NO_FEATURES
    assert features_of(tensors(lse=LSE), SPEC) == NO_FEATURES._replace(lse=LSE, stride_lse=4)
    found = features_of(tensors(sinks=SINKS), AttentionSpec(4, 2, 64, has_sinks=True))
    assert found.sinks is SINKS
    assert found == NO_FEATURES._replace(sinks=SINKS)


@pytest.mark.parametrize(("more", "given", "message"), [
    ({}, {"sinks": SINKS}, "takes no tensor 'sinks', which is given"),
    ({"has_sinks": True}, {}, "needs the tensor 'sinks', which is not given"),
    ({"has_sinks": True}, {"sinks": SINKS, "k_scale": SINKS}, "takes no tensor 'k_scale', which is given"),
    ({"kv_dtype": "float8_e5m2"}, {"k_scale": SINKS[:2], "v_scale": SINKS[:2], "q_scale": SINKS[:2]},
     "takes no tensor 'q_scale', which is given"),
    ({"kv_dtype": "float8_e5m2", "q_dtype": "float8_e5m2"}, {"k_scale": SINKS[:2], "v_scale": SINKS[:2]},
     "needs the tensor 'q_scale', which is not given"),
    ({"kv_dtype": "float8_e5m2", "q_dtype": "float8_e5m2"}, {"q_scale": SINKS}, r"q_scale must be \[2\] .* not \[4\]"),
    ({"has_alibi": True}, {"alibi_slopes": SINKS[:1]}, r"alibi_slopes must be \[4\] in torch.float32 on cpu .* \[1\]"),
    ({}, {"lse": LSE[:, :2]}, r"lse must be \[any, 4\] .*, not \[3, 2\] in torch.float32"),
    ({}, {"lse": LSE.double()}, r"lse must be \[any, 4\] in torch.float32 .*, not \[3, 4\] in torch.float64"),
    ({}, {"lse": LSE.to("meta")}, "lse must be .* on cpu .*, not .* on meta"),
    ({}, {"lse": LSE.T.contiguous().T}, r"lse must be .* contiguous last axis, not .* with strides \(1, 3\)"),
])  # fmt: skip
def test_features_that_are_not_the_layers_are_refused(more: Any, given: dict[str, torch.Tensor], message: str):
    with pytest.raises(SpecError, match=message):
        features_of(tensors(**given), AttentionSpec(4, 2, 64, **more))


@pytest.mark.parametrize(
    ("shape", "stride", "fits"),
    [
        # Offsets up to 2**31 - 1, and one more.
        ((2**20, 16, 1, 128), (2048, 128, 128, 1), True),
        ((2**20 + 1, 16, 1, 128), (2048, 128, 128, 1), False),
        # Heads lie apart, and are no part of an offset.
        ((2**17, 16, 64, 128), (2048, 128, 2**28, 1), True),
        # Pages of many layers in turn.
        ((2**15, 16, 8, 128), (16 * 8 * 128 * 32, 1024, 128, 1), False),
    ],
)
def test_offsets_in_int32_reach_two_to_the_31st(shape: tuple[int, ...], stride: tuple[int, ...], fits: bool):
    far = torch.empty_strided(shape, stride, dtype=torch.bfloat16, device="meta")
    near = torch.empty_strided((2, 16, 1, 128), (2048, 128, 128, 1), dtype=torch.bfloat16, device="meta")
    both = [replace(tensors(), k_cache=k, v_cache=v) for k, v in ((far, near), (near, far))]
    assert [offset_dtype(each) for each in both] == ["int32" if fits else "int64"] * 2
