from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.errors import BatchError
from attention_tuner.kernel_templates.gpu import INTERPRETER, TARGETS
from attention_tuner.kernel_templates.launch.launcher import Launcher, Settings, make_launcher
from attention_tuner.kernel_templates.oracle.inputs import make_tensors
from attention_tuner.kernel_templates.registry import templates
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.triton_family import launchers
from attention_tuner.kernel_templates.variant import Value, Variant
from attention_tuner.tuner.measure.check import Checker

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SPEC = AttentionSpec(4, 2, 64, "float16")
VALUES = {"block_m": 16, "block_n": 16, "num_warps": 4, "num_stages": 2}


def test_partial_results_have_room_for_every_segment():
    launcher = make_launcher(Variant.of("unified", 16, VALUES | {"num_segments": 4}), SPEC, INTERPRETER)
    launcher.plan(Batch.parse("1x1@127"), "cpu")
    out, maxima, sums = launcher.workspaces()
    assert out.shape == (2, 4 * 2, 64)  # heads; four segments of one token of two query heads; head size
    assert maxima.shape == sums.shape == (2, 8)
    assert {tensor.dtype for tensor in (out, maxima, sums)} == {torch.float32}


def test_a_launcher_planned_for_one_batch_serves_another_after_planning_again():
    launcher = make_launcher(Variant.of("unified", 16, VALUES | {"num_segments": 4}), SPEC, INTERPRETER)
    for text in ("1x1@127", "3x2@20,1x12@5"):
        assert Checker(SPEC, Batch.parse(text), 16, "cpu").check(launcher).passed


def test_batches_in_turn_need_new_room_only_at_first():
    launcher = make_launcher(Variant.of("unified", 16, VALUES | {"num_segments": 4}), SPEC, INTERPRETER)
    rooms: list[tuple[int, ...]] = []
    for text in ("40x1@3", "1x1@1000", "40x1@3", "1x1@1000"):
        launcher.plan(Batch.parse(text), "cpu")
        rooms.append(tuple(tensor.data_ptr() for tensor in launcher.workspaces()))
    assert rooms[1] == rooms[2] == rooms[3] != rooms[0]


@pytest.mark.parametrize(("num_items", "grid"), [(65_535, (1, 65_535)), (65_536, (65_536, 1))])
def test_more_items_than_a_grid_has_rows_come_one_after_the_other_instead(num_items: int, grid: tuple[int, int]):
    spec = AttentionSpec(16, 1, 64, "float16")
    launcher = make_launcher(Variant.of("fused", 16, GRID_BY_HEADS | {"waves": 0}), spec, INTERPRETER)
    started: list[tuple[tuple[int, ...], bool]] = []
    launcher.start = lambda kernel, grid, arguments, constants: started.append((grid, constants["HEADS_FIRST"]))
    launcher.plan(Batch.parse(f"1x{num_items}@0"), "cpu")
    launcher.run(Checker(spec, Batch.parse("1x1@5"), 16, "cpu").tensors)
    assert started == [(grid, grid[0] == 1)]


SPLIT = Variant.of("unified", 16, VALUES | {"num_segments": 4})
GRID_BY_HEADS = VALUES | {"decode_block_m": 16, "decode_block_n": 16, "kv_load": "pointer", "order": "heads",
                          "waves": 8, "long_weight": 1,
                          "schedule": "long_first", "partials": "float32", "reduction": "kernel"}  # fmt: skip


@pytest.mark.parametrize("variant", [SPLIT, Variant.of("fused", 16, GRID_BY_HEADS)])
def test_padding_launches_a_power_of_two_and_changes_no_result(variant: Variant):
    checker = Checker(SPEC, Batch.parse("1x12@5,2x1@70"), 16, "cpu")
    outputs: list[torch.Tensor] = []
    programs: list[list[int]] = []
    for padded in (False, True):
        launcher = make_launcher(variant, SPEC, INTERPRETER, Settings(padded=padded))
        grids = launched_grids(launcher)
        assert checker.check(launcher).passed
        outputs.append(checker.tensors.out.clone())
        programs.append([max(grid) for grid in grids])
    assert torch.equal(*outputs)
    exact, rounded_up = programs
    assert len(exact) == 2  # the attention kernel and the reduction
    assert rounded_up == list(map(launcher.capacity, exact)) != exact


def test_a_captured_grid_serves_another_batch_of_its_size():
    launcher = make_launcher(SPLIT, SPEC, INTERPRETER, Settings(padded=True))
    grids = launched_grids(launcher)
    large, small = (Checker(SPEC, Batch.parse(text), 16, "cpu") for text in ("3x1@70", "2x1@50,1x4@3"))
    assert large.check(launcher).passed
    places = [tensor.data_ptr() for tensor in (launcher._work.items, launcher._entries, launcher._work.counts)]  # pyright: ignore
    partial = [tensor.data_ptr() for tensor in launcher.workspaces()]
    assert small.check(launcher).passed
    assert grids[:2] == grids[2:]
    assert places == [t.data_ptr() for t in (launcher._work.items, launcher._entries, launcher._work.counts)]  # pyright: ignore
    assert partial == [tensor.data_ptr() for tensor in launcher.workspaces()]


def launched_grids(launcher: Launcher) -> list[tuple[int, ...]]:
    """The grids of all launches from now on."""
    grids: list[tuple[int, ...]] = []
    start = launcher.start

    def note(kernel: Any, grid: tuple[int, ...], *rest: Any) -> None:
        grids.append(grid)
        start(kernel, grid, *rest)

    launcher.start = note
    return grids


@pytest.mark.parametrize("order", ["items", "heads"])
def test_programs_past_the_list_do_nothing(order: str):
    launcher = make_launcher(Variant.of("fused", 16, GRID_BY_HEADS | {"order": order}), SPEC, INTERPRETER)
    batch = Batch.parse("1x12@5,1x1@70")
    checker = Checker(SPEC, batch, 16, "cpu")
    launcher.plan(batch, "cpu")
    # As a captured graph would: the grid of a longer list over the buffers of this one.
    launcher._num_items += 2  # pyright: ignore
    launcher._num_entries += 1  # pyright: ignore
    checker.tensors.out.fill_(torch.nan)
    launcher.run(checker.tensors)
    assert checker.judge(checker.tensors.out).passed


def launch_key(variant: Variant, batch: str = "1x12@5,2x1@70", padded: bool = False) -> str:
    launcher = make_launcher(variant, SPEC, INTERPRETER, Settings(padded=padded))
    launcher.plan(Batch.parse(batch), "cpu")
    return launcher.launch_key()


def test_launches_of_one_work_list_have_one_key():
    whole, more = SPLIT.replace(num_segments=32), SPLIT.replace(num_segments=64)
    # Both cut every sequence at each of its key tiles.
    assert launch_key(whole) == launch_key(more) == launch_key(whole.replace(num_warps=8))
    assert len({launch_key(whole), launch_key(SPLIT), launch_key(whole, "1x12@5,2x1@71")}) == 3
    assert launch_key(SPLIT) != launch_key(SPLIT, padded=True)


def test_the_key_is_of_what_was_planned_last_and_not_of_what_was_there_before():
    launcher = make_launcher(SPLIT, SPEC, INTERPRETER, Settings(padded=True))
    launcher.plan(Batch.parse("3x1@100"), "cpu")
    before = launcher.launch_key()
    launcher.plan(Batch.parse("2x1@90"), "cpu")
    assert launcher.launch_key() != before
    launcher.plan(Batch.parse("3x1@100"), "cpu")
    assert launcher.launch_key() == before


@pytest.mark.parametrize(("target", "reduction", "overlaps"), [
    ("sm_80", "kernel", False), ("sm_90", "kernel", True), ("sm_90", "last_program", False), ("sm_120", "kernel", True),
])  # fmt: skip
def test_the_reduction_is_launched_early_where_there_is_one_and_the_gpu_can(
    target: str, reduction: str, overlaps: bool
):
    spec = AttentionSpec(4, 2, 64, "float16")
    launcher = make_launcher(Variant.of("fused", 16, GRID_BY_HEADS | {"reduction": reduction}), spec, TARGETS[target])
    found: list[dict[str, Any]] = []
    launcher.start = lambda kernel, grid, arguments, constants: found.append(constants)
    launcher.plan(Batch.parse("1x1@5000"), "cpu")
    launcher.run(Checker(spec, Batch.parse("1x1@5"), 16, "cpu").tensors)
    assert [each["PDL"] for each in found] == [overlaps] * (1 if reduction == "last_program" else 2)
    # Triton's interpreter, and older Tritons, need not know the word.
    assert [each.get("launch_pdl", False) for each in found] == [False, overlaps][: len(found)]


@pytest.mark.parametrize(("text", "rows"), [("1x1@60000", 1), ("32x1@60000", 1), ("33x1@60000", 4), ("1x512@6000", 4)])
def test_a_row_has_a_program_of_its_own_where_all_run_at_once(text: str, rows: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launchers, "INTERPRETED", False)
    monkeypatch.setattr(launchers, "COMBINE_ROWS", 4)
    for padded in (False, True):
        launcher = make_launcher(SPLIT, AttentionSpec(32, 8, 64), TARGETS["sm_90"], Settings(padded=padded))
        found: list[tuple[tuple[int, ...], dict[str, Any]]] = []
        launcher.start = lambda kernel, grid, arguments, constants, found=found: found.append((grid, constants))
        launcher.plan(Batch.parse(text), "cpu")
        launcher.run(Checker(AttentionSpec(32, 8, 64), Batch.parse("1x1@5"), 16, "cpu").tensors)
        _, ((_, _, shares), constants) = found
        assert (constants["ROWS"], shares) == (rows, 4 // rows)


@pytest.mark.parametrize("text", ["1x1@9", "1x1@60000", "64x1@60000"])
def test_compiled_ahead_are_the_reductions_of_all_batches(text: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launchers, "INTERPRETED", False)
    monkeypatch.setattr(launchers, "COMBINE_ROWS", 4)
    launcher = make_launcher(SPLIT, AttentionSpec(32, 8, 64), TARGETS["sm_90"], Settings(compile_only=True))
    found: list[dict[str, Any]] = []
    launcher.start = lambda kernel, grid, arguments, constants: found.append(constants)
    launcher.plan(Batch.parse(text), "cpu")
    launcher.run(Checker(AttentionSpec(32, 8, 64), Batch.parse("1x1@5"), 16, "cpu").tensors)
    assert [(each["ROWS"], each["PARTIALS"]) for each in found[1:]] == [(1, 32), (4, 8)]


def test_the_first_reduction_has_the_other_compiled_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launchers, "INTERPRETED", False)
    monkeypatch.setattr(launchers, "COMBINE_ROWS", 4)
    spec = AttentionSpec(32, 8, 64)
    tensors = Checker(spec, Batch.parse("1x1@5"), 16, "cpu").tensors
    for fixed_split in (None, (1024, 8192)):
        found: list[tuple[int, bool]] = []
        kernel = SimpleNamespace(run=lambda *_, warmup, ROWS, found=found, **others: found.append((ROWS, warmup)))
        monkeypatch.setattr(launchers, "combine_kernel", kernel)
        monkeypatch.setattr(launchers, "attention_kernel", SimpleNamespace(run=lambda *_, **others: None))
        launcher = make_launcher(SPLIT, spec, TARGETS["sm_90"], Settings(fixed_split=fixed_split))
        for text in ("64x1@60000", "1x1@60000"):
            launcher.plan(Batch.parse(text), "cpu")
            launcher.run(tensors)
        assert found == ([(4, False)] * 2 if fixed_split else [(1, True), (4, False), (1, False)])


def test_room_for_a_large_batch_decides_how_many_rows_a_program_merges(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launchers, "INTERPRETED", False)
    monkeypatch.setattr(launchers, "COMBINE_ROWS", 4)
    rows: list[int] = []
    for num_seqs, exact_grid in ((None, False), (1, False), (256, False), (256, True)):
        launcher = make_launcher(SPLIT, AttentionSpec(32, 8, 64), TARGETS["sm_90"], Settings(exact_grid=exact_grid))
        if num_seqs:
            launcher.reserve(num_seqs, num_seqs, "cpu")
        launcher.plan(Batch.parse("1x1@60000"), "cpu")
        rows.append(launcher._rows_of_program())  # pyright: ignore
    assert rows == [1, 1, 4, 1]


def test_the_last_program_of_a_tile_merges_and_which_it_is_makes_no_difference():
    variant = Variant.of("fused", 16, GRID_BY_HEADS | {"block_m": 32, "reduction": "last_program"})
    launcher = make_launcher(variant, SPEC, INTERPRETER)
    batch = Batch.parse("1x20@90,2x1@150")
    checker = Checker(SPEC, batch, 16, "cpu")
    grids = launched_grids(launcher)
    assert checker.check(launcher).passed
    assert len(grids) == 1
    expected = checker.tensors.out.clone()
    # The interpreter runs programs in the order of the grid, so that another order of items has other last ones.
    order = torch.randperm(launcher._num_items, generator=torch.Generator().manual_seed(0))  # pyright: ignore
    for rows in (launcher._work.items, launcher._work.merges):  # pyright: ignore
        rows[: len(order)] = rows[order].clone()
    checker.tensors.out.fill_(torch.nan)
    launcher.run(checker.tensors)
    assert torch.equal(checker.tensors.out, expected)
    assert not launcher._partials.counters.any()  # pyright: ignore


def test_both_reductions_of_short_sequences_give_the_same_bits():
    checker = Checker(SPEC, Batch.parse("3x1@150"), 16, "cpu")
    outputs: list[torch.Tensor] = []
    for reduction in ("kernel", "last_program"):
        launcher = make_launcher(Variant.of("fused", 16, GRID_BY_HEADS | {"reduction": reduction}), SPEC, INTERPRETER)
        assert checker.check(launcher).passed
        outputs.append(checker.tensors.out.clone())
    assert torch.equal(*outputs)


def test_a_reserved_launcher_keeps_its_grid_and_its_addresses_and_says_what_is_too_large():
    launcher = make_launcher(SPLIT, SPEC, INTERPRETER)
    launcher.reserve(3, 20, "cpu")
    grids = launched_grids(launcher)
    places: set[tuple[int, ...]] = set()
    for text in ("3x1@70", "1x20@50", "2x8@9,1x1@300"):
        assert Checker(SPEC, Batch.parse(text), 16, "cpu").check(launcher).passed
        buffers = (launcher._upload.buffer, *launcher.workspaces())  # pyright: ignore
        places.add(tuple(tensor.data_ptr() for tensor in buffers))
    assert len(places) == 1
    assert grids[:2] == grids[2:4] == grids[4:]
    with pytest.raises(BatchError, match="up to 3 sequences and 20 query tokens"):
        launcher.plan(Batch.parse("1x21@0"), "cpu")


@pytest.mark.parametrize(("name", "one", "other"), [
    ("persistent", {"programs_per_sm": 1}, {"programs_per_sm": 2}),
    ("gluon_hopper", {"dispatch": "grid"}, {"dispatch": "persistent"}),
    ("two_launch", {"waves": 1}, {"waves": 2}),
])
def test_launches_of_different_grids_have_different_keys(
    name: str, one: dict[str, Value], other: dict[str, Value]
):
    template, batch, gpu = templates()[name], Batch.parse("1x512@3584,31x1@4095"), TARGETS["sm_90"]
    values = {dimension.name: dimension.choices[0] for dimension in template.dimensions}
    spec = AttentionSpec(32, 8, 128)
    keys: list[str] = []
    for changes in (one, other):
        launcher = make_launcher(Variant.of(name, 16, {**values, "waves": 1, **changes}), spec, gpu)
        launcher.plan(batch, "cpu")
        keys.append(launcher.launch_key())
    assert keys[0] != keys[1]


@pytest.mark.parametrize("template", ["fused", "persistent"])
def test_offsets_of_both_widths_give_the_same_bits(template: str, monkeypatch: pytest.MonkeyPatch):
    names = ("block_m", "block_n", "decode_block_m", "decode_block_n")
    values = {d.name: d.choices[0] for d in templates()[template].dimensions} | dict.fromkeys(names, 32)
    launcher = make_launcher(Variant.of(template, 16, values | {"kv_load": "pointer"}), SPEC, INTERPRETER)
    batch = Batch.parse("1x20@50,2x1@70")
    tensors = make_tensors(SPEC, batch, 16, "cpu", seed=0)
    launcher.plan(batch, "cpu")
    outs: list[torch.Tensor] = []
    for dtype in ("int32", "int64"):
        monkeypatch.setattr(launchers, "offset_dtype", lambda _, dtype=dtype: dtype)
        launcher.run(tensors)
        outs.append(tensors.out.clone())
        tensors.out.zero_()
    assert outs[0].abs().max() > 0
    assert torch.equal(*outs)
