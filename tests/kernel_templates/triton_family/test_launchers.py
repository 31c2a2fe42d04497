"""The launchers of plain Triton: the cuts that they plan and the kernels that they launch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from attention_tuner.kernel_templates.batch import SHORT_QUERY, Batch
from attention_tuner.kernel_templates.gpu import INTERPRETER, TARGETS
from attention_tuner.kernel_templates.launch.launcher import make_launcher
from attention_tuner.kernel_templates.limits import Body
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.triton_family.launchers import FusedLauncher, TwoLaunchLauncher, UnifiedLauncher
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.tuner.measure.check import Checker

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


SPEC = AttentionSpec(4, 2, 64)
VARIANT = Variant.of("two_launch", 16, {
    "block_m": 32, "block_n": 32, "num_warps": 4, "decode_block_m": 16, "decode_block_n": 16, "decode_num_warps": 2,
    "num_stages": 2, "kv_load": "pointer", "order": "items", "waves": 2,
})  # fmt: skip


class Launches:
    """What a launcher launches, as (grid, constants)."""

    def __init__(self, launcher: Any) -> None:
        self.found: list[tuple[tuple[int, ...], dict[str, Any]]] = []
        self._start = launcher.start
        launcher.start = self.note

    def note(self, kernel: Any, grid: tuple[int, ...], arguments: Any, constants: dict[str, Any]) -> None:
        self.found.append((grid, constants))
        self._start(kernel, grid, arguments, constants)

    def parts(self) -> list[str]:
        return [constants["PART"] for _, constants in self.found if "PART" in constants]


@pytest.mark.parametrize("order", ["items", "heads"])
def test_each_kind_is_launched_in_its_own_body_and_merged_once(order: str):
    launcher = make_launcher(VARIANT.replace(order=order), SPEC, INTERPRETER)
    launches = Launches(launcher)
    assert Checker(SPEC, Batch.parse("1x20@100,2x1@150,1x5@3"), 16, "cpu").check(launcher).passed
    (_, long), (_, short), (_, merge) = launches.found
    names = ("PART", "LONG", "SHORT", "num_warps")
    assert [long[name] for name in names] == ["long", Body(32, 32), Body(32, 32), 4]
    assert [short[name] for name in names] == ["short", Body(16, 16), Body(16, 16), 2]
    assert "PART" not in merge


@pytest.mark.parametrize(("text", "part"), [("2x1@150", "short"), ("1x20@100", "long")])
def test_a_batch_of_one_kind_is_one_launch(text: str, part: str):
    launcher = make_launcher(VARIANT, SPEC, INTERPRETER)
    launches = Launches(launcher)
    assert Checker(SPEC, Batch.parse(text), 16, "cpu").check(launcher).passed
    assert launches.parts() == [part]


def test_each_launch_is_balanced_by_itself():
    launcher = make_launcher(VARIANT, SPEC, INTERPRETER)
    assert isinstance(launcher, TwoLaunchLauncher)
    work = launcher.work_list(Batch.parse("1x9@5000,1x1@300"))
    asked = 2 * INTERPRETER.num_sms / SPEC.num_kv_heads
    assert (work.num_long, len(work.items) - work.num_long) == (asked, asked)


def test_reserved_grids_stay_and_serve_batches_of_either_kind():
    launcher = make_launcher(VARIANT, SPEC, INTERPRETER)
    launcher.reserve(4, 40, "cpu")
    launches = Launches(launcher)
    grids = []
    for text in ("1x20@100,2x1@150", "3x1@90", "1x38@20"):
        assert Checker(SPEC, Batch.parse(text), 16, "cpu").check(launcher).passed
        grids.append([grid for grid, _ in launches.found])
        launches.found.clear()
    assert len(grids[0]) == 3
    assert grids[0] == grids[1] == grids[2]


@pytest.mark.parametrize("num_segments", [1, 4, 64])
def test_every_sequence_has_the_same_number_of_segments(num_segments: int):
    values = {"block_m": 16, "block_n": 16, "num_segments": num_segments, "num_warps": 4, "num_stages": 3}
    launcher = UnifiedLauncher(Variant.of("unified", 16, values), AttentionSpec(4, 2, 64), INTERPRETER)
    work = launcher.work_list(Batch.parse("1x1@4095,1x1@1023"))
    assert [int((work.items[:, 6] == seq).sum()) for seq in (0, 1)] == [num_segments] * 2


VALUES = {
    "block_m": 128, "block_n": 64, "decode_block_m": 16, "decode_block_n": 32, "num_warps": 4, "num_stages": 2,
    "kv_load": "pointer", "order": "items", "long_weight": 1,
    "schedule": "long_first", "partials": "float32", "reduction": "kernel",
}  # fmt: skip
BATCH = Batch.parse("1x512@16384,15x1@4000,1x1@60000")


def num_items(waves: int, num_sms: int = 132) -> int:
    gpu = dataclasses.replace(TARGETS["sm_90"], num_sms=num_sms)
    launcher = FusedLauncher(Variant.of("fused", 16, VALUES | {"waves": waves}), AttentionSpec(8, 1, 128), gpu)
    return len(launcher.work_list(BATCH).items)


def test_without_waves_nothing_is_split():
    assert num_items(0) == 32 + 16


@pytest.mark.parametrize("waves", [2, 4])
def test_there_are_about_as_many_items_as_waves_times_multiprocessors(waves: int):
    assert waves * 132 <= num_items(waves) <= waves * 132 + 48


def test_a_larger_gpu_gets_more_items():
    assert num_items(2, 264) == pytest.approx(num_items(4, 132), abs=1)


BALANCED_VALUES = {
    "block_m": 128, "block_n": 64, "decode_block_m": 16, "decode_block_n": 32, "num_warps": 4, "num_stages": 2,
    "kv_load": "pointer", "order": "items", "long_weight": 1, "waves": 4, "schedule": "long_first",
    "partials": "float32", "reduction": "kernel",
}  # fmt: skip
BALANCED_BATCH = Batch.parse("1x512@16384,15x1@4000,1x1@60000")


def launcher(**changes: str) -> FusedLauncher:
    return FusedLauncher(Variant.of("fused", 16, BALANCED_VALUES | changes), AttentionSpec(8, 1, 128), TARGETS["sm_90"])


@pytest.mark.parametrize("partials", ["float32", "bfloat16"])
def test_partial_outputs_have_the_dtype_asked_for_and_their_maxima_and_sums_float32(partials: str):
    made = launcher(partials=partials)
    made.plan(BALANCED_BATCH, "cpu")
    assert [tensor.dtype for tensor in made.workspaces()] == [getattr(torch, partials), torch.float32, torch.float32]


def test_without_a_second_launch_there_are_no_entries():
    assert len(launcher().work_list(BALANCED_BATCH).entries) > 0
    assert len(launcher(reduction="last_program").work_list(BALANCED_BATCH).entries) == 0


def test_the_schedule_is_the_order_of_the_items():
    first, mixed = (launcher(schedule=schedule).work_list(BALANCED_BATCH) for schedule in ("long_first", "interleaved"))
    is_long = [(work.items[:, 2] > SHORT_QUERY * 8).tolist() for work in (first, mixed)]
    assert is_long[0] == sorted(is_long[0], reverse=True) != is_long[1]
