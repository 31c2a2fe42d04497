from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_samples import GPU_SPEC, SPEC, SPLIT, checker_of, made, plan, run

from attention_tuner.kernel_templates.batch import Batch, BatchBucket, Lengths
from attention_tuner.kernel_templates.errors import BatchError
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.runtime.hybrid_attention import HybridAttention
from attention_tuner.runtime.step import Step
from attention_tuner.tuner.measure.check import Checker

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def test_one_launcher_does_where_it_can_write_a_log_sum_exp():
    step = Step(made())
    step.begin(Lengths.of([1, 1], [30, 30]))
    assert step.launcher(return_lse=True) is step.launcher(return_lse=False)


def test_the_plan_of_a_graph_is_what_run_launches_until_another_is_made():
    attention = HybridAttention(SPEC, 16, 16, 4)
    graph = attention.plan_graph([1] * 3, [30] * 3)
    attention.plan([2], [9])
    assert attention.kv_lens.tolist() == [11, 0, 0, 0]
    graph.plan([1], [5])
    assert attention.kv_lens.tolist() == [6, 0, 0, 0]
    with pytest.raises(BatchError, match="room is reserved for up to 3 sequences"):
        graph.plan([1] * 4, [30] * 4)
    # What could not be planned changes nothing.
    assert graph.lengths.kv.tolist() == [6]
    assert attention.kv_lens.tolist() == [6, 0, 0, 0]


def test_the_plan_of_a_graph_keeps_its_variant_its_addresses_and_its_grid(monkeypatch: pytest.MonkeyPatch):
    asked: list[BatchBucket] = []

    def choose(_: AttentionSpec, bucket: BatchBucket, *__: object) -> Any:
        asked.append(bucket)
        return SPLIT if bucket.short_seqs > 1 else SPLIT.replace(block_m=32)

    attention = made(choose=choose)
    graph = attention.plan_graph([1] * 4, [90] * 4)
    launcher = graph.launcher(return_lse=False)
    grids: list[tuple[int, ...]] = []
    start = launcher.start
    monkeypatch.setattr(launcher, "start", lambda kernel, grid, *rest: (grids.append(grid), start(kernel, grid, *rest)))
    places: set[tuple[int, ...]] = set()
    for text in ("4x1@90", "1x1@300", "2x2@50"):
        checker = checker_of(text)
        plan(graph, text)
        assert checker.judge(run(attention, checker.tensors)).passed
        places.add(tuple(tensor.data_ptr() for tensor in (attention.kv_lens, *launcher.workspaces())))
        # A step that no graph serves, in between.
        other = checker_of("1x20@70")
        plan(attention, other.batch)
        assert attention.variant == SPLIT.replace(block_m=32)
        assert other.judge(run(attention, other.tensors)).passed
    assert len(places) == 1
    assert len(grids) == 6
    assert len(set(grids)) == 2
    assert asked == [BatchBucket.of(Batch.parse(text)) for text in ("4x1@90", *(["1x20@70"] * 3))]
    for query_lens in ([1] * 5, [5]):
        with pytest.raises(BatchError, match="room is reserved for up to 4 sequences and 4 query tokens"):
            graph.plan(query_lens, [3] * len(query_lens))


def test_a_graph_is_planned_only_for_what_the_captured_tensors_have_room_for(monkeypatch: pytest.MonkeyPatch):
    attention = made()
    graph = attention.plan_graph([1] * 4, [90] * 4)
    wide, narrow = checker_of("4x1@90").tensors, checker_of("3x1@40").tensors
    graph.plan([1] * 3, [40] * 3)
    # What is not captured is not read again.
    run(attention, narrow)
    graph.plan([1] * 4, [90] * 4)
    monkeypatch.setattr(attention, "_is_capturing", lambda: True)
    run(attention, wide)
    monkeypatch.undo()
    graph.plan([1] * 4, [wide.block_table.shape[1] * 16 - 1] * 4)
    with pytest.raises(BatchError, match="the longest sequence has 113 keys, and a row of block_table pages for 112"):
        graph.plan([1], [wide.block_table.shape[1] * 16])
    graph.plan([1] * 3, [40] * 3)
    monkeypatch.setattr(attention, "_is_capturing", lambda: True)
    run(attention, narrow)
    monkeypatch.undo()
    # The narrowest and the fewest rows count, whichever graph they are of.
    with pytest.raises(BatchError, match="the longest sequence has 91 keys, and a row of block_table pages for"):
        graph.plan([1], [90])
    with pytest.raises(BatchError, match=r"4 query tokens of 4 sequences need .*, not 3 and 3"):
        graph.plan([1] * 4, [9] * 4)
    assert attention.kv_lens.tolist()[:4] == [41, 41, 41, 0]


@pytest.mark.gpu
def test_a_replay_past_the_captured_block_table_is_refused_on_a_gpu():
    attention = HybridAttention(GPU_SPEC, 16, 64, 4)
    planned = attention.plan_graph([1] * 4, [40] * 4)
    t = checker_of("4x1@40", GPU_SPEC, "cuda").tensors
    run(attention, t, out=t.out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(attention, t, out=t.out)
    most = t.block_table.shape[1] * 16
    planned.plan([1] * 4, [most - 1] * 4)
    with pytest.raises(BatchError, match=f"has {most + 1} keys, and a row of block_table pages for {most}"):
        planned.plan([1] * 4, [most] * 4)


@pytest.mark.gpu
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_captured_graph_serves_changing_lengths_on_a_gpu(batch_invariant: bool):
    attention = HybridAttention(GPU_SPEC, 16, 1024, 64, batch_invariant=batch_invariant)
    sizes = {32: "32x1@8000", 4: "4x1@8000"}
    tensors = {size: Checker(GPU_SPEC, Batch.parse(text), 16, "cuda").tensors for size, text in sizes.items()}
    graphs: dict[int, Any] = {}
    for size, text in sizes.items():
        planned = attention.plan_graph(*zip(*Batch.parse(text).sequences, strict=True))
        t = tensors[size]
        run(attention, t, out=t.out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(attention, t, out=t.out)
        graphs[size] = planned, graph
    for size, text in ((32, "32x1@7000"), (4, "2x2@100"), (32, "5x1@10,1x1@3000"), (4, "4x1@7900"), (32, "32x1@1")):
        planned, graph = graphs[size]
        checker = checker_of(text, GPU_SPEC, "cuda")
        t, found = tensors[size], checker.tensors
        t.q[: len(found.q)] = found.q
        t.block_table[: len(found.block_table), : found.block_table.shape[1]] = found.block_table
        t.k_cache[: len(found.k_cache)], t.v_cache[: len(found.v_cache)] = found.k_cache, found.v_cache
        eager = checker_of("1x512@3000,7x1@900", GPU_SPEC, "cuda")
        plan(attention, eager.batch)
        assert eager.judge(run(attention, eager.tensors)).passed
        t.out.fill_(torch.nan)
        plan(planned, text)
        graph.replay()
        assert checker.judge(t.out[: len(found.q)]).passed
        assert t.out[len(found.q) :].isnan().all()


@pytest.mark.gpu
def test_nothing_is_planned_while_a_graph_is_captured():
    attention = HybridAttention(GPU_SPEC, 16, 64, 4)
    plan(attention, "1x1@40")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(BatchError, match="a step cannot be planned while a graph is captured"):
            plan(attention, "1x1@40")
        torch.zeros(1, device="cuda")
