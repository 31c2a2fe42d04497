from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from attention_samples import SPEC, SPLIT

from attention_tuner.kernel_templates.errors import BatchError
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.runtime import attentions as module
from attention_tuner.runtime.attentions import Attentions, HostLengths
from attention_tuner.runtime.hybrid_attention import HybridAttention

# Of a query only the device matters here.
Q = torch.empty(0)


def host(query_lens: list[int], context_lens: list[int]) -> HostLengths:
    return HostLengths(np.array(query_lens, np.int32), np.array(context_lens, np.int32))


def test_lengths_are_read_again_when_they_may_have_changed(monkeypatch: pytest.MonkeyPatch):
    # As if these tensors were on a GPU.
    monkeypatch.setattr(module, "_version", lambda tensor: None if tensor.is_inference() else tensor._version)
    reads: list[HostLengths] = []
    read = HostLengths.read
    monkeypatch.setattr(HostLengths, "read", lambda *given: reads.append(read(*given)) or reads[-1])
    attentions = Attentions()
    buffer = torch.tensor([0, 3, 4], dtype=torch.int32)
    starts, kv_lens = buffer[:], torch.tensor([40, 70], dtype=torch.int32)
    for _ in range(3):
        assert host([3, 1], [37, 69]).equals(attentions.lengths(starts, kv_lens))
    assert len(reads) == 1
    # Another view may hold another step's; so may the same one, changed, be it through what it is a view of.
    assert reads[0].equals(attentions.lengths(buffer[:], kv_lens))
    assert len(reads) == 2
    attentions.lengths(starts, kv_lens)
    buffer[1] += 1
    assert host([4, 0], [36, 70]).equals(attentions.lengths(starts, kv_lens))
    kv_lens.fill_(50)
    assert host([4, 0], [46, 50]).equals(attentions.lengths(starts, kv_lens))
    assert len(reads) == 5
    with torch.inference_mode():
        uncounted = torch.tensor([5, 6], dtype=torch.int32)
        for added in range(3):
            assert attentions.lengths(starts, uncounted).context_lens.tolist() == [1 + added, 6 + added]
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
    read = HostLengths.read(starts, kv_lens)
    starts += 1
    kv_lens += 1
    assert read.equals(host([3, 1], [37, 69]))
    assert not read.equals(host([3, 1], [37, 70]))
    assert not read.equals(None)


def test_lengths_that_do_not_belong_together_are_refused():
    with pytest.raises(BatchError, match="cu_seqlens_q must have a number more than seqused_k, not 2 and 2"):
        HostLengths.read(torch.tensor([0, 3]), torch.tensor([40, 70]))


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
