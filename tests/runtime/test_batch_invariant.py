"""A batch-invariant attention: what a row gives depends, bit for bit, on its own sequence only."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from attention_samples import GPU_SPEC, checker_of, made, plan, run

from attention_tuner.kernel_templates import work_list_launch
from attention_tuner.kernel_templates.batch import Batch, BatchBucket
from attention_tuner.kernel_templates.default import default_variant
from attention_tuner.kernel_templates.errors import BatchError
from attention_tuner.kernel_templates.gpu import TARGETS, Gpu
from attention_tuner.kernel_templates.heuristic import candidates
from attention_tuner.kernel_templates.inputs import make_tensors
from attention_tuner.kernel_templates.launch import make_launcher
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.runtime import launchers
from attention_tuner.runtime.hybrid_attention import HybridAttention
from attention_tuner.runtime.launchers import FIXED_SPLIT

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# Of the narrower dtypes' outputs, most would round to the same whatever the order of sums.
SPEC = AttentionSpec(4, 2, 64, "float32")


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "FIXED_SPLIT", (128, 256))


def batch_around(sequence: tuple[int, int], draw: random.Random) -> tuple[Batch, int]:
    """A random batch that has `sequence`, and where."""
    others = [(draw.choice((1, 2, 7, 12)), draw.randrange(0, 400)) for _ in range(draw.randrange(0, 4))]
    place = draw.randrange(len(others) + 1)
    return Batch((*others[:place], sequence, *others[place:])), place


def rows_of(
    attention: HybridAttention, sequence: tuple[int, int], batch: Batch, place: int, device: str, seed: int
) -> tuple[torch.Tensor, ...]:
    """The output of `sequence` in `batch`, whose inputs are the same whatever the batch; again with its log-sum-exp.

    The two may be of different variants, where one template cannot write a log-sum-exp.
    """
    # Of needles one weighs more than all other keys: the order of sums would not show.
    t = make_tensors(attention.spec, batch, 16, device, seed, needles=False)
    own = make_tensors(attention.spec, Batch((sequence,)), 16, device, 99, needles=False)
    start = sum(query_len for query_len, _ in batch.sequences[:place])
    rows = slice(start, start + sequence[0])
    t.q[rows] = own.q
    pages = -(-sum(sequence) // 16)
    there, here = t.block_table[place, :pages].long(), own.block_table[0, :pages].long()
    t.k_cache[there], t.v_cache[there] = own.k_cache[here], own.v_cache[here]
    plan(attention, batch)
    outputs = (run(attention, t), *run(attention, t, return_lse=True))
    assert all(output[rows].isfinite().all() for output in outputs)
    return tuple(output[rows].clone() for output in outputs)


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("sequence", [(1, 300), (5, 130), (20, 290)], ids=str)
def test_a_row_depends_only_on_its_own_sequence(sequence: tuple[int, int]):
    attention = made(SPEC, batch_invariant=True, max_tokens=80)
    alone = rows_of(attention, sequence, Batch((sequence,)), 0, "cpu", 0)
    variant = attention.variant
    draw = random.Random(sequence[0])
    for seed in range(3):
        found = rows_of(attention, sequence, *batch_around(sequence, draw), "cpu", seed)
        assert all(map(torch.equal, found, alone))
        assert attention.variant == variant


def test_without_it_other_sequences_show():
    attention, sequence = made(SPEC, max_tokens=80), (1, 300)
    alone = rows_of(attention, sequence, Batch((sequence,)), 0, "cpu", 0)
    among = Batch((sequence, *(((1, 390),) * 5)))
    assert not all(map(torch.equal, rows_of(attention, sequence, among, 0, "cpu", 0), alone))


@pytest.mark.usefixtures("short_segments")
def test_the_output_is_right_and_segments_are_fixed():
    attention = made(batch_invariant=True)
    checker = checker_of("1x12@700,1x1@300,1x3@20", lse=True)
    plan(attention, checker.batch)
    assert checker.judge(*run(attention, checker.tensors, return_lse=True)).passed
    (launcher,) = attention.launchers._eager.values()  # pyright: ignore
    items = launcher._items[: launcher._num_items].tolist()  # pyright: ignore
    assert sorted((seq, start, stop) for _, _, _, _, start, stop, seq, _ in items) == [
        (0, 0, 256), (0, 256, 512), (0, 512, 712), (1, 0, 128), (1, 128, 256), (1, 256, 301), (2, 0, 23),
    ]  # fmt: skip


@pytest.mark.usefixtures("short_segments")
def test_a_graph_serves_sequences_up_to_the_longest_it_was_planned_for():
    attention = made(batch_invariant=True)
    graph = attention.plan_graph([1] * 3, [400] * 3)
    for text in ("3x1@390", "1x1@400,1x2@5"):
        checker = checker_of(text)
        plan(graph, text)
        assert checker.judge(run(attention, checker.tensors)).passed
    with pytest.raises(BatchError, match="room is reserved"):
        plan(graph, "3x1@900")


CODE = [
    default_variant(GPU_SPEC, Batch.parse("1x1@5000"), 16),
    *candidates(GPU_SPEC, BatchBucket.of(Batch.parse("1x512@4000,7x1@2000")), 16, TARGETS["sm_90"]),
]


@pytest.mark.parametrize("variant", CODE, ids=lambda variant: variant.key())
def test_what_kernels_are_compiled_with_depends_on_no_batch(variant: Variant, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(work_list_launch, "INTERPRETED", False)
    launcher = make_launcher(variant, GPU_SPEC, TARGETS["sm_90"])
    launcher.fixed_split = FIXED_SPLIT
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def note(kernel: Any, grid: object, arguments: object, constants: dict[str, Any]) -> None:
        found.setdefault((kernel.__name__, constants.get("PART", "")), []).append(constants)

    launcher.start = note
    t = make_tensors(GPU_SPEC, Batch.parse("1x1@5"), 16, "cpu", 0)
    for text in ("1x1@60000", "1x6@5000", "64x1@60000", "1x20@9000", "1x512@60000,63x1@2000"):
        launcher.plan(Batch.parse(text), "cpu")
        launcher.run(t)
    for constants in found.values():
        assert len(constants) >= 2
        assert all(each == constants[0] for each in constants)
    assert len(found) >= 2 or variant.as_dict().get("reduction") == "last_program"


def of_template(template: str) -> Any:
    def choose(spec: AttentionSpec, bucket: BatchBucket, page_size: int, gpu: Gpu) -> Variant:
        found = candidates(spec, bucket, page_size, gpu)
        return next(variant for variant in found if variant.template == template)

    return choose


@pytest.mark.gpu
@pytest.mark.parametrize("template", ["default", "fused", "gluon_hopper"])
@pytest.mark.parametrize("sequence", [(1, 5000), (6, 3000), (300, 9000)], ids=str)
def test_on_a_gpu(sequence: tuple[int, int], template: str):
    more: dict[str, Any] = {} if template == "default" else {"choose": of_template(template)}
    attention = HybridAttention(GPU_SPEC, 16, 2048, 64, batch_invariant=True, **more)
    alone = rows_of(attention, sequence, Batch((sequence,)), 0, "cuda", 0)
    draw = random.Random(sequence[0])
    for seed in range(4):
        found = rows_of(attention, sequence, *batch_around(sequence, draw), "cuda", seed)
        assert all(map(torch.equal, found, alone))
