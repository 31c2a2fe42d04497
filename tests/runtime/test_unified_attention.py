"""The replacement of vLLM's function, called as vLLM's own test calls it and compared with eager attention."""

from __future__ import annotations

import gc
import inspect
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from attention_samples import SPEC, SPLIT
from unified_samples import FP8, call_of, expected, right

from attention_tuner import HybridAttention, unified_attention
from attention_tuner.kernel_templates.errors import BatchError, SpecError
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.runtime import unified_attention as module
from attention_tuner.runtime.unified_attention import Attentions, HostLengths, host_lengths

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# The arguments of vllm.v1.attention.ops.triton_unified_attention.unified_attention, v0.33.0.
VLLM_ARGUMENTS = [
    "q", "k", "v", "out", "cu_seqlens_q", "max_seqlen_q", "seqused_k", "max_seqlen_k", "softmax_scale", "causal",
    "window_size", "block_table", "softcap", "q_descale", "k_descale", "v_descale", "seq_threshold_3D",
    "num_par_softmax_segments", "softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum", "alibi_slopes",
    "output_scale", "qq_bias", "sinks", "mm_prefix_range", "rswa_prefix_lens", "rswa_window", "use_alibi_sqrt",
    "kv_quant_mode", "k_scale_cache", "v_scale_cache", "chunk_lookback", "use_td", "mm_prefix_clamp_sliding_window",
]  # fmt: skip


def test_the_arguments_are_those_of_vllm_in_their_order_and_ours_come_after():
    parameters = list(inspect.signature(unified_attention).parameters.values())
    assert [p.name for p in parameters[: len(VLLM_ARGUMENTS)]] == VLLM_ARGUMENTS
    more = parameters[len(VLLM_ARGUMENTS) :]
    assert [p.name for p in more] == ["cu_seqlens_q_cpu", "seqused_k_cpu", "attention"]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is None for p in more)


MIXED = [(1, 68), (5, 18), (19, 33)]
DECODE = [(1, 53), (1, 37), (1, 101)]


# Each value meets the values that a kernel treats together with it.
@pytest.mark.parametrize(("seq_lens", "num_heads", "head_size", "more"), [
    (MIXED, (4, 4), 64, {}),
    (DECODE, (4, 4), 64, {"sliding_window": 16, "soft_cap": 50.0, "seq_threshold": 8}),
    (MIXED, (8, 2), 64, {"sliding_window": 32, "soft_cap": 50.0}),
    (DECODE, (8, 2), 128, {"seq_threshold": 8}),
    (MIXED, (5, 1), 128, {"sliding_window": 16}),
    (DECODE, (5, 1), 64, {"soft_cap": 50.0}),
    ([(1, 40), (5, 18)], (2, 1), 256, {"fp8_queries": True, "sliding_window": 16, "soft_cap": 50.0}),
])  # fmt: skip
@torch.inference_mode()
def test_a_call_like_those_of_vllm_is_right(
    seq_lens: list[tuple[int, int]], num_heads: tuple[int, int], head_size: int, more: dict[str, Any]
):
    call, expected = call_of(seq_lens, num_heads, head_size, "cpu", **more)
    unified_attention(**call)
    right(call, expected)


@torch.inference_mode()
def test_queries_in_bfloat16_over_a_cache_in_8_bits_are_right():
    call, expected = call_of(MIXED, (8, 2), 64, "cpu", fp8=True)
    unified_attention(**call)
    right(call, expected)
    # One scale for all, as a layer has it, is the same; and one that is expanded is no row of elements.
    for shape in ((), (1,)):
        scales = {"k_descale": torch.tensor(0.5).expand(shape), "v_descale": torch.tensor(0.25).expand(shape)}
        call["out"].fill_(torch.nan)
        unified_attention(**call | scales)
        right(call, expected)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@torch.inference_mode()
def test_queries_in_8_bits_over_a_cache_in_8_bits_are_right(dtype: torch.dtype):
    sequences = MIXED
    call, _ = call_of(sequences, (8, 2), 64, "cpu", fp8=True)
    of_heads = torch.tensor([0.5, 0.25])
    q = (call["q"] / of_heads.repeat_interleave(4)[:, None]).to(dtype)
    k, v = call["k"].float() * 0.5, call["v"].float() * 0.25
    wide = call | {"q": q.float() * of_heads.repeat_interleave(4)[:, None]}
    unified_attention(**call | {"q": q, "q_descale": of_heads.expand(3, 2)})
    right(call, expected(wide, *map(list, zip(*sequences, strict=True)), k, v))
    assert call["out"].dtype == torch.bfloat16
    # One scale for all.
    call["out"].fill_(torch.nan)
    unified_attention(**call | {"q": q, "q_descale": torch.tensor(0.5)})
    right(call, expected(call | {"q": q.float() * 0.5}, *map(list, zip(*sequences, strict=True)), k, v))
    with pytest.raises(SpecError, match="needs the tensor 'q_scale', which is not given"):
        unified_attention(**call | {"q": q})


@pytest.mark.parametrize(("wrong", "found"), [
    (0.5, "a tensor, not a float"), (torch.ones(3), r"or \[num_seqs, 2\], not \[3\]"),
    (torch.ones(1, 1, 2), r"not \[1, 1, 2\]"), (torch.ones(0, 2), r"not \[0, 2\]"),
])  # fmt: skip
def test_scales_of_other_shapes_are_refused(wrong: Any, found: str):
    call, _ = call_of([(3, 40)], (8, 2), 64, "cpu", fp8=True)
    with pytest.raises(SpecError, match=f"a scale must be .*{found}"):
        unified_attention(**call | {"k_descale": wrong})
    assert call["out"].isnan().all()


@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
def test_scales_that_differ_between_sequences_are_refused_by_name(name: str):
    call, _ = call_of([(3, 40), (1, 70)], (8, 2), 64, "cpu", fp8_queries=True)
    with pytest.raises(SpecError, match=f"not supported: a {name} that differs between sequences"):
        unified_attention(**call | {name: torch.tensor([[0.5, 0.25], [0.5, 0.75]])})
    assert call["out"].isnan().all()


def test_as_many_sinks_as_heads_are_needed():
    call, _ = call_of([(3, 40)], (4, 2), 64, "cpu")
    with pytest.raises(SpecError, match=r"sinks must be \[4\]"):
        unified_attention(**call | {"sinks": torch.ones(1)})


def test_the_default_device_makes_no_difference(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_attentions", Attentions())
    call, expected = call_of(MIXED, (8, 2), 64, "cpu", fp8=True)
    with torch.device("meta"):
        unified_attention(**call)
    right(call, expected)


def test_a_cache_held_like_that_of_vllm_is_right():
    call, expected = call_of([(1, 68), (5, 18)], (8, 2), 64, "cpu")
    # [pages, KV heads, page, K beside V], of which the function gets views.
    held = torch.cat((call["k"], call["v"]), dim=-1).transpose(1, 2).contiguous()
    k, v = held.transpose(1, 2).split(64, dim=-1)
    unified_attention(**call | {"k": k, "v": v})
    right(call, expected)


def test_scales_beside_a_cache_that_has_none_are_not_heeded():
    call, expected = call_of([(3, 40)], (4, 4), 64, "cpu")
    unified_attention(**call | {"k_descale": torch.tensor(3.0).expand(1, 4), "v_descale": torch.tensor(3.0)})
    right(call, expected)


def test_sinks_and_slopes_are_right():
    call, _ = call_of([(3, 40), (1, 70)], (4, 2), 64, "cpu")
    call |= {"sinks": torch.randn(4, dtype=torch.bfloat16), "alibi_slopes": torch.tensor([0.1, 0.02, 0.3, 0.0])}
    unified_attention(**call)
    right(call, expected(call, [3, 1], [40, 70], call["k"], call["v"]))


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("causal", {"causal": False}),
    ("causal", {"causal": torch.ones(1, dtype=torch.bool)}),
    ("q_descale", {"q_descale": torch.tensor(0.5)}),
    ("output_scale", {"output_scale": torch.tensor(0.5)}),
    ("qq_bias", {"qq_bias": torch.zeros(3, 3)}),
    ("mm_prefix_range", {"mm_prefix_range": torch.zeros(1, 1, 2)}),
    ("rswa_window", {"rswa_window": 9, "rswa_prefix_lens": torch.zeros(1)}),
    ("use_alibi_sqrt", {"use_alibi_sqrt": True, "alibi_slopes": torch.zeros(4)}),
    ("kv_quant_mode", {"kv_quant_mode": 2}),
    ("k_scale_cache", {"k_scale_cache": torch.zeros(1)}),
    ("v_scale_cache", {"v_scale_cache": torch.zeros(1)}),
    ("chunk_lookback", {"chunk_lookback": 1, "window_size": (9, 0)}),
    ("window_size", {"window_size": (9, 9)}),
]


@pytest.mark.parametrize(("name", "more"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_unsupported_arguments_are_refused_by_name_and_nothing_is_written(name: str, more: dict[str, Any]):
    call, _ = call_of([(3, 40)], (4, 4), 64, "cpu")
    with pytest.raises(SpecError, match=f"not supported: unified_attention with this '{name}'"):
        unified_attention(**call | more)
    assert call["out"].isnan().all()


def test_dtypes_and_sizes_that_no_kernel_has_are_refused_by_name():
    call, _ = call_of([(3, 40)], (4, 4), 64, "cpu")
    with pytest.raises(SpecError, match="queries in 'float8_e4m3fn' beside a cache in 'bfloat16'"):
        unified_attention(**call | {"q": call["q"].to(FP8)})
    with pytest.raises(SpecError, match="not supported: a head size of 24"):
        unified_attention(**call | {"q": call["q"][..., :24]})


def test_a_batch_without_query_tokens_is_no_work():
    call, _ = call_of([(3, 40)], (4, 4), 64, "cpu")
    unified_attention(**call | {"q": call["q"][:0], "out": call["out"][:0], "cu_seqlens_q": torch.zeros(2).int()})


def test_a_planned_attention_is_used_as_it_is():
    call, expected = call_of([(3, 40), (1, 70)], (4, 2), 64, "cpu")
    unified_attention(**call)
    (spec, *_), _ = next(reversed(module._attentions._made.items()))  # pyright: ignore
    attention = HybridAttention(spec, 16, 8, 2)
    attention.plan([3, 1], [37, 69])
    call["out"].fill_(torch.nan)
    # No lengths are read.
    nothing = {"cu_seqlens_q": None, "seqused_k": None}
    unified_attention(**call | nothing, attention=attention)
    right(call, expected)
    with pytest.raises(SpecError, match=r"the given attention is of layer .*, not of"):
        unified_attention(**call | {"window_size": (9, 0)}, attention=attention)


def test_lengths_are_copied_from_the_host_where_they_are_given():
    call, expected = call_of([(3, 40), (1, 70)], (4, 2), 64, "cpu")
    more = {"cu_seqlens_q_cpu": call["cu_seqlens_q"].clone(), "seqused_k_cpu": call["seqused_k"].clone()}
    call |= {"cu_seqlens_q": torch.zeros(3).int(), "seqused_k": torch.zeros(2).int()}
    unified_attention(**call, **more)
    right(call, expected)


def test_lengths_that_cannot_be_are_refused():
    call, _ = call_of([(3, 40)], (4, 4), 64, "cpu")
    with pytest.raises(BatchError, match="a sequence has no negative lengths"):
        unified_attention(**call | {"seqused_k": torch.tensor([2], dtype=torch.int32)})


# Planning looks only at the device of the queries.
Q = torch.empty(0)


def host(query_lens: list[int], context_lens: list[int]) -> HostLengths:
    return np.array(query_lens, np.int32), np.array(context_lens, np.int32)


def equal(lengths: HostLengths, others: HostLengths) -> bool:
    return all(map(np.array_equal, lengths, others))


def test_lengths_are_read_again_when_they_may_have_changed(monkeypatch: pytest.MonkeyPatch):
    # As if these tensors were on a GPU.
    monkeypatch.setattr(module, "_version", lambda tensor: None if tensor.is_inference() else tensor._version)
    reads: list[HostLengths] = []
    monkeypatch.setattr(module, "host_lengths", lambda *given: reads.append(host_lengths(*given)) or reads[-1])
    attentions = Attentions()
    buffer = torch.tensor([0, 3, 4], dtype=torch.int32)
    starts, kv_lens = buffer[:], torch.tensor([40, 70], dtype=torch.int32)
    for _ in range(3):
        assert equal(host([3, 1], [37, 69]), attentions.lengths(starts, kv_lens))
    assert len(reads) == 1
    # Another view may hold another step's; so may the same one, changed, be it through what it is a view of.
    assert equal(reads[0], attentions.lengths(buffer[:], kv_lens))
    assert len(reads) == 2
    attentions.lengths(starts, kv_lens)
    buffer[1] += 1
    assert equal(host([4, 0], [36, 70]), attentions.lengths(starts, kv_lens))
    kv_lens.fill_(50)
    assert equal(host([4, 0], [46, 50]), attentions.lengths(starts, kv_lens))
    assert len(reads) == 5
    with torch.inference_mode():
        uncounted = torch.tensor([5, 6], dtype=torch.int32)
        for added in range(3):
            assert attentions.lengths(starts, uncounted)[1].tolist() == [1 + added, 6 + added]
            uncounted += 1


def test_a_layer_is_planned_once_for_each_set_of_lengths():
    attentions = Attentions()
    attention = attentions.planned(SPEC, 16, Q, host([3, 1], [37, 69]))
    planned = attention._step  # pyright: ignore
    attention.plan = None  # pyright: ignore
    assert attentions.planned(SPEC, 16, Q, host([3, 1], [37, 69])) is attention
    assert attention._step is planned  # pyright: ignore
    with pytest.raises(TypeError):
        attentions.planned(SPEC, 16, Q, host([3, 1], [37, 70]))


def test_lengths_that_were_read_are_not_the_tensors_themselves():
    starts, kv_lens = torch.tensor([0, 3, 4], dtype=torch.int32), torch.tensor([40, 70], dtype=torch.int32)
    read = host_lengths(starts, kv_lens)
    starts += 1
    kv_lens += 1
    assert equal(read, host([3, 1], [37, 69]))


def test_lengths_that_do_not_belong_together_are_refused():
    with pytest.raises(BatchError, match="cu_seqlens_q must have one element more than seqused_k, not 2 and 2"):
        host_lengths(torch.tensor([0, 3]), torch.tensor([40, 70]))


def test_layers_pages_and_many_sequences_have_attentions_of_their_own():
    attentions = Attentions()
    few, many = host([1], [9]), host([1] * 1025, [9] * 1025)
    window = AttentionSpec(4, 2, 64, "float16", sliding_window=9)
    found = [attentions.planned(*given) for given in ((SPEC, 16, Q, few), (window, 16, Q, few), (SPEC, 32, Q, few),
                                                      (SPEC, 16, Q, many))]  # fmt: skip
    assert len(set(found)) == 4
    assert attentions.planned(SPEC, 16, Q, few) is found[0]
    assert [attention.spec for attention in found] == [SPEC, window, SPEC, SPEC]
    assert found[3].max_seqs == 2048


def test_a_plan_that_fails_leaves_none_behind():
    attentions = Attentions()
    good = host([3], [37])
    attention = attentions.planned(SPEC, 16, Q, good)
    with pytest.raises(BatchError, match="negative lengths"):
        attentions.planned(SPEC, 16, Q, host([3], [-1]))
    calls: list[object] = []
    attention.plan = lambda *lengths: calls.append(lengths)
    attentions.planned(SPEC, 16, Q, good)
    assert calls == [good]


def test_each_thread_has_attentions_of_its_own_that_are_chosen_alike():
    attentions = Attentions(choose=lambda *_: SPLIT)
    lengths = host([1], [9])
    here = attentions.planned(SPEC, 16, Q, lengths)
    found: list[HybridAttention] = []
    thread = threading.Thread(target=lambda: found.append(attentions.planned(SPEC, 16, Q, lengths)))
    thread.start()
    thread.join()
    (there,) = found
    assert there is not here
    assert there.variant == here.variant == SPLIT
    assert attentions.planned(SPEC, 16, Q, lengths) is here


def test_each_device_has_an_attention():
    attentions = Attentions()
    lengths = host([1], [9])
    assert attentions.planned(SPEC, 16, Q.to("meta"), lengths) is not attentions.planned(SPEC, 16, Q, lengths)


def test_the_oldest_attention_is_given_up_for_another_when_there_are_many(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MOST_MADE", 2)
    attentions, lengths = Attentions(), host([1], [9])
    first, second = (attentions.planned(SPEC, page_size, Q, lengths) for page_size in (16, 32))
    gone = weakref.ref(first)
    attentions.planned(SPEC, 48, Q, lengths)
    assert attentions.planned(SPEC, 32, Q, lengths) is second
    assert attentions.planned(SPEC, 16, Q, lengths) is not first
    del first
    gc.collect()
    assert gone() is None
