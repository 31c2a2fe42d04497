"""Launchers of a layer, and the steps and graphs that are planned with them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from attention_samples import GPU_SPEC, SPEC, SPLIT, checker_of, made, plan, run

from attention_tuner.kernel_templates.batch import Batch, BatchBucket, Lengths
from attention_tuner.kernel_templates.errors import BatchError, VariantError
from attention_tuner.kernel_templates.launch.launcher import Tensors
from attention_tuner.kernel_templates.registry import templates
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.runtime.hybrid_attention import HybridAttention
from attention_tuner.runtime.launchers import Launchers, Place, Step, present_place
from attention_tuner.tuner.measure.check import Checker

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def made_launchers(choose: Any, limits: tuple[int, int] = (64, 4096), batch_invariant: bool = False) -> Launchers:
    return Launchers(SPEC, 16, limits, present_place(), choose, batch_invariant)


def step(count: int, query_len: int = 1, context_len: int = 90) -> Lengths:
    return Lengths.of([query_len] * count, [context_len] * count)


def test_a_variant_has_one_launcher_with_room_for_all_steps_so_far():
    launchers = made_launchers(lambda *_: SPLIT)
    first = launchers.eager(step(3), return_lse=False)
    assert first.reserved == (4, 4)
    for count, query_len, reserved in ((4, 1, (4, 4)), (2, 9, (4, 32)), (64, 1, (64, 64)), (50, 60, (64, 4096))):
        launcher = launchers.eager(step(count, query_len), return_lse=False)
        assert launcher.reserved == reserved
        assert launcher.workspace is launchers.workspace
        assert launcher.settings.exact_grid


def test_launchers_that_hold_an_outgrown_workspace_are_made_anew():
    launchers = made_launchers(lambda _, bucket, *__: SPLIT if bucket.long_rows else SPLIT.replace(block_m=32))
    small = launchers.eager(step(1, 20), return_lse=False)
    assert launchers.eager(step(1, 20), return_lse=False) is small
    launchers.eager(step(64), return_lse=False)
    assert launchers.workspace.generation == 2
    again = launchers.eager(step(1, 20), return_lse=False)
    assert again is not small
    assert again.workspaces()[0].data_ptr() != small.workspaces()[0].data_ptr()


def test_a_graph_has_a_launcher_of_its_own_with_room_for_its_largest_step():
    launchers = made_launchers(lambda *_: SPLIT)
    graph = launchers.for_graph(step(3, 2), return_lse=False)
    assert graph.reserved == (3, 6)
    assert not graph.settings.exact_grid
    assert graph is not launchers.for_graph(step(3, 2), return_lse=False)
    assert graph is not launchers.eager(step(3, 2), return_lse=False)


@pytest.mark.parametrize(("limits", "usual"), [
    ((64, 4096), "1x512@8192,63x1@8192"), ((2, 100), "1x99@8192,1x1@8192"), ((9, 9), "9x1@8192"), ((64, 3), "3x1@8192"),
])  # fmt: skip
def test_batch_invariant_launchers_are_chosen_for_one_usual_batch(limits: tuple[int, int], usual: str):
    asked: list[BatchBucket] = []
    launchers = made_launchers(lambda _, bucket, *__: asked.append(bucket) or SPLIT, limits, batch_invariant=True)
    for count in (1, 2):
        assert launchers.eager(step(count), return_lse=False).settings.fixed_split is not None
    assert asked == [BatchBucket.of(Batch.parse(usual))] * 2


def test_a_variant_that_cannot_run_is_refused_by_name():
    with pytest.raises(VariantError, match="cannot run on Triton interpreter: a value is not among"):
        made_launchers(lambda *_: SPLIT.replace(block_m=24)).eager(step(1), return_lse=False)


def test_a_layer_without_a_variant_that_writes_a_log_sum_exp_is_refused(monkeypatch: pytest.MonkeyPatch):
    for name, template in list(templates().items()):
        monkeypatch.setitem(templates(), name, dataclasses.replace(template, writes_lse=False))
    with pytest.raises(VariantError, match="no variant that writes a log-sum-exp is valid for layer num_q_heads=4"):
        made_launchers(lambda *_: SPLIT).eager(step(1), return_lse=True)


def test_one_launcher_does_where_it_can_write_a_log_sum_exp():
    planned = Step(made_launchers(lambda *_: SPLIT), step(2))
    assert planned.launcher(return_lse=True) is planned.launcher(return_lse=False)


def test_a_graph_plan_is_what_run_launches_until_another_plan_is_made():
    attention = HybridAttention(SPEC, 16, 16, 4)
    graph = attention.plan_graph([1] * 3, [30] * 3)
    attention.plan([2], [9])
    assert attention.kv_lens.tolist() == [11, 0, 0, 0]
    graph.plan([1], [5])
    assert attention.kv_lens.tolist() == [6, 0, 0, 0]
    with pytest.raises(BatchError, match="room is reserved for up to 3 sequences"):
        graph.plan([1] * 4, [30] * 4)
    # A plan that fails changes nothing.
    assert graph.lengths.kv.tolist() == [6]
    assert attention.kv_lens.tolist() == [6, 0, 0, 0]


def test_a_graph_plan_keeps_its_variant_its_addresses_and_its_grid(monkeypatch: pytest.MonkeyPatch):
    asked: list[BatchBucket] = []

    def choose(_: AttentionSpec, bucket: BatchBucket, *__: object) -> Any:
        asked.append(bucket)
        return SPLIT if bucket.short_seqs > 1 else SPLIT.replace(block_m=32)

    attention = made(choose=choose)
    graph = attention.plan_graph([1] * 4, [40] * 4)
    launcher = graph.launcher(return_lse=False)
    grids: list[tuple[int, ...]] = []
    start = launcher.start
    monkeypatch.setattr(launcher, "start", lambda kernel, grid, *rest: (grids.append(grid), start(kernel, grid, *rest)))
    places: set[tuple[int, ...]] = set()
    for text in ("4x1@40", "1x1@70", "2x2@20"):
        checker = checker_of(text)
        plan(graph, text)
        assert checker.judge(run(attention, checker.tensors)).passed
        places.add(tuple(tensor.data_ptr() for tensor in (attention.kv_lens, *launcher.workspaces())))
        # Another step, planned and run in between, which no graph serves.
        other = checker_of("1x9@9")
        plan(attention, other.batch)
        assert attention.variant == SPLIT.replace(block_m=32)
        assert other.judge(run(attention, other.tensors)).passed
    assert len(places) == 1
    assert len(grids) == 6
    assert len(set(grids)) == 2
    assert asked == [BatchBucket.of(Batch.parse(text)) for text in ("4x1@40", *(["1x9@9"] * 3))]
    for query_lens in ([1] * 5, [5]):
        with pytest.raises(BatchError, match="room is reserved for up to 4 sequences and 4 query tokens"):
            graph.plan(query_lens, [3] * len(query_lens))


def test_a_graph_is_planned_only_for_what_the_captured_tensors_have_room_for(monkeypatch: pytest.MonkeyPatch):
    attention = made()
    graph = attention.plan_graph([1] * 4, [90] * 4)
    wide, narrow = checker_of("4x1@90").tensors, checker_of("3x1@40").tensors
    graph.plan([1] * 3, [40] * 3)
    # Tensors that are not captured are not read again.
    run(attention, narrow)
    graph.plan([1] * 4, [90] * 4)
    capture(attention, wide, monkeypatch)
    graph.plan([1] * 4, [wide.block_table.shape[1] * 16 - 1] * 4)
    with pytest.raises(BatchError, match="has 113 keys, but a row of block_table has pages for 112"):
        graph.plan([1], [wide.block_table.shape[1] * 16])
    graph.plan([1] * 3, [40] * 3)
    capture(attention, narrow, monkeypatch)
    # The narrowest table and the fewest rows count, whichever tensors have them.
    with pytest.raises(BatchError, match="the longest sequence has 91 keys, but a row of block_table has pages for"):
        graph.plan([1], [90])
    with pytest.raises(BatchError, match=r"4 query tokens need .* not 3; 4 sequences .*, not 3"):
        graph.plan([1] * 4, [9] * 4)
    assert attention.kv_lens.tolist()[:4] == [41, 41, 41, 0]


def capture(attention: HybridAttention, tensors: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Place, "is_capturing", lambda _: True)
        run(attention, tensors)


def test_nothing_is_planned_in_a_capture(monkeypatch: pytest.MonkeyPatch):
    attention = HybridAttention(SPEC, 16, 16, 4)
    attention.plan([2], [9])
    graph = attention.plan_graph([1], [5])
    monkeypatch.setattr(Place, "is_capturing", lambda _: True)
    for plan_step in (attention.plan, attention.plan_graph, graph.plan):
        with pytest.raises(BatchError, match="a step cannot be planned while a graph is captured"):
            plan_step([1], [3])
    assert attention.kv_lens.tolist() == [6, 0, 0, 0]


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
    with pytest.raises(BatchError, match=f"has {most + 1} keys, but a row of block_table has pages for {most}"):
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
