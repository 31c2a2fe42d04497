"""A batch-invariant attention: the result of a row depends, bit for bit, on its own sequence only."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_samples import GPU_SPEC, checker_of, made, plan, run

from attention_tuner.kernel_templates.batch import Batch, BatchBucket
from attention_tuner.kernel_templates.errors import BatchError
from attention_tuner.kernel_templates.gpu import TARGETS
from attention_tuner.kernel_templates.heuristic import candidates, default_variant
from attention_tuner.kernel_templates.launch.launcher import Settings, Tensors, make_launcher
from attention_tuner.kernel_templates.launch.tiles import FIRST_ROW, SEQ, SLOT, START, STOP
from attention_tuner.kernel_templates.oracle.inputs import make_tensors
from attention_tuner.kernel_templates.registry import templates
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.triton_family import launchers as triton_launchers
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.runtime import launchers
from attention_tuner.runtime.hybrid_attention import HybridAttention
from attention_tuner.runtime.launchers import FIXED_SPLIT

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# Narrower dtypes would mostly round to the same output, whatever the order of sums.
SPEC = AttentionSpec(2, 1, 32, "float32")


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "FIXED_SPLIT", (128, 256))


def batch_around(sequence: tuple[int, int], draw: random.Random) -> tuple[Batch, int]:
    """A random batch that contains `sequence`, and its place there."""
    others = [(draw.choice((1, 2, 7, 12)), draw.randrange(200)) for _ in range(draw.randrange(4))]
    return among(sequence, others, draw)


def crowd_around(sequence: tuple[int, int], draw: random.Random) -> tuple[Batch, int]:
    """As `batch_around`, with so many keys that without the mode `sequence` is cut differently than alone."""
    short = [(draw.choice((1, 2, 7)), draw.randrange(8_000, 30_000)) for _ in range(draw.randrange(8, 37))]
    long = [(draw.randrange(100, 200), draw.randrange(8_000, 30_000)) for _ in range(6)]
    return among(sequence, short + long, draw)


def among(sequence: tuple[int, int], others: list[tuple[int, int]], draw: random.Random) -> tuple[Batch, int]:
    place = draw.randrange(len(others) + 1)
    return Batch((*others[:place], sequence, *others[place:])), place


def tensors_with(spec: AttentionSpec, sequence: tuple[int, int], batch: Batch, place: int, device: str,
                 seed: int) -> Tensors:
    """Inputs of `batch`; those of `sequence` are the same in every batch."""
    # Without needles, one of which outweighs all other keys and hides the order of sums.
    t = make_tensors(spec, batch, 16, device, seed, needles=False)
    own = make_tensors(spec, Batch((sequence,)), 16, device, 99, needles=False)
    t.q[rows_at(batch, place)] = own.q
    pages = -(-sum(sequence) // 16)
    there, here = t.block_table[place, :pages].long(), own.block_table[0, :pages].long()
    t.k_cache[there], t.v_cache[there] = own.k_cache[here], own.v_cache[here]
    return t


def rows_at(batch: Batch, place: int) -> slice:
    start = sum(query_len for query_len, _ in batch.sequences[:place])
    return slice(start, start + batch.sequences[place][0])


def partials_at(attention: HybridAttention, batch: Batch, place: int) -> tuple[torch.Tensor, ...]:
    """Partial results of a sequence after the last run, in their order: float32, whatever the output's dtype."""
    launcher: Any = attention._planned().launcher(return_lse=False)  # pyright: ignore
    work = launcher.work_list(batch)
    starts = sorted({*work.items[:, SLOT].tolist(), work.partial_rows} - {-1})
    ends = dict(itertools.pairwise(starts))
    own = sorted(work.items[work.items[:, SEQ] == place, SLOT].tolist())
    rows = [row for slot in own if slot >= 0 for row in range(slot, ends[slot])]
    return tuple(buffer[:, rows].clone() for buffer in launcher.workspaces())


def found_of(
    attention: HybridAttention, sequence: tuple[int, int], batch: Batch, place: int, device: str, seed: int
) -> tuple[torch.Tensor, ...]:
    """Results of `sequence` in `batch`: output, output and log-sum-exp of a second run, and partial results.

    The runs may launch different variants, where a template cannot write a log-sum-exp.
    """
    t = tensors_with(attention.spec, sequence, batch, place, device, seed)
    plan(attention, batch)
    out = run(attention, t)
    # Read before the next run, which has the same workspace.
    partials = partials_at(attention, batch, place)
    rows = rows_at(batch, place)
    outputs = tuple(each[rows].clone() for each in (out, *run(attention, t, return_lse=True)))
    assert all(each.isfinite().all() for each in outputs)
    return *outputs, *partials


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("sequence", [(1, 300), (5, 130), (20, 290)], ids=str)
def test_a_row_depends_only_on_its_own_sequence(sequence: tuple[int, int]):
    attention = made(SPEC, batch_invariant=True, max_tokens=80)
    alone = found_of(attention, sequence, Batch((sequence,)), 0, "cpu", 0)
    variant = attention.variant
    draw = random.Random(sequence[0])
    for seed in range(2):
        found = found_of(attention, sequence, *batch_around(sequence, draw), "cpu", seed)
        assert all(map(torch.equal, found, alone))
        assert attention.variant == variant


def test_without_the_mode_other_sequences_show():
    attention, sequence = made(SPEC, max_tokens=80), (1, 300)
    alone = found_of(attention, sequence, Batch((sequence,)), 0, "cpu", 0)
    batch = Batch((sequence, *(((1, 390),) * 5)))
    assert not torch.equal(found_of(attention, sequence, batch, 0, "cpu", 0)[0], alone[0])


@pytest.mark.usefixtures("short_segments")
def test_the_output_is_right_and_segments_are_fixed():
    attention = made(batch_invariant=True)
    checker = checker_of("1x12@500,1x1@150,1x3@20", lse=True)
    plan(attention, checker.batch)
    assert checker.judge(*run(attention, checker.tensors, return_lse=True)).passed
    (launcher,) = attention._launchers._eager.values()  # pyright: ignore
    items = launcher._work.items[: launcher._num_items].tolist()  # pyright: ignore
    assert sorted((seq, start, stop) for _, _, _, _, start, stop, seq, _ in items) == [
        (0, 0, 256), (0, 256, 512), (1, 0, 128), (1, 128, 151), (2, 0, 23),
    ]  # fmt: skip


@pytest.mark.usefixtures("short_segments")
def test_a_graph_serves_sequences_up_to_the_longest_it_was_planned_for():
    attention = made(batch_invariant=True)
    graph = attention.plan_graph([1] * 3, [150] * 3)
    for text in ("3x1@140", "1x1@150,1x2@5"):
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
def test_the_constants_of_kernels_depend_on_no_batch(variant: Variant, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(triton_launchers, "INTERPRETED", False)
    launcher = make_launcher(variant, GPU_SPEC, TARGETS["sm_90"], Settings(fixed_split=FIXED_SPLIT))
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


# One variant of every template, for a layer in float32 where the template has such layers.
LAYER = AttentionSpec(32, 8, 64, "float32")
LAYERS = {"gluon_hopper": dataclasses.replace(LAYER, dtype="float16")}
VALUES: dict[str, int | str] = {
    "block_m": 32, "block_n": 32, "decode_block_m": 16, "decode_block_n": 32, "num_warps": 4, "decode_num_warps": 4,
    "num_stages": 2, "kv_load": "pointer", "order": "items", "waves": 4, "long_weight": 1, "schedule": "long_first",
    "partials": "float32", "reduction": "kernel", "programs_per_sm": 2, "num_segments": 16, "registers": 240,
    "dispatch": "dynamic",
}  # fmt: skip
SEQUENCES = [(1, 5000), (6, 3000), (300, 9000)]


def variants_to_run() -> Iterator[Variant]:
    for name, template in templates().items():
        values = {d.name: VALUES[d.name] if VALUES[d.name] in d.choices else d.choices[0] for d in template.dimensions}
        variant = Variant.of(name, 16, values)
        yield variant
        if "reduction" in values:
            yield variant.replace(reduction="last_program")


VARIANTS = list(variants_to_run())
BALANCED = [variant for variant in VARIANTS if "waves" in variant.as_dict()]
each_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.key())
each_balanced_variant = pytest.mark.parametrize("variant", BALANCED, ids=lambda variant: variant.key())
each_sequence = pytest.mark.parametrize("sequence", SEQUENCES, ids=str)


def layer_of(variant: Variant) -> AttentionSpec:
    return LAYERS.get(variant.template, LAYER)


def on_a_gpu(variant: Variant, **more: Any) -> HybridAttention:
    return HybridAttention(layer_of(variant), 16, 2048, 64, choose=lambda *_: variant, **more)


@each_variant
@each_sequence
def test_on_a_gpu_others_would_change_where_keys_are_cut(sequence: tuple[int, int], variant: Variant):
    launcher: Any = make_launcher(variant, layer_of(variant), TARGETS["sm_90"])
    fixed: Any = make_launcher(variant, layer_of(variant), TARGETS["sm_90"], Settings(fixed_split=FIXED_SPLIT))

    def cuts(batch: Batch, place: int, launcher: Any = launcher) -> list[list[int]]:
        items = launcher.work_list(batch).items
        return sorted(items[items[:, SEQ] == place][:, [FIRST_ROW, START, STOP]].tolist())

    draw = random.Random(sequence[0])
    crowds = [crowd_around(sequence, draw) for _ in range(3)]
    alone = cuts(Batch((sequence,)), 0)
    # `unified` has one number of segments for all sequences.
    assert all((cuts(*crowd) != alone) == (variant in BALANCED) for crowd in crowds)
    assert all(crowd.num_tokens <= 2048 and crowd.num_seqs <= 64 for crowd, _ in crowds)
    alone = cuts(Batch((sequence,)), 0, fixed)
    assert len(alone) > 1
    assert all(cuts(*crowd, fixed) == alone for crowd in crowds)


@pytest.mark.gpu
@each_variant
@each_sequence
def test_on_a_gpu(sequence: tuple[int, int], variant: Variant):
    attention = on_a_gpu(variant, batch_invariant=True)
    alone = found_of(attention, sequence, Batch((sequence,)), 0, "cuda", 0)
    draw = random.Random(sequence[0])
    for seed in range(3):
        found = found_of(attention, sequence, *crowd_around(sequence, draw), "cuda", seed)
        assert all(map(torch.equal, found, alone))


@pytest.mark.gpu
@each_balanced_variant
@each_sequence
def test_without_the_mode_other_sequences_show_on_a_gpu(sequence: tuple[int, int], variant: Variant):
    attention = on_a_gpu(variant)
    alone = found_of(attention, sequence, Batch((sequence,)), 0, "cuda", 0)
    crowd = crowd_around(sequence, random.Random(sequence[0]))
    assert not torch.equal(found_of(attention, sequence, *crowd, "cuda", 0)[0], alone[0])


@pytest.mark.gpu
@each_sequence
def test_the_variant_of_the_table_on_a_gpu(sequence: tuple[int, int]):
    attention = HybridAttention(GPU_SPEC, 16, 2048, 64, batch_invariant=True)
    alone = found_of(attention, sequence, Batch((sequence,)), 0, "cuda", 0)
    found = found_of(attention, sequence, *crowd_around(sequence, random.Random(sequence[0])), "cuda", 0)
    assert all(map(torch.equal, found, alone))


@pytest.mark.gpu
@each_variant
def test_a_replay_gives_the_bits_of_an_eager_run_on_a_gpu(variant: Variant):
    attention, sequence = on_a_gpu(variant, batch_invariant=True), (6, 3000)
    crowd = Batch((sequence, (300, 9000), *(((1, 20_000),) * 20)))
    t = tensors_with(attention.spec, sequence, crowd, 0, "cuda", 0)
    plan(attention, crowd)
    eager = run(attention, t).clone()
    planned = attention.plan_graph(*zip(*crowd.sequences, strict=True))
    run(attention, t, out=t.out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(attention, t, out=t.out)
    # The same step, then that of the first sequence alone in the larger step's grid.
    for batch in (crowd, Batch((sequence,))):
        t.out.fill_(torch.nan)
        plan(planned, batch)
        graph.replay()
        assert torch.equal(t.out[: batch.num_tokens], eager[: batch.num_tokens])
        assert t.out[batch.num_tokens :].isnan().all()
