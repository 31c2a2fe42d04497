from __future__ import annotations

from typing import Any

import pytest
from attention_samples import SPEC, SPLIT

from attention_tuner.kernel_templates.batch import Batch, BatchBucket, Lengths
from attention_tuner.kernel_templates.errors import VariantError
from attention_tuner.runtime.launchers import Launchers, present_place


def made(choose: Any, limits: tuple[int, int] = (64, 4096), batch_invariant: bool = False) -> Launchers:
    return Launchers(SPEC, 16, limits, present_place(), choose, batch_invariant)


def step(count: int, query_len: int = 1, context_len: int = 90) -> Lengths:
    return Lengths.of([query_len] * count, [context_len] * count)


def test_a_variant_has_one_launcher_with_room_for_all_steps_so_far():
    launchers = made(lambda *_: SPLIT)
    first = launchers.eager(step(3), return_lse=False)
    assert first.reserved == (4, 4)
    for count, query_len, reserved in ((4, 1, (4, 4)), (2, 9, (4, 32)), (64, 1, (64, 64)), (50, 60, (64, 4096))):
        launcher = launchers.eager(step(count, query_len), return_lse=False)
        assert launcher.reserved == reserved
        assert launcher.workspace is launchers.workspace
        assert launcher.exact_grid


def test_launchers_that_hold_an_outgrown_workspace_are_made_anew():
    launchers = made(lambda _, bucket, *__: SPLIT if bucket.long_rows else SPLIT.replace(block_m=32))
    small = launchers.eager(step(1, 20), return_lse=False)
    assert launchers.eager(step(1, 20), return_lse=False) is small
    launchers.eager(step(64), return_lse=False)
    assert launchers.workspace.generation == 2
    again = launchers.eager(step(1, 20), return_lse=False)
    assert again is not small
    assert again.workspaces()[0].data_ptr() != small.workspaces()[0].data_ptr()


def test_a_graph_has_a_launcher_of_its_own_with_room_for_its_largest_step():
    launchers = made(lambda *_: SPLIT)
    graph = launchers.for_graph(step(3, 2), return_lse=False)
    assert graph.reserved == (3, 6)
    assert not graph.exact_grid
    assert graph is not launchers.for_graph(step(3, 2), return_lse=False)
    assert graph is not launchers.eager(step(3, 2), return_lse=False)


@pytest.mark.parametrize(("limits", "usual"), [
    ((64, 4096), "1x512@8192,63x1@8192"), ((2, 100), "1x99@8192,1x1@8192"), ((9, 9), "9x1@8192"), ((64, 3), "3x1@8192"),
])  # fmt: skip
def test_batch_invariant_launchers_are_chosen_for_one_usual_batch(limits: tuple[int, int], usual: str):
    asked: list[BatchBucket] = []
    launchers = made(lambda _, bucket, *__: asked.append(bucket) or SPLIT, limits, batch_invariant=True)
    for count in (1, 2):
        assert launchers.eager(step(count), return_lse=False).fixed_split is not None
    assert asked == [BatchBucket.of(Batch.parse(usual))] * 2


def test_a_variant_that_cannot_run_is_refused_by_name():
    with pytest.raises(VariantError, match="cannot run on Triton interpreter: a value is not among"):
        made(lambda *_: SPLIT.replace(block_m=24)).eager(step(1), return_lse=False)
