from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from attention_samples import GPU_SPEC, SPEC, SPLIT, checker_of, made, plan, run

from attention_tuner.kernel_templates.batch import Batch, BatchBucket
from attention_tuner.kernel_templates.errors import BatchError, SpecError, VariantError
from attention_tuner.kernel_templates.gpu import INTERPRETER, Gpu
from attention_tuner.kernel_templates.heuristic import candidates, default_variant
from attention_tuner.kernel_templates.launch.launcher import Tensors
from attention_tuner.kernel_templates.registry import templates
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.triton_family.templates import FUSED
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.runtime.hybrid_attention import HybridAttention
from attention_tuner.runtime.launchers import from_default_table

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def test_queries_in_8_bits_are_only_for_a_layer_that_has_them():
    attention = made()
    t = checker_of("3x1@40").tensors
    plan(attention, "3x1@40")
    with pytest.raises(SpecError, match=r"q must be \[any, 4, 64\] in torch.float16 .* in torch.float8_e5m2"):
        run(attention, dataclasses.replace(t, q=t.q.to(torch.float8_e5m2)), out=t.out)


def test_each_plan_serves_the_runs_after_it():
    attention = made()
    for text in ("1x12@5,2x1@70", "3x1@40", "1x20@3"):
        checker = checker_of(text, lse=True)
        plan(attention, text)
        assert run(attention, checker.tensors, out=checker.tensors.out) is checker.tensors.out
        assert checker.judge(checker.tensors.out).passed
        assert checker.judge(*run(attention, checker.tensors, return_lse=True)).passed
        assert attention.kv_lens.tolist()[: checker.batch.num_seqs] == list(checker.batch.kv_lens)


@pytest.mark.parametrize("spec", [
    AttentionSpec(4, 2, 64, kv_dtype="float8_e5m2", sliding_window=9, has_sinks=True),
    AttentionSpec(4, 2, 64, kv_dtype="float8_e5m2", sliding_window=9, q_dtype="float8_e4m3fn"),
    AttentionSpec(4, 2, 64, "float16", has_alibi=True, has_tree_mask=True, v_head_dim=32),
])  # fmt: skip
def test_features_are_given_to_run(spec: AttentionSpec):
    checker = checker_of("1x12@5,1x4@30", spec)
    attention = made(spec)
    plan(attention, checker.batch)
    out = run(attention, checker.tensors)
    assert out.dtype == getattr(torch, spec.dtype)
    assert checker.judge(out).passed
    name = "q_scale" if spec.has_fp8_queries else "k_scale" if spec.has_fp8_cache else "tree_mask"
    with pytest.raises(SpecError, match=f"needs the tensor '{name}', which is not given"):
        run(attention, dataclasses.replace(checker.tensors, **{name: None}))


def test_the_chooser_says_which_variant_runs_and_is_asked_once_for_each_plan():
    asked: list[tuple[object, ...]] = []

    def choose(spec: AttentionSpec, bucket: BatchBucket, page_size: int, gpu: Gpu) -> Variant:
        asked.append((spec, bucket, page_size, gpu))
        return SPLIT

    attention = made(choose=choose)
    checker = checker_of("2x1@70")
    plan(attention, checker.batch)
    for _ in range(2):
        assert checker.judge(run(attention, checker.tensors)).passed
    assert attention.variant == SPLIT
    assert asked == [(SPEC, BatchBucket.of(checker.batch), 16, INTERPRETER)]


def test_by_default_the_table_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    monkeypatch.setenv("ATTENTION_TUNER_DB", str(tmp_path / "none.db"))
    attention = made()
    plan(attention, "2x1@70")
    bucket = BatchBucket.of(Batch.parse("2x1@70"))
    assert attention.variant == from_default_table(SPEC, bucket, 16, INTERPRETER)


def test_a_variant_for_other_pages_is_refused():
    with pytest.raises(VariantError, match=r"gave variant .*; expected one for pages of 32"):
        plan(HybridAttention(SPEC, 32, 8, 4, choose=lambda *_: SPLIT), "1x1@3")


def likeliest(template: str, batch: Batch) -> Variant:
    """First variant of a template that the heuristic lists for `batch`."""
    found = candidates(SPEC, BatchBucket.of(batch), 16, INTERPRETER)
    return next(variant for variant in found if variant.template == template)


def test_a_template_that_writes_no_log_sum_exp_is_replaced_where_one_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    plain = dataclasses.replace(FUSED, name="plain", writes_lse=False)
    monkeypatch.setitem(templates(), "plain", plain)
    checker = checker_of("2x1@70", lse=True)
    variant = Variant.of("plain", 16, likeliest("fused", checker.batch).as_dict())
    attention = made(choose=lambda *_: variant)
    for text in ("2x1@70", "3x1@40"):
        checker = checker_of(text, lse=True)
        plan(attention, text)
        for _ in range(2):
            assert checker.judge(run(attention, checker.tensors)).passed
            assert checker.judge(*run(attention, checker.tensors, return_lse=True)).passed
        assert attention.variant == variant


def test_rows_past_the_batch_are_left_alone():
    checker = checker_of("3x1@40")
    t = checker.tensors
    attention = made()
    plan(attention, "2x1@40")
    run(attention, t, out=t.out)
    assert not t.out[:2].isnan().any()
    assert t.out[2].isnan().all()


def test_runs_without_a_plan_or_with_too_small_tensors_are_refused():
    attention = made()
    t = checker_of("3x1@40").tensors
    with pytest.raises(BatchError, match="nothing is planned: call plan before run"):
        run(attention, t)
    plan(attention, "4x1@40")
    with pytest.raises(BatchError, match=r"4 query tokens need as many rows of q, .* not 3; 4 sequences .*, not 3"):
        run(attention, t)
    plan(attention, "3x1@80")
    with pytest.raises(BatchError, match="the longest sequence has 81 keys, but a row of block_table has pages for 64"):
        run(attention, t)


@pytest.mark.parametrize(("arguments", "error", "message"), [
    (("llama", 16, 8, 4), SpecError, r"the layer must be an AttentionSpec, such as .*, not 'llama'"),
    ((SPEC, 17, 8, 4), SpecError, "page_size must be a multiple of 16 from 16, not 17"),
    ((SPEC, 0, 8, 4), SpecError, "page_size must be a multiple of 16 from 16, not 0"),
    ((SPEC, "16", 8, 4), SpecError, "page_size must be a multiple of 16 from 16, not '16'"),
    ((SPEC, 16.0, 8, 4), SpecError, "page_size must be a multiple of 16 from 16, not 16.0"),
    ((SPEC, 16, 25.6, 4), BatchError, "max_tokens must be a whole number from 1 to 1073741823, not 25.6"),
    ((SPEC, 16, 0, 4), BatchError, "max_tokens must be a whole number from 1 to 1073741823, not 0"),
    ((SPEC, 16, 8, True), BatchError, "max_seqs must be a whole number from 1 to 65536, not True"),
    ((SPEC, 16, 8, 2**40), BatchError, "max_seqs must be a whole number from 1 to 65536, not 1099511627776"),
])  # fmt: skip
def test_arguments_that_make_no_attention_are_refused_in_a_sentence(arguments: Any, error: Any, message: str):
    with pytest.raises(error, match=message):
        HybridAttention(*arguments)


def test_limits_may_be_numpys_integers():
    assert HybridAttention(SPEC, *np.array([16, 8, 4])).kv_lens.shape == (4,)


@pytest.fixture(scope="module")
def attention_in_use() -> tuple[HybridAttention, Tensors]:
    """An attention that is planned and has run, and the tensors that it ran on."""
    attention, t = made(), checker_of("3x1@40").tensors
    plan(attention, "3x1@40")
    run(attention, t, out=t.out)
    return attention, t


@pytest.mark.parametrize(("name", "change", "message"), [
    ("q", lambda t: t.float(), r"q must be \[any, 4, 64\] in torch.float16 on cpu with a contiguous last axis, not "),
    ("q", lambda t: t[:, :2], r"q must be \[any, 4, 64\].*not \[3, 2, 64\]"),
    ("k_cache", lambda t: t[:, :8], r"k_cache must be \[any, 16, 2, 64\]"),
    ("v_cache", lambda t: t.transpose(1, 2), r"v_cache must be \[any, 16, 2, 64\]"),
    ("v_cache", lambda t: t.mT.contiguous().mT, r"v_cache must be .*with strides \(2048, 128, 1, 2\)"),
    ("v_cache", lambda t: t[1:], r"k_cache and v_cache must have the same number of pages, not 11 and 10"),
    ("block_table", lambda t: t.long(), r"block_table must be \[any, any\] in torch.int32"),
    ("block_table", lambda t: t.tolist(), r"block_table must be \[any, any\] .*, not a list"),
    ("block_table", lambda t: t[0, 0], r"block_table must be \[any, any\] .*, not \[\] in torch.int32"),
    ("block_table", lambda t: t[0], r"block_table must be \[any, any\] in torch.int32"),
    ("out", lambda t: t[..., :32], r"out must be \[any, 4, 64\]"),
    ("q", lambda _: None, r"q must be a tensor, not NoneType"),
    ("k_cache", lambda _: None, r"k_cache must be \[any, 16, 2, 64\] .*, not a NoneType"),
    ("q", lambda t: t.to("meta"), r"not \[3, 4, 64\] in torch.float16 on meta"),
])  # fmt: skip
def test_tensors_that_are_not_the_layers_are_refused_in_a_sentence(
    attention_in_use: tuple[HybridAttention, Tensors], name: str, change: Any, message: str
):
    attention, t = attention_in_use
    wrong = dataclasses.replace(t, **{name: change(getattr(t, name))})
    with pytest.raises(SpecError, match=message):
        run(attention, wrong, out=wrong.out)


FEATURED = AttentionSpec(4, 2, 64, kv_dtype="float8_e5m2", has_sinks=True, has_tree_mask=True)


@pytest.mark.parametrize(("name", "wrong", "message"), [
    ("k_scale", torch.ones(1), r"k_scale must be \[2\] in torch.float32 on cpu .*, not \[1\] in torch.float32"),
    ("k_scale", torch.ones(2, 1), r"k_scale must be \[2\]"),
    ("k_scale", torch.tensor(0.5), r"k_scale must be \[2\] .*, not \[\] in"),
    ("v_scale", 0.5, r"v_scale must be \[2\] .*, not a float"),
    ("v_scale", torch.ones(2, device="meta"), r"v_scale must be \[2\] in torch.float32 on cpu .* on meta"),
    ("sinks", torch.ones(1), r"sinks must be \[4\]"),
    ("sinks", torch.ones(4).half(), r"sinks must be \[4\] in torch.float32"),
    ("tree_mask", torch.ones(3, 1).long(), r"tree_mask must be \[any\] in torch.int64"),
    ("tree_mask", [1, 3, 7], r"tree_mask must be \[any\] .*, not a list"),
    ("alibi_slopes", torch.ones(4), r"takes no tensor 'alibi_slopes', which is given"),
])  # fmt: skip
def test_tensors_of_features_that_are_not_the_layers_are_refused_in_a_sentence(name: str, wrong: Any, message: str):
    attention = made(FEATURED)
    t = checker_of("1x3@40", FEATURED).tensors
    plan(attention, "1x3@40")
    with pytest.raises(SpecError, match=message):
        run(attention, dataclasses.replace(t, **{name: wrong}), out=t.out)
    assert t.out.isnan().all()


@pytest.mark.parametrize("name", ["sinks", "tree_mask", "k_scale"])
def test_a_feature_that_a_plain_layer_does_not_take_is_refused(name: str):
    attention = made()
    t = checker_of("1x3@40").tensors
    plan(attention, "1x3@40")
    with pytest.raises(SpecError, match=f"takes no tensor '{name}', which is given"):
        run(attention, dataclasses.replace(t, **{name: torch.ones(4, dtype=torch.int64)}))


def test_a_tree_mask_has_a_row_for_each_query_token_that_is_planned():
    attention = made(FEATURED)
    checker = checker_of("1x4@40", FEATURED)
    t = checker.tensors
    plan(attention, "1x4@40")
    with pytest.raises(BatchError, match=r"4 query tokens need .* tree_mask, not 3; 1 sequences .*, not 1"):
        run(attention, dataclasses.replace(t, tree_mask=t.tree_mask[:3]))  # pyright: ignore
    # A padded q needs no more rows of the mask than query tokens are planned.
    padded = dataclasses.replace(t, q=torch.cat((t.q, t.q)))
    assert checker.judge(run(attention, padded)[:4]).passed


def test_a_misspelt_feature_is_refused():
    spec = AttentionSpec(4, 2, 64, "float16", has_sinks=True)
    attention = made(spec)
    t = checker_of("1x3@40", spec).tensors
    plan(attention, "1x3@40")
    with pytest.raises(SpecError, match="run takes no tensor 'sink'; expected some of sinks, alibi_slopes, q_scale"):
        attention.run(t.q, t.k_cache, t.v_cache, t.block_table, sink=t.sinks)  # pyright: ignore


def test_arrays_of_lengths_may_be_filled_anew_after_they_are_planned(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(templates(), "plain", dataclasses.replace(FUSED, name="plain", writes_lse=False))
    checker = checker_of("2x1@70", lse=True)
    attention = made(choose=lambda *_: Variant.of("plain", 16, likeliest("fused", checker.batch).as_dict()))
    query_lens, context_lens = np.array([1, 1]), np.array([70, 70])
    attention.plan(query_lens, context_lens)
    query_lens[:], context_lens[:] = 2, 3
    # The launcher that writes a log-sum-exp is planned only now.
    assert checker.judge(*run(attention, checker.tensors, return_lse=True)).passed


def test_another_current_device_is_refused(monkeypatch: pytest.MonkeyPatch):
    attention = made()
    t = checker_of("1x3@40").tensors
    plan(attention, "1x3@40")
    # As if it were on a GPU.
    attention._index = 0  # pyright: ignore
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with pytest.raises(SpecError, match="the current device must be this attention's, cpu, not cuda:1"):
        run(attention, t)


def test_variants_share_one_workspace_which_does_not_grow_again():
    variants = {1: SPLIT, 2: SPLIT.replace(num_segments=8, block_n=32)}
    attention = made(choose=lambda _, bucket, *__: variants[bucket.short_seqs])
    places: list[set[int]] = []
    for _ in range(3):
        for text in ("1x1@40", "2x1@40"):
            checker = checker_of(text)
            plan(attention, text)
            assert checker.judge(run(attention, checker.tensors)).passed
        launchers = attention._launchers._eager.values()  # pyright: ignore
        places.append({launcher.workspaces()[0].data_ptr() for launcher in launchers})
    assert len(places[-1]) == 1
    assert places[1] == places[2]
    assert attention._launchers.workspace.generation <= 2  # pyright: ignore


def test_an_eager_step_launches_no_more_programs_than_it_has_items():
    attention = made(choose=lambda *_: SPLIT)
    plan(attention, "1x1@20")
    (launcher,) = attention._launchers._eager.values()  # pyright: ignore
    plan(attention, "4x1@20")
    plan(attention, "1x1@20")
    assert launcher._num_items == 2  # pyright: ignore


def test_run_compiles_as_one_operator_and_is_not_compiled_again_for_another_plan():
    spec = AttentionSpec(4, 2, 64, "float16", has_sinks=True)
    attention = made(spec)

    def layer(t: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attention.run(t.q * 1, t.k_cache, t.v_cache, t.block_table, return_lse=True, sinks=t.sinks)
        return out * 1, lse

    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for text in ("3x1@40", "1x3@41,2x0@41"):
            checker = checker_of(text, spec, lse=True)
            plan(attention, text)
            with torch.compiler.set_stance("default" if text == "3x1@40" else "fail_on_recompile"):
                assert checker.judge(*compiled(checker.tensors)).passed


def test_one_default_variant_serves_as_well():
    checker = checker_of("1x12@5,2x1@70")
    attention = made(choose=lambda spec, _, page_size, __: default_variant(spec, checker.batch, page_size))
    plan(attention, checker.batch)
    assert checker.judge(run(attention, checker.tensors)).passed


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_current_device_is_refused_on_a_gpu():
    attention = HybridAttention(GPU_SPEC, 16, 64, 4)
    checker = checker_of("2x1@40", GPU_SPEC, "cuda")
    plan(attention, checker.batch)
    with torch.cuda.device(1), pytest.raises(SpecError, match="must be this attention's, cuda:0, not cuda:1"):
        run(attention, checker.tensors)
    assert checker.judge(run(attention, checker.tensors)).passed


@pytest.mark.gpu
# Modules that inductor imports warn.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_run_compiles_with_inductor_on_a_gpu():
    attention = HybridAttention(GPU_SPEC, 16, 1024, 64)

    def layer(t: Tensors) -> torch.Tensor:
        return attention.run(t.q * 1, t.k_cache, t.v_cache, t.block_table) * 1

    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True)
    with torch.no_grad():
        for text in ("1x512@3000,7x1@900", "8x1@900"):
            checker = checker_of(text, GPU_SPEC, "cuda")
            plan(attention, text)
            assert checker.judge(compiled(checker.tensors)).passed


@pytest.mark.gpu
def test_a_log_sum_exp_is_written_whatever_the_table_says_on_a_gpu():
    attention = HybridAttention(GPU_SPEC, 16, 1024, 64)
    templates_used: set[str] = set()
    for text in ("64x1@2000", "1x512@3000,7x1@900"):
        checker = checker_of(text, GPU_SPEC, "cuda", lse=True)
        plan(attention, text)
        templates_used.add(attention.variant.template)
        assert checker.judge(run(attention, checker.tensors)).passed
        assert checker.judge(*run(attention, checker.tensors, return_lse=True)).passed
    assert templates_used
