"""One launch, captured once with the most that it is to serve, serves other batches after planning anew."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import gluon_samples
import pytest
import torch

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.errors import BatchError
from attention_tuner.kernel_templates.gpu import INTERPRETER, Gpu
from attention_tuner.kernel_templates.launch.device import present_gpu
from attention_tuner.kernel_templates.launch.launcher import Launcher, Tensors, make_launcher
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.variant import Value, Variant
from attention_tuner.tuner.measure.check import Checker

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

VALUES: dict[str, Value] = {
    "block_m": 64, "block_n": 32, "decode_block_m": 16, "decode_block_n": 64, "num_warps": 4, "num_stages": 3,
    "kv_load": "pointer", "order": "heads", "programs_per_sm": 2, "waves": 4, "long_weight": 2,
    "schedule": "interleaved", "partials": "float32", "reduction": "kernel",
}  # fmt: skip
PAGE_SIZE = 16


def variant_of(template: str, **changes: Value) -> Variant:
    if template == "gluon_hopper":
        return gluon_samples.variant_of(PAGE_SIZE, waves=4, schedule="interleaved", **changes)
    values = VALUES | changes
    if template != "persistent":
        del values["programs_per_sm"]
    if template == "two_launch":
        values = {"decode_num_warps": 2} | values
        for name in ("long_weight", "schedule", "partials", "reduction"):
            del values[name]
    return Variant.of(template, PAGE_SIZE, values)


class Step:
    """Tensors at fixed addresses with room for every batch, as an engine holds them, and what is right for each."""

    def __init__(self, spec: AttentionSpec, texts: list[str], device: str) -> None:
        self.checkers = [
            # Each seed hands out the pages in another order.
            Checker(spec, Batch.parse(text), PAGE_SIZE, device, seed) for seed, text in enumerate(texts)
        ]
        self.num_seqs = max(checker.batch.num_seqs for checker in self.checkers)
        self.num_tokens = max(checker.batch.num_tokens for checker in self.checkers)
        self.names = [name for name in Tensors.__slots__ if getattr(self.checkers[0].tensors, name) is not None]
        fields = {name: tuple(getattr(c.tensors, name) for c in self.checkers) for name in self.names}
        self.tensors = Tensors(**{name: self._largest(tensors) for name, tensors in fields.items()})

    def _largest(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        shape = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
        return torch.zeros(shape, dtype=tensors[0].dtype, device=tensors[0].device)

    def load(self, checker: Checker) -> None:
        for name in self.names:
            ours, theirs = getattr(self.tensors, name), getattr(checker.tensors, name)
            ours.fill_(torch.nan if ours.is_floating_point() else 0)
            ours[tuple(slice(size) for size in theirs.shape)] = theirs
        self.tensors.out.fill_(torch.nan)

    def serve(self, launcher: Launcher, checker: Checker, launch: Callable[[], object]) -> None:
        """Plan the batch of `checker`, `launch`, and check what comes out."""
        launcher.plan(checker.batch, checker.device)
        self.load(checker)
        for tensor in launcher.workspaces():
            tensor.fill_(torch.nan)
        launch()
        out = self.tensors.out
        found = checker.judge(out[: checker.batch.num_tokens])
        assert found.passed, f"{checker.batch}: {found.detail}"
        assert bool(out[checker.batch.num_tokens :].isnan().all())


def prepared(variant: Variant, spec: AttentionSpec, gpu: Gpu, step: Step) -> Launcher:
    launcher = make_launcher(variant, spec, gpu)
    launcher.reserve(step.num_seqs, step.num_tokens, step.tensors.q.device)
    return launcher


SMALL = ["1x14@40,3x1@70", "1x1@200", "4x1@30", "1x17@0", "2x3@90,1x9@60", "1x14@40,3x1@70"]


@pytest.mark.parametrize(("template", "reduction", "partials"), [
    ("fused", "kernel", "float32"), ("fused", "last_program", "bfloat16"), ("persistent", "kernel", "bfloat16"),
    ("persistent", "last_program", "float32"),
])
def test_one_grid_and_one_set_of_addresses_serve_every_batch(template: str, reduction: str, partials: str):
    spec = AttentionSpec(4, 2, 64)
    step = Step(spec, SMALL, "cpu")
    launcher = prepared(variant_of(template, reduction=reduction, partials=partials), spec, INTERPRETER, step)
    launches: list[Any] = []
    start = launcher.start

    def note(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        places = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments]
        launches.append((kernel, grid, places, constants))
        start(kernel, grid, arguments, constants)

    launcher.start = note
    seen: list[list[Any]] = []
    for checker in step.checkers:
        step.serve(launcher, checker, lambda: launcher.run(step.tensors))
        seen.append(launches.copy())
        launches.clear()
    assert len(seen[0]) == (1 if reduction == "last_program" else 2)
    assert all(each == seen[0] for each in seen)


@pytest.mark.parametrize("template", ["fused", "persistent"])
def test_a_batch_larger_than_what_is_reserved_is_refused(template: str):
    launcher = make_launcher(variant_of(template), AttentionSpec(4, 2, 64), INTERPRETER)
    launcher.reserve(4, 17, "cpu")
    for text, sizes in (("5x1@3", "5 sequences and 5"), ("1x18@3", "1 sequences and 18")):
        with pytest.raises(BatchError, match=f"up to 4 sequences and 17 query tokens, not for {sizes} query tokens"):
            launcher.plan(Batch.parse(text), "cpu")
    launcher.plan(Batch.parse("3x1@3,1x14@100000"), "cpu")


def test_the_grid_is_the_programs_of_all_multiprocessors():
    launcher = make_launcher(variant_of("persistent", programs_per_sm=3), AttentionSpec(4, 2, 64), INTERPRETER)
    grids: list[tuple[int, ...]] = []
    start = launcher.start
    launcher.start = lambda kernel, grid, *rest: (grids.append(grid), start(kernel, grid, *rest))[1]
    assert Checker(AttentionSpec(4, 2, 64), Batch.parse("2x1@100"), PAGE_SIZE, "cpu").check(launcher).passed
    assert grids[0] == (3 * INTERPRETER.num_sms,)


LARGE = [
    "1x512@3000,31x1@2047", "1x1@20000", "32x1@5000", "1x500@0,3x6@700", "2x250@100,7x1@9000,1x8@60", "1x543@30000",
    "1x512@3000,31x1@2047",
]  # fmt: skip


CAPTURED: list[tuple[str, dict[str, Value]]] = [
    ("two_launch", {}),
    *((template, {"reduction": reduction, "partials": partials}) for template in ("fused", "persistent")
      for reduction in ("kernel", "last_program") for partials in ("float32", "bfloat16")),
    *(("gluon_hopper", {"dispatch": dispatch, "partials": partials, "num_stages": 3, "reduction": reduction})
      for dispatch in ("grid", "persistent", "dynamic")
      for reduction, partials in (("kernel", "float32"), ("kernel", "bfloat16"), ("last_program", "float32"))),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("template", "changes"), CAPTURED, ids=str)
def test_one_captured_graph_serves_every_batch(template: str, changes: dict[str, Value]):
    gpu = present_gpu()
    assert gpu is not None
    spec = AttentionSpec(32, 8, 128)
    step = Step(spec, LARGE, "cuda")
    launcher = prepared(variant_of(template, **changes), spec, gpu, step)
    step.serve(launcher, step.checkers[1], lambda: launcher.run(step.tensors))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launcher.run(step.tensors)
    for checker in step.checkers:
        step.serve(launcher, checker, graph.replay)
        # What the last one leaves is ready for the next.
        step.serve(launcher, checker, graph.replay)


@pytest.mark.gpu
@pytest.mark.parametrize(("template", "changes"), CAPTURED, ids=str)
def test_layers_one_after_another_do_not_disturb_one_another(template: str, changes: dict[str, Value]):
    gpu = present_gpu()
    assert gpu is not None
    # The second batch shares the first's lengths, so its plan, and all partial results lie where the first's did.
    batch = Batch.parse("1x512@3000,3x1@20000,5x2@900")
    checkers = [Checker(AttentionSpec(32, 8, 128), batch, PAGE_SIZE, "cuda", seed) for seed in (1, 2)]
    launcher = make_launcher(variant_of(template, **changes), checkers[0].spec, gpu)
    for checker in checkers:
        assert checker.check(launcher).passed
    expected = [checker.tensors.out.clone() for checker in checkers]
    layers = [dataclasses.replace(checker.tensors, out=torch.empty_like(checker.tensors.out))
              for checker in checkers * 30]  # fmt: skip
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            launcher.run(layer)
    for launch in (graph.replay, lambda: [launcher.run(layer) for layer in layers]):
        for layer in layers:
            layer.out.fill_(torch.nan)
        for tensor in launcher.workspaces():
            tensor.fill_(torch.nan)
        launch()
        for index, layer in enumerate(layers):
            assert torch.equal(layer.out, expected[index % 2])


@pytest.mark.gpu
@pytest.mark.parametrize("template", ["fused", "persistent", "gluon_hopper"])
def test_who_is_last_makes_no_difference(template: str):
    gpu = present_gpu()
    assert gpu is not None
    spec, batch = AttentionSpec(32, 8, 128), Batch.parse("1x512@9000,3x1@20000")
    checker = Checker(spec, batch, PAGE_SIZE, "cuda")
    launcher = make_launcher(variant_of(template, reduction="last_program"), spec, gpu)
    assert checker.check(launcher).passed
    expected = checker.tensors.out.clone()
    for _ in range(200):
        checker.tensors.out.fill_(torch.nan)
        launcher.run(checker.tensors)
        assert torch.equal(checker.tensors.out, expected)
