"""The bench beside peers, with made-up peers in Triton's interpreter: what is run, recorded, resumed and blamed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attention_tuner.db.records import Setting, TrialRecord
from attention_tuner.db.store import Store
from attention_tuner.kernel_templates.gpu import INTERPRETER, TARGETS
from attention_tuner.kernel_templates.heuristic import default_variant
from attention_tuner.kernel_templates.launch.launcher import Tensors
from attention_tuner.kernel_templates.oracle.reference import paged_attention
from attention_tuner.kernel_templates.outcome import Check, Failed, Regime, Timed, Timing
from attention_tuner.kernel_templates.registry import template_of, templates
from attention_tuner.kernel_templates.sources import environment
from attention_tuner.kernel_templates.task import Task

FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(FOLDER))

import peers  # noqa: E402
from peerbench import ours, registry  # noqa: E402
from peerbench import race as racing  # noqa: E402
from peerbench.contender import Contender, Loaded, MissingError, Peer, Places, RefusedError  # noqa: E402
from peerbench.ours import Configs  # noqa: E402
from peerbench.rates import rates_of  # noqa: E402
from peerbench.workloads import workloads  # noqa: E402

BATCH = "1x4@44"
CELL = f"{BATCH} page 16"


class Eager(Contender):
    """Right, and slow: eager attention. Counts its launches."""

    launches = 0

    def run(self, tensors: Tensors) -> Any:
        type(self).launches += 1
        assert not tensors.k_cache.isnan().any(), "a peer may read what holds no key"
        return paged_attention(tensors, self.batch, self.spec, tensors.q.dtype)[0]

    def output(self, tensors: Tensors, returned: Any) -> torch.Tensor:
        return returned


class Lazy(Contender):
    """Writes its output in the first launch only."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._has_run = False

    def run(self, tensors: Tensors) -> Any:
        if not self._has_run:
            tensors.out.copy_(paged_attention(tensors, self.batch, self.spec, tensors.q.dtype)[0])
        self._has_run = True


class Broken(Contender):
    def run(self, tensors: Tensors) -> Any:
        raise ValueError("no kernel for this shape")


class Choosy(Contender):
    def __init__(self, task: Task) -> None:
        super().__init__(task)
        raise RefusedError("not this batch")

    def run(self, tensors: Tensors) -> Any:
        raise AssertionError


def peer(name: str, make: Callable[[Task], Contender]) -> Peer:
    return Peer(name, "what it is given", lambda places: Loaded(make, "1.0"))


def absent(places: Places) -> Loaded:
    raise MissingError("it is not installed")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs the script over one small batch with these peers, and returns what it wrote."""
    def go(*known: Peer, more: tuple[str, ...] = ()) -> dict[str, Any]:
        monkeypatch.setattr(registry, "PEERS", known)
        out = tmp_path / "out.json"
        monkeypatch.setenv("ATTENTION_TUNER_DB", str(tmp_path / "none.db"))
        peers.main(peers.parse(["--out", str(out), "--interpreter", "--pages", "16", "--batches", BATCH, "--samples",
                                "3", *more]))  # fmt: skip
        return json.loads(out.read_text())

    Eager.launches = 0
    return go


def entries(document: dict[str, Any], cell: str = CELL) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in document["cells"][cell]["entries"]}


def test_every_contender_has_an_entry_with_its_reason(
    run: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    document = run(peer("eager", Eager), peer("lazy", Lazy), peer("broken", Broken), peer("choosy", Choosy),
                   Peer("absent", "", absent))  # fmt: skip
    found = entries(document)
    assert {name: entry["state"] for name, entry in found.items()} == {
        "ours:fused": "timed", "eager": "timed", "lazy": "wrong", "broken": "failed", "choosy": "refused"}
    assert len(found["eager"]["samples_ms"]) == len(found["ours:fused"]["samples_ms"]) == 3
    assert (found["ours:fused"]["source"], found["ours:fused"]["is_plain"]) == ("heuristic", True)
    assert 0 < found["eager"]["worst_ratio"] <= 1
    assert found["lazy"]["worst_ratio"] is None
    assert found["broken"]["reason"] == "ValueError: no kernel for this shape"
    assert found["choosy"]["reason"] == "not this batch"
    assert document["peers"]["absent"] == {"given": "", "version": None, "missing": "it is not installed"}
    assert document["peers"]["eager"]["version"] == "1.0"
    assert document["runs"][0]["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    standing = document["cells"][CELL]["standing"]
    assert standing["best_peer"] == "eager"
    shown = capsys.readouterr().out
    assert "missing: absent: it is not installed" in shown
    assert "failed: broken on 1x4@44 page 16: ValueError: no kernel for this shape" in shown


def test_measured_contenders_are_not_run_again(run: Callable[..., dict[str, Any]]) -> None:
    first = run(peer("eager", Eager))
    launches = Eager.launches
    again = run(peer("eager", Eager))
    assert Eager.launches == launches
    assert again["cells"] == first["cells"]
    assert len(again["runs"]) == 2


def test_a_peer_that_went_missing_keeps_its_times(run: Callable[..., dict[str, Any]]) -> None:
    run(peer("eager", Eager))
    document = run(Peer("eager", "", absent), Peer("absent", "", absent))
    assert document["peers"]["eager"]["version"] == "1.0"
    assert document["peers"]["absent"]["missing"] == "it is not installed"
    assert entries(document)["eager"]["state"] == "timed"


def test_a_new_peer_races_against_ours_alone(run: Callable[..., dict[str, Any]]) -> None:
    run(peer("eager", Eager))
    launches = Eager.launches
    document = run(peer("eager", Eager), peer("other", lambda task: type("Other", (Eager,), {})(task)))
    assert Eager.launches == launches
    known = document["cells"][CELL]["entries"]
    assert [(entry["name"], entry["run"]) for entry in known] == [
        ("ours:fused", 1), ("eager", 1), ("ours:fused", 2), ("other", 2)]


def test_again_measures_anew(run: Callable[..., dict[str, Any]]) -> None:
    run(peer("eager", Eager))
    launches = Eager.launches
    document = run(peer("eager", Eager), more=("--again",))
    assert Eager.launches == 2 * launches
    assert len(document["runs"]) == 1


def test_a_much_slower_peer_is_launched_once(
    run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(racing, "MUCH_SLOWER", 1e-6)
    document = run(peer("eager", Eager))
    assert Eager.launches == 2
    found = entries(document)["eager"]
    assert (found["state"], found["samples_ms"]) == ("slow", [])
    assert found["first_ms"] > 0


def test_a_process_that_dies_names_the_peer_to_blame(
    run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    marker = tmp_path / ".out.json.at"
    seen: list[dict[str, Any]] = []

    class Deadly(Contender):
        def run(self, tensors: Tensors) -> Any:
            seen.append(json.loads(marker.read_text()))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(peer("deadly", Deadly))
    assert seen == [{"cell": CELL, "name": "deadly", "run": 1}]
    # One that ends in order takes the word back; a dead one does not.
    assert not marker.exists()
    marker.write_text(json.dumps(seen[0]))
    found = entries(run(peer("deadly", Deadly)))
    assert (found["deadly"]["state"], found["deadly"]["run"]) == ("failed", 1)
    assert found["ours:fused"]["state"] == "timed"


def test_a_lost_gpu_ends_the_run_and_the_next_goes_on(
    run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[str] = []

    class Killer(Contender):
        def run(self, tensors: Tensors) -> Any:
            lost.append("killer")
            raise RuntimeError("an illegal memory access was encountered")

    def synchronize(self: racing.Race) -> None:
        if lost:
            raise RuntimeError("the context is lost")

    monkeypatch.setattr(racing.Race, "_synchronize", synchronize)
    with pytest.raises(SystemExit, match="killer lost the GPU"):
        run(peer("killer", Killer), peer("eager", Eager))
    lost.clear()
    found = entries(run(peer("killer", Killer), peer("eager", Eager)))
    assert found["killer"]["reason"] == "RuntimeError: an illegal memory access was encountered"
    assert found["eager"]["state"] == "timed"


def test_peers_and_batches_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "PEERS", (peer("a", Eager), peer("b", Eager)))
    parse = peers.parse
    assert [each.name for each in peers.wanted_peers(parse(["--out", "x", "--skip", "a"]))] == ["b"]
    assert [each.name for each in peers.wanted_peers(parse(["--out", "x", "--only", "a"]))] == ["a"]
    with pytest.raises(SystemExit, match="no peer 'c'"):
        peers.wanted_peers(parse(["--out", "x", "--only", "c"]))
    with pytest.raises(SystemExit, match="no batch 'c'"):
        peers.wanted_workloads(parse(["--out", "x", "--batches", "c"]))
    with pytest.raises(SystemExit):
        parse(["--out", "x", "--from", "y"])


def test_the_floor_of_a_known_gpu_comes_from_its_rates() -> None:
    h200 = TARGETS["sm_90"].__class__("NVIDIA H200", (9, 0), 132, 227 << 10, 50 << 20)
    rates, origin = rates_of(h200, None)
    assert (rates.read_tb_per_s, rates.matmul_tflops, origin) == (4.5, 790.0, "the highest seen on this GPU")
    cell = peers.new_cell(next(w for w in workloads() if w.name == "hybrid_512@16k_63dec_tp8"), 16, rates)
    assert cell.read_bytes == 616219648
    assert cell.floor_ms == pytest.approx(0.1369, abs=1e-4)
    assert rates_of(h200, (1.0, 2.0))[1] == "given"


def test_candidates_are_valid_and_one_is_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTENTION_TUNER_DB", str(tmp_path / "none.db"))
    workload = workloads(interpreter=True)[0]
    found = Configs().candidates(Task(workload.spec, workload.batch, 16), INTERPRETER)
    assert found
    assert any(candidate.is_plain for candidate in found)
    assert len({candidate.variant.template for candidate in found}) == len(found)


def test_trials_are_candidates_and_a_guess_stands_in_for_plain_triton(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = workloads(interpreter=True)[0]
    task, graph = Task(workload.spec, workload.batch, 16), Regime("graph")
    slow = default_variant(task.spec, task.batch, 16)
    fast, broken = slow.replace(num_warps=8), slow.replace(num_warps=2)
    path = str(tmp_path / "tuner.db")
    with Store.open(path) as store:
        number = store.start_run({})
        outcomes = [Timed(slow, Check(0.5), Timing((2.0,), graph)), Timed(fast, Check(0.5), Timing((1.0,), graph)),
                    Failed(broken, "time", "no")]  # fmt: skip
        setting = Setting(task.spec, task.batch, 16, INTERPRETER, graph)
        for outcome in outcomes:
            store.add_trial(TrialRecord(number, setting, environment("unified", INTERPRETER), outcome))
    found = {each.variant.template: each for each in Configs([path]).candidates(task, INTERPRETER)}
    assert (found["unified"].variant, found["unified"].source) == (fast, "trial")
    assert list(found) == ["unified"]
    # Were it not plain Triton, something that is would have to race beside it.
    special = replace(templates()["unified"], is_portable=False)
    monkeypatch.setattr(ours, "template_of", lambda v: special if v.template == "unified" else template_of(v))
    found = {each.variant.template: each for each in Configs([path]).candidates(task, INTERPRETER)}
    assert found["unified"].source == "trial"
    assert [each.source for each in found.values() if each.is_plain] == ["heuristic"]
