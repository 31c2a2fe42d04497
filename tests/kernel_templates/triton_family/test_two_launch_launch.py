from typing import Any

import pytest

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.gpu import INTERPRETER
from attention_tuner.kernel_templates.launch.launcher import make_launcher
from attention_tuner.kernel_templates.limits import Body
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.triton_family.launchers import TwoLaunchLauncher
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
