"""The inputs and the judge see every bug of every feature, at 128 and at 65,536 tokens, and pass what is right."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.oracle.inputs import make_tensors
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.tuner.measure.check import Checker

from . import feature_mutants as wrong
from .mutants import MUTANTS, MaskOneTooFew, MaskOneTooMany, SplitAttention

LENGTHS = (128, 65536)
QUERY_LENS = {"decode": 1, "chunk": 12}
# A layer's features and the bugs that they make possible. A window of -1 is a fraction of the keys.
CASES: dict[str, tuple[dict[str, Any], tuple[type[SplitAttention], ...]]] = {
    "window": (
        {"sliding_window": -1},
        (wrong.WindowOneTooMany, wrong.WindowOneTooFew, wrong.WindowOfTheFirstRow, wrong.WindowIgnored,
         wrong.LseWithoutWindow, wrong.LseInBase2, wrong.LseOfOneSegment),
    ),
    "soft cap": ({"logits_soft_cap": 50.0}, (wrong.CapIgnored, wrong.CapBeforeScale, wrong.CapInBase2)),
    "low soft cap": ({"logits_soft_cap": 20.0}, (wrong.CapIgnored, wrong.CapInBase2)),
    "sinks": (
        {"has_sinks": True},
        (wrong.SinkDropped, wrong.SinkTwice, wrong.SinkPerSegment, wrong.NeighboursSink, wrong.SinkScaled,
         wrong.SinkInBase2, wrong.LseWithoutSink, wrong.LseInBase2, wrong.LseOfOneSegment),
    ),
    "ALiBi": (
        {"has_alibi": True},
        (wrong.NeighboursSlope, wrong.SlopeDropped, wrong.SlopeUpward, wrong.SlopeWithinSegments),
    ),
    "ALiBi, soft cap": ({"has_alibi": True, "logits_soft_cap": 20.0}, (wrong.CapAfterSlope, wrong.CapIgnored)),
    "e4m3": (
        {"kv_dtype": "float8_e4m3fn"},
        (wrong.NeighboursKScale, wrong.NeighboursVScale, wrong.KScaleDropped, wrong.VScaleDropped, wrong.ScalesSwapped),
    ),
    "e5m2": ({"kv_dtype": "float8_e5m2", "dtype": "float16"}, (wrong.NeighboursKScale, wrong.NeighboursVScale)),
    **{
        f"queries in {dtype}": (
            {"kv_dtype": "float8_e4m3fn", "q_dtype": dtype},
            (wrong.QScaleDropped, wrong.NeighboursQScale, wrong.KScaleOfQueries, wrong.NeighboursKScale),
        )
        for dtype in ("float8_e4m3fn", "float8_e5m2")
    },
    "tree": ({"has_tree_mask": True}, (wrong.TreeIgnored, wrong.NeighboursBit, wrong.NeighboursWord)),
    "tree, window": ({"has_tree_mask": True, "sliding_window": 3}, (wrong.WindowOnTree, wrong.WindowOneTooMany)),
    "head sizes": (
        {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 80, "v_head_dim": 40},
        (wrong.TailIgnored, wrong.TailOfValuesIgnored),
    ),
    "all but masks": (
        {"kv_dtype": "float8_e4m3fn", "logits_soft_cap": 50.0, "has_sinks": True, "has_alibi": True, "v_head_dim": 40},
        (wrong.CapAfterSlope, wrong.NeighboursKScale, wrong.SinkPerSegment),
    ),
    "float32": ({"dtype": "float32"}, (wrong.Tf32Products,)),
}  # fmt: skip
# The layers whose rows see different keys, so that many keys are also read by several rows.
MASKED = ("window", "tree", "tree, window")
# The layers beside which every other bug is shown, and the tokens of their pages.
BESIDE = {"window": 16, "tree": 16, "float32": 16, "e5m2": 16, "queries in float8_e4m3fn": 16, "all but masks": 48}
LSE_ONLY = {wrong.LseWithoutSink, wrong.LseWithoutWindow, wrong.LseInBase2, wrong.LseOfOneSegment}
NEEDS_ROWS = {wrong.WindowOfTheFirstRow, wrong.WindowOnTree}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def judge_of(spec: AttentionSpec, batch: Batch, page_size: int) -> Checker:
    return Checker(spec, batch, page_size, "cpu", tensors=make_tensors(spec, batch, page_size, "cpu", 0, lse=True))


def make_judge(name: str, kv_len: int, kind: str) -> Checker:
    changes = dict(CASES[name][0])
    if changes.get("sliding_window") == -1:
        changes["sliding_window"] = {128: 40, 65536: 1000}[kv_len]
    spec = AttentionSpec(**{"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32, **changes})
    query_len = QUERY_LENS[kind]
    return judge_of(spec, Batch(((query_len, kv_len - query_len),) * 2), BESIDE.get(name, 16))


def split(mutant: type[SplitAttention], judge: Checker, place: float = 0.5) -> SplitAttention:
    """Attention that cuts what a sequence reads into about four segments, of no less than a tile."""
    query_len, context_len = judge.batch.sequences[1]
    keys = min(context_len, judge.spec.sliding_window or context_len) + query_len
    return mutant(judge, 16, max(16, keys // 4), place)


@pytest.mark.parametrize(("name", "kv_len", "kind"), [
    (name, kv_len, kind) for name in CASES for kv_len in LENGTHS for kind in QUERY_LENS
    if kv_len == LENGTHS[0] or (name in MASKED) == (kind == "chunk")
])  # fmt: skip
def test_right_attention_passes_and_every_mutant_is_rejected(name: str, kv_len: int, kind: str) -> None:
    judge = make_judge(name, kv_len, kind)
    right = split(SplitAttention, judge)
    check = judge.judge(right.output(victim=1), right.lse(victim=1))
    assert check.passed, check.detail
    for mutant in CASES[name][1]:
        if kind == "decode" and (mutant in NEEDS_ROWS or "tree" in name):
            # One row alone has no other.
            continue
        mutated = split(mutant, judge)
        # A wrong log-sum-exp must not stand in for a wrong output.
        check = judge.judge(mutated.output(victim=1), mutated.lse(victim=1) if mutant in LSE_ONLY else None)
        assert not check.passed, f"{mutant.__name__}: {check.detail}"
    for mutant in MUTANTS if name in BESIDE else ():
        if mutant is MaskOneTooMany and kind == "decode":
            # The one query token of a decode is the last: no later key exists.
            continue
        if mutant in (MaskOneTooMany, MaskOneTooFew) and name == "tree" and kind == "chunk":
            # The words say what tokens of a tree see, not their order.
            continue
        for place in (0.0, 0.4, 1.0) if mutant.strikes_somewhere else (0.0,):
            check = judge.judge(split(mutant, judge, place).output(victim=1))
            assert not check.passed, f"{mutant.__name__} is not seen at {place}: {check.detail}"


@pytest.mark.parametrize("mutant", [wrong.WindowOneTooMany, wrong.WindowOneTooFew])
@pytest.mark.parametrize("kv_len", LENGTHS)
def test_one_key_at_the_edge_of_the_window_is_seen_by_each_row(kv_len: int, mutant: type[SplitAttention]) -> None:
    judge = make_judge("window", kv_len, "chunk")
    out = mutant(judge, 16, kv_len).output(victim=1)
    for row in range(QUERY_LENS["chunk"], 2 * QUERY_LENS["chunk"]):
        alone = judge.oracle.to(out.dtype)
        alone[row] = out[row]
        assert judge.judge(alone).worst_ratio > 5.0, f"row {row}"


@pytest.mark.parametrize("kv_len", LENGTHS)
@pytest.mark.parametrize(("num_tokens", "mutants"), [
    (64, (wrong.HighBitsLost, wrong.HighBitsOfTheSign)), (65, (wrong.LongTreeHeeded,)),
])  # fmt: skip
def test_bugs_of_the_largest_trees_are_seen(
    num_tokens: int, mutants: tuple[type[SplitAttention], ...], kv_len: int
) -> None:
    spec = AttentionSpec(1, 1, 32, has_tree_mask=True)
    judge = judge_of(spec, Batch(((2, 14), (num_tokens, kv_len - num_tokens))), 16)
    right = split(SplitAttention, judge)
    check = judge.judge(right.output(victim=1), right.lse(victim=1))
    assert check.passed, check.detail
    for mutant in mutants:
        check = judge.judge(split(mutant, judge).output(victim=1))
        assert not check.passed, f"{mutant.__name__}: {check.detail}"


@pytest.mark.parametrize("kv_len", LENGTHS)
def test_a_cap_by_exponentials_is_seen_once_scores_are_in_the_thousands(kv_len: int) -> None:
    spec, batch = AttentionSpec(2, 1, 32, logits_soft_cap=50.0), Batch(((12, kv_len - 12),) * 2)
    tensors = make_tensors(spec, batch, 16, "cpu", 0)
    for size, is_seen in ((1.0, False), (512.0, True)):
        judge = Checker(spec, batch, 16, "cpu", tensors=dataclasses.replace(tensors, q=size * tensors.q))
        assert judge.judge(split(SplitAttention, judge).output(victim=1)).passed
        assert judge.judge(split(wrong.CapByExponentials, judge).output(victim=1)).passed != is_seen
