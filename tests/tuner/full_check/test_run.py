"""Launchers that are wrong in ways that only one case sees."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.errors import BatchError
from attention_tuner.kernel_templates.gpu import INTERPRETER, TARGETS, Gpu
from attention_tuner.kernel_templates.launch.launcher import Launcher, Settings, Tensors
from attention_tuner.kernel_templates.oracle.reference import paged_attention
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.tuner.full_check import run as full_check_run
from attention_tuner.tuner.full_check.cases import Case, Way
from attention_tuner.tuner.full_check.run import (
    LAUNCHES,
    RESULT,
    case_bytes,
    make_checker,
    run_case,
    run_sanitized,
    sanitize,
)
from attention_tuner.tuner.measure.check import Checker

SPEC = AttentionSpec(2, 1, 64, "float16")
BATCH = Batch.parse("1x9@20,1x1@40")
VARIANT = Variant.of("unified", 16, {"block_m": 16})


class EagerLauncher(Launcher):
    """Eager attention, spoilt as `fault` says."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.spec, self.variant = SPEC, VARIANT
        self.settings, self.reserved = Settings(), None
        self.runs = 0
        self.batches: list[Batch] = []

    def plan(self, batch: Batch, device: torch.device | str) -> None:
        if self.fault == "refusal":
            raise BatchError("too many items")
        self.batches.append(batch)

    def run(self, tensors: Tensors) -> None:
        self.runs += 1
        out, lse = paged_attention(tensors, self.batches[-1], SPEC, tensors.q.dtype)
        if (self.fault == "grid" and self.settings.padded) or (self.fault == "room" and self.reserved is not None):
            out[3] = 0
        if self.fault == "split" and self.settings.fixed_split is not None:
            out[3] = 0
        if self.fault == "lse again" and self.runs == 2:
            lse[3, 0] += lse[3, 0].abs() * 2**-20
        if self.fault == "again" and self.runs == 2:
            out[3, 0, 0] += out[3, 0, 0].abs() * 2**-10
        if self.fault == "wrong" or (self.fault == "stale" and len(self.batches) > 1):
            out[0] += 1
        if self.fault == "crash":
            raise MemoryError
        if self.fault == "memory":
            raise torch.OutOfMemoryError
        tensors.out.copy_(out)
        if tensors.lse is not None:
            tensors.lse.copy_(lse)

    def workspaces(self) -> tuple[torch.Tensor, ...]:
        return (torch.empty(3),)


def use(monkeypatch: pytest.MonkeyPatch, launcher: Launcher) -> None:
    """Make `run_case` run `launcher`, with the settings that it asks for."""

    def make(variant: Variant, spec: AttentionSpec, gpu: Gpu, settings: Settings) -> Launcher:
        launcher.settings = settings
        return launcher

    monkeypatch.setattr(full_check_run, "make_launcher", make)


def result(monkeypatch: pytest.MonkeyPatch, launcher: Launcher, case: Case) -> tuple[str, str]:
    use(monkeypatch, launcher)
    found = run_case(VARIANT, case, INTERPRETER, make_checker(SPEC, 16, case, "cpu"))
    assert found.name == case.name
    return found.state, found.reason


@pytest.mark.parametrize("way", get_args(Way))
@pytest.mark.parametrize("lse", [False, True])
def test_what_is_right_passes_in_every_way(monkeypatch: pytest.MonkeyPatch, way: Way, lse: bool) -> None:
    assert result(monkeypatch, EagerLauncher(), Case("x", BATCH, way=way, lse=lse)) == ("passed", "")


@pytest.mark.parametrize(("fault", "way"), [
    ("grid", "padded"), ("room", "reserved"), ("again", "twice"), ("lse again", "twice"), ("stale", "after another"),
    ("split", "fixed"),
])
def test_what_is_wrong_in_one_way_fails_that_case_alone(monkeypatch: pytest.MonkeyPatch, fault: str, way: Way) -> None:
    assert result(monkeypatch, EagerLauncher(fault), Case("x", BATCH, lse=True)) == ("passed", "")
    state, reason = result(monkeypatch, EagerLauncher(fault), Case("x", BATCH, way=way, lse=True))
    assert state == "failed"
    assert ("another output" if way == "twice" else "row") in reason


def test_another_batch_is_launched_before(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = EagerLauncher()
    result(monkeypatch, launcher, Case("x", BATCH, way="after another"))
    assert launcher.batches == [Batch.parse("1x1@40,1x9@20,1x9@20"), BATCH]


def test_large_logits_are_in_the_thousands() -> None:
    plain, large = (make_checker(SPEC, 16, Case("x", BATCH, large_logits=large), "cpu") for large in (False, True))
    assert plain is not None
    assert large is not None
    factor = float(large.tensors.q.abs().max() / plain.tensors.q.abs().max())
    assert factor == 512
    assert bool(large.oracle.isfinite().all())
    assert not torch.equal(large.oracle, plain.oracle)


def test_large_logits_of_queries_in_8_bits_are_in_their_scale() -> None:
    spec = AttentionSpec(4, 2, 64, "float16", "float8_e5m2", q_dtype="float8_e4m3fn")
    plain, large = (make_checker(spec, 16, Case("x", BATCH, large_logits=large), "cpu") for large in (False, True))
    assert plain is not None
    assert large is not None
    assert plain.tensors.q_scale is not None
    assert large.tensors.q_scale is not None
    assert torch.equal(large.tensors.q_scale, 512 * plain.tensors.q_scale)
    assert torch.equal(large.tensors.q.float(), plain.tensors.q.float())
    assert bool(large.oracle.isfinite().all())


def test_pages_are_shared() -> None:
    case = Case("x", Batch.parse("2x1@40"), shared_prefix=32)
    checker = make_checker(SPEC, 16, case, "cpu")
    assert checker is not None
    table = checker.tensors.block_table
    assert table[0, :2].equal(table[1, :2])
    assert table[0, 2] != table[1, 2]


def test_partial_results_that_do_not_reach_the_offsets_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("x", BATCH, past="partials")
    assert result(monkeypatch, EagerLauncher(), case) == ("not run", "its partial results have no element past 2^31")


def test_a_large_case_that_memory_does_not_hold_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("x", BATCH, needs_gpu=True)
    assert result(monkeypatch, EagerLauncher("memory"), case)[0] == "not run"
    assert run_case(VARIANT, case, INTERPRETER, None).state == "not run"
    with pytest.raises(torch.OutOfMemoryError):
        result(monkeypatch, EagerLauncher("memory"), Case("x", BATCH))


def test_a_batch_that_is_refused_is_not_run_only_where_it_is_about_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = EagerLauncher("refusal")
    assert result(monkeypatch, launcher, Case("x", BATCH, past="q")) == ("not run", "too many items")
    with pytest.raises(BatchError):
        result(monkeypatch, launcher, Case("x", BATCH, needs_gpu=True))


def test_inputs_that_memory_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> Checker:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(full_check_run, "Checker", full)
    assert make_checker(SPEC, 16, Case("x", BATCH, needs_gpu=True), "cpu") is None
    with pytest.raises(torch.OutOfMemoryError):
        make_checker(SPEC, 16, Case("x", BATCH), "cpu")


def test_the_memory_of_a_case() -> None:
    tokens, keys = BATCH.num_tokens, sum(BATCH.kv_lens)
    assert case_bytes(SPEC, Case("x", BATCH)) == tokens * 2 * 64 * 40 + keys * 2 * 64 * 2 * 3 // 2
    assert case_bytes(SPEC, Case("x", BATCH, past="partials")) > 8 * 2**30


def test_without_the_tool_nothing_is_sanitized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    found = sanitize(SPEC, VARIANT, TARGETS["sm_90"])
    assert (found.state, found.reason) == ("not run", "there is no compute-sanitizer here")


def said_by(monkeypatch: pytest.MonkeyPatch, status: int, stdout: str, stderr: str) -> tuple[str, str]:
    """What is made of a process that ended so."""
    monkeypatch.setattr(shutil, "which", lambda _: "/opt/compute-sanitizer")
    done = SimpleNamespace(returncode=status, stdout=stdout, stderr=stderr)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    found = sanitize(SPEC, VARIANT, TARGETS["sm_90"])
    assert found.name == "compute-sanitizer"
    return found.state, found.reason


@pytest.mark.parametrize(("fault", "expected"), [
    ("", "passed"), ("wrong", "failed"), ("memory", "not run"), ("crash", "failed"),
])
def test_what_the_watched_process_found_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: str, expected: str
) -> None:
    use(monkeypatch, EagerLauncher(fault))
    status = 0
    try:
        run_sanitized(SPEC.key(), VARIANT.key())
    except MemoryError:
        # As of a process that a signal ends: nothing more is written.
        status = -signal.SIGSEGV
    tool = "========= Error: process didn't terminate successfully\n" if status else ""
    tool += "========= ERROR SUMMARY: 0 errors\n"
    state, reason = said_by(monkeypatch, status, tool, capsys.readouterr().err)
    assert state == expected
    told = {"wrong": "sequence 0", "memory": "does not hold it", "crash": "it crashed with status -11: Error: process"}
    assert told.get(fault, "") in reason


PASSED = RESULT + json.dumps({"name": "compute-sanitizer", "state": "passed"}) + "\n"


@pytest.mark.parametrize("result", ["", PASSED])
def test_what_the_tool_found_goes_before_the_result(monkeypatch: pytest.MonkeyPatch, result: str) -> None:
    found = "========= COMPUTE-SANITIZER\n========= Invalid __global__ read of size 2 bytes\n"
    assert said_by(monkeypatch, 9, found, f"{LAUNCHES}\n{result}") == (
        "failed", "Invalid __global__ read of size 2 bytes")


def test_a_crash_after_the_result_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said_by(monkeypatch, -6, "", f"{LAUNCHES}\n{PASSED}") == ("failed", "it crashed with status -6")


def test_a_process_that_is_over_before_it_launches_says_nothing_of_the_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said_by(monkeypatch, 1, "", "") == ("not run", "it ended with status 1")
    attach = "========= Error: Unable to attach\n"
    assert said_by(monkeypatch, -11, attach, "") == ("not run", "it ended with status -11: Error: Unable to attach")
