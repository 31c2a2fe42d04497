from __future__ import annotations

import pytest
from cli_samples import BATCH, H100, SPEC, WIDE_SPEC

from attention_tuner.kernel_templates.errors import GpuError, InputError, VariantError
from attention_tuner.kernel_templates.gpu import INTERPRETER, TARGETS, Gpu
from attention_tuner.kernel_templates.heuristic import default_variant
from attention_tuner.kernel_templates.launch import device
from attention_tuner.tuner.console import options, request


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "present_gpu", lambda: None)


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    monkeypatch.setattr(device, "present_gpu", lambda: H100)
    return H100


def test_page_sizes_come_one_by_one_or_joined_and_each_once() -> None:
    assert request.page_sizes(["16,128", "16", " 528 "]) == (16, 128, 528)
    assert request.page_sizes([]) == (request.page_size(None),) == (16,)


@pytest.mark.parametrize("text", ["0", "-16", "17", "16.0", "", "16,,32", "9" * 5000, "\N{SUPERSCRIPT TWO}"])
def test_a_page_size_that_is_no_multiple_of_16_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="multiple of 16"):
        request.page_sizes([text])


def test_batches_of_both_options_are_joined_each_once() -> None:
    serving = options.Batches(suite="serving").named()
    named = options.Batches([str(BATCH), str(BATCH), str(serving[0])], "serving").named()
    assert named == (BATCH, *serving)
    assert options.Batches().named() == ()


def test_default_batches_are_small_for_the_interpreter_and_those_of_serving_for_a_gpu() -> None:
    assert str(request.default_batches(INTERPRETER)[0]) == "1x16@32,2x1@40"
    assert max(batch.num_tokens for batch in request.default_batches(H100)) > 1000


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_the_interpreter_runs_and_targets_can_be_named() -> None:
    assert request.any_gpu(None) == request.running_gpu(None) == INTERPRETER
    assert request.any_gpu("sm_90") == TARGETS["sm_90"]
    assert request.any_gpu("NVIDIA_H100", [H100]) == H100
    with pytest.raises(GpuError, match=r"'sm_90' is not present .*accepted here: interpreter, and sm_90 only for"):
        request.running_gpu("sm_90")
    with pytest.raises(GpuError, match=r"'H9000' is not present .* accepted here: interpreter$"):
        request.running_gpu("H9000")
    with pytest.raises(GpuError, match=r"'H9000'; accepted here are sm_80, .*, interpreter"):
        request.any_gpu("H9000")


def test_a_gpu_is_known_by_its_name_its_slug_and_its_architecture(h100: Gpu) -> None:
    for name in (None, "nvidia h100", "NVIDIA_H100", "sm_90"):
        assert request.any_gpu(name) == request.running_gpu(name) == h100
    assert request.any_gpu("sm_80") == TARGETS["sm_80"]
    assert request.running_gpu("interpreter") == INTERPRETER
    for other in ("sm_80", "NVIDIA H200"):
        with pytest.raises(GpuError, match=f"only {h100.name} is.* accepted here: {h100.name} and interpreter"):
            request.running_gpu(other)


def test_a_variant_is_read_when_it_can_run() -> None:
    variant = default_variant(SPEC, BATCH, 16)
    assert request.variant(variant.key(), SPEC, 16, INTERPRETER) == variant


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("unified:", "magic:"), "unknown template 'magic'"),
        (("block_m=16", "block_m=17"), r"block_m=17; accepted are 16, 32"),
        (("block_m=16,", ""), "does not name the dimensions of template 'unified'"),
        (("page_size=16", "page_size=32"), "pages of 32, and --page-size is 16"),
        (("=16", ""), "does not name a variant"),
    ],
)
def test_a_variant_that_cannot_run_is_refused_with_the_reason(change: tuple[str, str], message: str) -> None:
    key = default_variant(SPEC, BATCH, 16).key()
    assert change[0] in key
    with pytest.raises(VariantError, match=message):
        request.variant(key.replace(*change), SPEC, 16, INTERPRETER)


def test_a_variant_that_is_invalid_for_a_layer_is_refused_with_the_reason() -> None:
    key = default_variant(SPEC, BATCH, 16).replace(block_m=128, num_warps=1).key()
    with pytest.raises(VariantError, match=r"cannot run layer .* registers"):
        request.variant(key, WIDE_SPEC, 16, H100)
