from __future__ import annotations

from dataclasses import replace

import pytest
from cli_samples import BATCH, H100, SPEC, WIDE_SPEC

from attention_tuner.kernel_templates.errors import GpuError, InputError, ModelError, SpecError, VariantError
from attention_tuner.kernel_templates.gpu import INTERPRETER, TARGETS, Gpu
from attention_tuner.kernel_templates.heuristic import default_variant
from attention_tuner.kernel_templates.launch import device
from attention_tuner.kernel_templates.task import Task
from attention_tuner.tuner.console import request


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "present_gpu", lambda: None)


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    monkeypatch.setattr(device, "present_gpu", lambda: H100)
    return H100


def test_layers_of_a_model_are_divided_and_of_the_dtype_asked_for() -> None:
    (layer,) = request.layers("llama-3-8b", 2, "float16")
    assert (layer.num_q_heads, layer.num_kv_heads, layer.dtype) == (16, 4, "float16")
    assert request.layers("llama-3-8b", 1, None)[0].dtype == "bfloat16"


def test_a_layer_can_be_named_by_its_key() -> None:
    assert request.layers(None, 1, None, SPEC.key()) == (SPEC,)


@pytest.mark.parametrize(("model", "spec", "given"), [(None, None, "neither"), ("llama-3-8b", SPEC.key(), "both")])
def test_a_layer_is_named_in_exactly_one_way(model: str | None, spec: str | None, given: str) -> None:
    with pytest.raises(InputError, match=given):
        request.layers(model, 1, None, spec)


def test_a_key_names_every_feature_of_a_layer() -> None:
    key = ("num_q_heads=64,num_kv_heads=8,head_dim=192,dtype=float16,kv_dtype=float8_e5m2,sliding_window=128,"
           "logits_soft_cap=30.0,has_sinks=True,has_alibi=True,scale=0.1,v_head_dim=128,has_tree_mask=True")
    (layer,) = request.layers(None, 1, None, key)
    assert (layer.v_head_dim, layer.sliding_window, layer.has_tree_mask) == (128, 128, True)
    assert layer.key() == key


def test_a_model_whose_layers_differ_has_one_of_each_kind() -> None:
    assert [layer.sliding_window for layer in request.layers("gpt-oss-20b", 8, None)] == [128, None]


def test_the_cache_holds_what_is_asked_for() -> None:
    assert request.layers("llama-3-8b", 1, None, kv_dtype="float8_e4m3fn")[0].kv_dtype == "float8_e4m3fn"
    assert request.layers("llama-3-8b", 1, None, kv_dtype="auto") == request.layers("llama-3-8b", 1, None)
    with pytest.raises(SpecError, match=r"'llama-3-8b'.* a KV cache in 'float8_e5m2' beside 'float32' queries"):
        request.layers("llama-3-8b", 1, "float32", kv_dtype="float8_e5m2")


def test_queries_are_in_what_is_asked_for() -> None:
    (layer,) = request.layers("llama-3-8b", 1, None, kv_dtype="float8_e4m3fn", q_dtype="float8_e5m2")
    assert (layer.dtype, layer.kv_dtype, layer.q_dtype) == ("bfloat16", "float8_e4m3fn", "float8_e5m2")
    assert request.layers("llama-3-8b", 1, None, q_dtype="auto") == request.layers("llama-3-8b", 1, None)
    with pytest.raises(SpecError, match=r"'llama-3-8b'.* queries in 'float8_e5m2' beside a cache in 'bfloat16'"):
        request.layers("llama-3-8b", 1, None, q_dtype="float8_e5m2")


def test_all_layers_of_a_model_can_verify_trees() -> None:
    plain, trees = (request.layers("gpt-oss-20b", 8, None, tree=tree) for tree in (False, True))
    assert [replace(layer, has_tree_mask=False) for layer in trees] == list(plain)
    assert all(layer.has_tree_mask for layer in trees)
    assert list(request.layer_counts("gpt-oss-20b", trees).values()) == [12, 12]


@pytest.mark.parametrize(
    ("tp", "dtype", "kv_dtype", "q_dtype", "tree", "named"),
    [
        (2, None, None, None, False, "--tp 2"),
        (1, "bfloat16", "auto", None, False, "--dtype bfloat16"),
        (1, None, "auto", "auto", False, "--kv-dtype auto"),
        (1, None, None, "auto", True, "--q-dtype auto"),
        (1, None, None, None, True, "--tree"),
    ],
)
def test_what_belongs_to_a_model_does_not_go_with_a_layer(
    tp: int, dtype: str | None, kv_dtype: str | None, q_dtype: str | None, tree: bool, named: str
) -> None:
    with pytest.raises(InputError, match=f"{named} does not go with --spec"):
        request.layers(None, tp, dtype, SPEC.key(), kv_dtype, q_dtype, tree)


def test_an_unknown_dtype_is_refused_with_those_accepted() -> None:
    with pytest.raises(SpecError, match=r"--dtype 'int3' .* accepted are bfloat16, float16, float32"):
        request.layers("llama-3-8b", 1, "int3")
    with pytest.raises(SpecError, match=r"--kv-dtype 'fp8' .* accepted are auto, float8_e4m3fn, float8_e5m2"):
        request.layers("llama-3-8b", 1, None, kv_dtype="fp8")
    with pytest.raises(SpecError, match=r"--q-dtype 'float16' .* accepted are auto, float8_e4m3fn, float8_e5m2"):
        request.layers("llama-3-8b", 1, None, q_dtype="float16")


def test_page_sizes_come_one_by_one_or_joined_and_each_once() -> None:
    assert request.page_sizes(["16,128", "16", " 528 "]) == (16, 128, 528)
    assert request.page_sizes([]) == (16,)
    assert request.page_size(None) == 16
    assert request.page_size("544") == 544


@pytest.mark.parametrize("text", ["0", "-16", "17", "16.0", "", "sixteen", "16,,32", "9" * 5000, "\N{SUPERSCRIPT TWO}"])
def test_a_page_size_that_is_no_multiple_of_16_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="multiple of 16"):
        request.page_sizes([text])


def test_batches_of_both_options_are_joined_each_once() -> None:
    from attention_tuner.search_spaces.suites import suite

    serving = suite("serving")
    assert request.batches([str(BATCH), str(BATCH), str(serving[0])], "serving")[:2] == (BATCH, serving[0])
    assert len(request.batches([str(BATCH)], "serving")) == 1 + len(serving)
    assert request.batches([], None) == ()


def test_an_unknown_suite_is_refused() -> None:
    with pytest.raises(ModelError, match="'nothing'"):
        request.batches([], "nothing")


def test_default_batches_are_small_for_the_interpreter_and_those_of_serving_for_a_gpu() -> None:
    assert str(request.default_batches(INTERPRETER)[0]) == "1x16@32,2x1@40"
    assert max(batch.num_tokens for batch in request.default_batches(H100)) > 1000


def test_tasks_are_every_combination() -> None:
    tasks = request.tasks([SPEC], [BATCH], [16, 32])
    assert tasks == (Task(SPEC, BATCH, 16), Task(SPEC, BATCH, 32))


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_the_machine_is_the_interpreter() -> None:
    assert request.machine(None) == request.runnable(None) == INTERPRETER
    assert request.machine("sm_90") == TARGETS["sm_90"]


@pytest.mark.usefixtures("no_gpu")
def test_a_gpu_that_is_not_there_cannot_run_anything() -> None:
    with pytest.raises(GpuError, match=r"'sm_90' is not present .*no GPU is"):
        request.runnable("sm_90")
    with pytest.raises(GpuError, match=r"'H9000' is not present .* accepted here: interpreter$"):
        request.runnable("H9000")
    with pytest.raises(GpuError, match=r"accepted here: interpreter, and sm_90 only for generate"):
        request.runnable("sm_90")
    with pytest.raises(GpuError, match=r"'H9000'; accepted here are sm_80, .*, interpreter"):
        request.machine("H9000")


def test_a_gpu_is_known_by_its_name_its_slug_and_its_architecture(h100: Gpu) -> None:
    for name in (None, "nvidia h100", "NVIDIA_H100", "sm_90"):
        assert request.machine(name) == request.runnable(name) == h100
    assert request.machine("sm_80") == TARGETS["sm_80"]
    assert request.runnable("interpreter") == INTERPRETER


def test_another_architecture_than_the_present_one_cannot_run(h100: Gpu) -> None:
    with pytest.raises(GpuError, match=f"only {h100.name} is.* accepted here: {h100.name} and interpreter"):
        request.runnable("sm_80")
    with pytest.raises(GpuError, match=f"accepted here: {h100.name} and interpreter$"):
        request.runnable("NVIDIA H200")


@pytest.mark.usefixtures("no_gpu")
def test_a_gpu_that_only_a_stored_config_knows_can_be_named() -> None:
    assert request.machine("NVIDIA_H100", [H100]) == H100


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


def test_a_variant_that_is_invalid_here_is_refused_with_the_reason() -> None:
    key = default_variant(SPEC, BATCH, 16).replace(block_m=128, num_warps=1).key()
    with pytest.raises(VariantError, match=r"cannot run layer .* registers"):
        request.variant(key, WIDE_SPEC, 16, H100)


def test_options_that_do_not_go_with_another_are_refused_by_name() -> None:
    request.refuse_beside("--replay", db=None, dry_run=False)
    with pytest.raises(InputError, match="--dry-run does not go with --replay"):
        request.refuse_beside("--replay", db=None, dry_run=True, gpu="sm_90")
