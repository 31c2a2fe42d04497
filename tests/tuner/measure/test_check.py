from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.launch.launcher import Launcher, Tensors
from attention_tuner.kernel_templates.oracle.inputs import make_tensors
from attention_tuner.kernel_templates.oracle.reference import paged_attention
from attention_tuner.kernel_templates.spec import DTYPES, MAX_SCALE, MIN_SCALE, AttentionSpec
from attention_tuner.tuner.measure import check
from attention_tuner.tuner.measure.check import Checker

SPEC = AttentionSpec(4, 2, 64)
BATCH = Batch.parse("1x12@20,2x1@40,1x3@7")


class EagerLauncher(Launcher):
    """Writes eager attention where it is told to; remembers what it found in the buffers."""

    def __init__(self, rows: slice) -> None:
        self.rows = rows
        self.partial = torch.zeros(3, 2)
        self.found: list[torch.Tensor] = []

    def plan(self, batch: Batch, device: torch.device | str) -> None:
        self.planned = batch

    def run(self, tensors: Tensors) -> None:
        self.found = [tensors.out.clone(), self.partial.clone()]
        out, _ = paged_attention(tensors, self.planned, SPEC, tensors.q.dtype)
        tensors.out[self.rows] = out[self.rows]

    def workspaces(self) -> tuple[torch.Tensor, ...]:
        return (self.partial,)


@pytest.fixture(scope="module")
def checker() -> Checker:
    return Checker(SPEC, BATCH, 16, "cpu")


def test_eager_errs_by_half_of_what_is_tolerated_at_most(checker: Checker) -> None:
    eager, _ = paged_attention(checker.tensors, BATCH, SPEC, torch.bfloat16)
    verdict = checker.judge(eager)
    assert verdict.passed
    assert 0 < verdict.worst_ratio <= 1 / check.EAGER_FACTOR


def test_the_oracle_itself_has_no_error(checker: Checker) -> None:
    assert checker.judge(checker.oracle).worst_ratio == 0


def test_the_ratio_is_the_error_over_the_tolerance_of_the_worst_row(checker: Checker) -> None:
    out = checker.oracle.clone()
    out[13, 2, 5] += 3 * checker.tolerance[13, 2]
    out[3, 1, 0] -= 2 * checker.tolerance[3, 1]
    verdict = checker.judge(out)
    assert verdict.worst_ratio == pytest.approx(3)
    assert "sequence 2 (1 query tokens at 40), row 0, query head 2" in verdict.detail


def test_no_row_is_tolerated_less_than_rounding_it(checker: Checker) -> None:
    norm = checker.oracle.norm(dim=-1)
    assert (checker.tolerance >= check.ROW_FACTOR * torch.finfo(torch.bfloat16).eps * norm * 0.999).all()
    assert checker.judge(checker.oracle.to(torch.bfloat16)).passed


def test_one_nan_fails_and_is_found_even_beside_larger_errors(checker: Checker) -> None:
    out = checker.oracle.clone()
    out[0] += 100
    out[14, 3, 63] = torch.nan
    verdict = checker.judge(out)
    assert math.isnan(verdict.worst_ratio)
    assert not verdict.passed
    assert "sequence 3 (3 query tokens at 7), row 0, query head 3" in verdict.detail


def test_an_infinity_fails(checker: Checker) -> None:
    out = checker.oracle.to(torch.bfloat16)
    out[1, 0, 0] = torch.inf
    assert not checker.judge(out).passed


def test_check_plans_and_fills_all_buffers_with_nan_before_running(checker: Checker) -> None:
    launcher = EagerLauncher(slice(None))
    checker.tensors.out.zero_()
    assert checker.check(launcher).passed
    assert launcher.planned == BATCH
    assert all(bool(buffer.isnan().all()) for buffer in launcher.found)


def test_a_row_that_is_never_written_fails_even_after_a_right_run(checker: Checker) -> None:
    assert checker.check(EagerLauncher(slice(None))).passed
    verdict = checker.check(EagerLauncher(slice(0, 14)))
    assert math.isnan(verdict.worst_ratio)
    assert "sequence 3" in verdict.detail


def test_a_float32_oracle_judges_the_same(checker: Checker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "FLOAT64_FLOPS", 0)
    narrow = Checker(SPEC, BATCH, 16, "cpu")
    assert (checker.oracle_dtype, narrow.oracle_dtype) == (torch.float64, torch.float32)
    torch.testing.assert_close(narrow.oracle.double(), checker.oracle, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(narrow.tolerance.double(), checker.tolerance, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [MIN_SCALE, 1e-4, 1.0, MAX_SCALE])
def test_a_right_result_passes_and_a_lost_key_fails_at_every_scale(dtype: str, scale: float) -> None:
    spec = AttentionSpec(4, 2, 64, dtype, scale=scale)
    checker = Checker(spec, BATCH, 16, "cpu")
    assert bool(checker.tolerance.isfinite().all())
    single, _ = paged_attention(checker.tensors, BATCH, spec, torch.float32)
    assert checker.judge(single).worst_ratio < (0.5 if dtype == "float32" else 0.1)
    # As if the last sequence's first key were not there.
    checker.tensors.k_cache[checker.tensors.block_table[3, 0], 0] = 0
    checker.tensors.v_cache[checker.tensors.block_table[3, 0], 0] = 0
    lost, _ = paged_attention(checker.tensors, BATCH, spec, torch.float32)
    assert checker.judge(lost).worst_ratio > 3


def test_the_oracle_of_a_float32_layer_is_float64_however_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "FLOAT64_FLOPS", 0)
    checker = Checker(AttentionSpec(4, 2, 64, "float32"), BATCH, 16, "cpu")
    assert checker.oracle_dtype == torch.float64
    assert (checker.tolerance < 1e-4 * checker.oracle.norm(dim=-1)).all()


EVERYTHING = AttentionSpec(4, 2, 80, "bfloat16", "float8_e4m3fn", 40, 30.0, True, True, None, 64, True)


@pytest.mark.parametrize("spec", [SPEC, EVERYTHING, AttentionSpec(4, 2, 64, "float32", has_sinks=True)])
def test_the_log_sum_exp_is_judged_where_it_is_given(spec: AttentionSpec) -> None:
    checker = Checker(spec, BATCH, 16, "cpu", tensors=make_tensors(spec, BATCH, 16, "cpu", 0, lse=True))
    out, lse = paged_attention(checker.tensors, BATCH, spec, torch.float32)
    assert checker.judge(out, lse).passed
    wrong = lse.clone()
    wrong[13, 2] += 3 * checker.lse_tolerance[13, 2]
    verdict = checker.judge(out, wrong)
    assert verdict.worst_ratio == pytest.approx(3, rel=0.1)
    assert "row 0, query head 2: its log-sum-exp's error" in verdict.detail
    assert checker.judge(out).passed
    wrong[14, 1] = torch.nan
    assert math.isnan(checker.judge(out, wrong).worst_ratio)
    # A worse output is told first.
    out[3] += 100
    assert "its error" in checker.judge(out, lse).detail


def test_a_launcher_that_writes_no_log_sum_exp_fails_where_it_is_asked_for() -> None:
    checker = Checker(SPEC, BATCH, 16, "cpu", tensors=make_tensors(SPEC, BATCH, 16, "cpu", 0, lse=True))
    assert checker.tensors.lse is not None
    checker.tensors.lse.zero_()
    verdict = checker.check(EagerLauncher(slice(None)))
    assert math.isnan(verdict.worst_ratio)
    assert "log-sum-exp" in verdict.detail


def test_nothing_seen_is_zero_and_an_infinity() -> None:
    spec, batch = AttentionSpec(2, 1, 64, has_tree_mask=True), Batch.parse("1x3@0")
    tensors = make_tensors(spec, batch, 16, "cpu", 0, lse=True)
    words = torch.tensor([0b1, 0b0, 0b111])
    checker = Checker(spec, batch, 16, "cpu", tensors=dataclasses.replace(tensors, tree_mask=words))
    out, lse = checker.oracle.clone(), checker.oracle_lse.clone()
    assert checker.judge(out, lse).worst_ratio == 0
    assert lse[1, 0] == -torch.inf
    lse[1, 0] = -1e30
    assert not checker.judge(out, lse).passed
    out[1] += 1e-3
    assert not checker.judge(out).passed


def test_what_float16_cannot_hold_is_no_error() -> None:
    spec = AttentionSpec(4, 2, 64, "float16", has_sinks=True)
    checker = Checker(spec, BATCH, 16, "cpu")
    assert checker.oracle.norm(dim=-1).min() < torch.finfo(torch.float16).smallest_normal
    assert checker.judge(checker.oracle.half()).passed


def test_sequences_without_query_tokens_are_passed_over() -> None:
    checker = Checker(SPEC, Batch.parse("1x0@30,2x3@20,1x0@0,1x1@9"), 16, "cpu")
    assert checker.judge(checker.oracle).passed
    out = checker.oracle.clone()
    out[6, 1] = torch.nan
    assert "sequence 4 (1 query tokens at 9), row 0, query head 1" in checker.judge(out).detail


def test_seeds_give_different_inputs() -> None:
    first, second = (Checker(SPEC, BATCH, 16, "cpu", seed=seed) for seed in (0, 1))
    assert not torch.equal(first.oracle, second.oracle)
