"""What the kernel counts, replayed on work lists: it cannot be interpreted. What it merges, a GPU's tests check."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from gluon_samples import HOPPER, SPEC, variant_of

from attention_tuner.kernel_templates.batch import SHORT_QUERY, Batch
from attention_tuner.kernel_templates.hopper.launcher import GluonHopperLauncher
from attention_tuner.tuner.measure.check import Checker

HALF_ROWS = 64
MIXED = "1x300@1000,7x1@2047,1x1@9000,3x6@700,1x100@0,1x1@5,1x2@127,1x8@31,1x9@20000"


def launcher_of(text: str, waves: int) -> GluonHopperLauncher:
    launcher = GluonHopperLauncher(variant_of(waves=waves, reduction="last_program"), SPEC, HOPPER)
    launcher.plan(Batch.parse(text), "cpu")
    return launcher


@pytest.mark.parametrize("waves", [0, 1, 4, 8])
def test_the_last_consumer_of_some_rows_is_the_one_after_as_many_as_they_have_partial_results(waves: int):
    work = launcher_of(MIXED, waves).work_list(Batch.parse(MIXED))
    arrived: Counter[int] = Counter()
    expected: dict[int, tuple[int, int, int]] = {}
    written: Counter[int] = Counter()
    for item, (base, num_partials) in zip(work.items.tolist(), work.merges.tolist(), strict=True):
        _, _, num_rows, tile_row, _, _, seq, slot = item
        if slot < 0:
            continue
        is_short = num_rows <= SHORT_QUERY * SPEC.group_size
        stride = min(num_rows - tile_row, HALF_ROWS if is_short else 2 * HALF_ROWS)
        for half in range(2):
            # As `gluon_merge.merge_if_last` has it.
            skip = 0 if is_short else half * HALF_ROWS
            stop = min(stride, skip + HALF_ROWS)
            if skip >= stop:
                continue
            arrived[base + skip] += 1
            assert expected.setdefault(base + skip, (seq, tile_row + skip, num_partials))[1:] == (
                tile_row + skip, num_partials
            )  # fmt: skip
            # As `gluon_attention.write` has it.
            first = slot + half * (min(stride, HALF_ROWS) if is_short else HALF_ROWS)
            written.update(range(first, first + stop - skip))
            assert {first} <= {base + skip + number * stride for number in range(num_partials)}
    assert arrived == {counter: num_partials for counter, (_, _, num_partials) in expected.items()}
    # Each row of the partial results is written once, and none is left out.
    assert set(written.values()) == {1}
    assert len(written) == work.partial_rows


def test_one_launch_merges_and_its_counters_are_zero_beforehand():
    launcher = launcher_of(MIXED, 2)
    found: list[dict[str, Any]] = []
    launcher.start = lambda kernel, grid, arguments, constants: found.append(constants)
    launcher.run(Checker(SPEC, Batch.parse("1x1@5"), 16, "cpu").tensors)
    (constants,) = found
    assert constants["LAST_MERGES"]
    # No kernel follows that waits for this one.
    assert not constants["PDL"]
    _, maxima, _ = launcher.workspaces()
    assert launcher._partials.counters.shape == maxima.shape  # pyright: ignore
    assert not torch.any(launcher._partials.counters)  # pyright: ignore
