from __future__ import annotations

import importlib
import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from cli_samples import BATCH, H100, SPEC, Lines, config, database

from attention_tuner.db import Setting, Store, TrialRecord, export_json, import_json, load_table
from attention_tuner.db.losses import Loss
from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.gpu import INTERPRETER
from attention_tuner.kernel_templates.outcome import (
    BestConfig,
    CaseResult,
    Check,
    Failed,
    FullCheck,
    Regime,
    Timed,
    Wrong,
)

LAYER = ("--spec", SPEC.key())


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Lines:
    return Lines(capsys)


@pytest.fixture
def path(tmp_path: Path) -> str:
    configs = (config(), config(H100), config(batch=Batch.parse("2x1@48")))
    # Keys are cut, so that they may answer for other buckets.
    return database(tmp_path, *(replace(each, variant=each.variant.replace(num_segments=2)) for each in configs))


def documents(lines: Lines, name: str) -> list[dict[str, object]]:
    return json.loads(lines.out)[name]


def test_show_lists_all_configs_or_those_of_a_gpu_or_a_layer(lines: Lines, path: str) -> None:
    assert lines.run("show", "--db", path, "--json") == 0
    assert len(documents(lines, "configs")) == 3
    assert lines.run("show", "--db", path, "--gpu", "nvidia_h100", "--json") == 0
    assert len(documents(lines, "configs")) == 1
    assert lines.run("show", "--db", path, "--model", "llama-3-8b", "--json") == 0
    assert documents(lines, "configs") == []
    assert lines.run("show", "--db", path, *LAYER) == 0
    assert "NVIDIA H100" in lines.out
    assert "0 trials" in lines.out


def test_lookup_answers_from_the_database_for_a_gpu_that_is_not_here(lines: Lines, path: str) -> None:
    assert lines.run("lookup", *LAYER, "--batch", str(BATCH), "--gpu", "NVIDIA H100", "--db", path) == 0
    assert lines.out.splitlines()[0] == config().variant.replace(num_segments=2).key()
    assert "source exact: in your database" in lines.out


def test_lookup_answers_from_what_ships_where_there_is_no_database(
    lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTENTION_TUNER_DB", str(tmp_path / "none.db"))
    # By its full name: the folder's attribute `lookup` is the function.
    monkeypatch.setattr(importlib.import_module("attention_tuner.db.lookup.lookup"), "SHIPPED", tmp_path)
    export_json([config(H100)], tmp_path / "NVIDIA_H100.json")
    asked = ("lookup", *LAYER, "--batch", str(BATCH), "--gpu", "NVIDIA H100")
    assert lines.run(*asked) == 0
    assert "source exact: shipped, tuned on" in lines.out
    assert lines.run(*asked, "--json") == 0
    assert [answer["origin"] for answer in documents(lines, "answers")] == ["shipped"]
    assert not (tmp_path / "none.db").exists()


def test_lookup_says_each_source(lines: Lines, path: str) -> None:
    asked = [str(BATCH), "1x17@32,2x1@40", "1x32@17,2x1@40"]
    options = [word for batch in asked for word in ("--batch", batch)]
    assert lines.run("lookup", *LAYER, *options, "--gpu", "interpreter", "--db", path, "--json") == 0
    assert [answer["source"] for answer in documents(lines, "answers")] == ["exact", "bucket", "neighbour"]
    assert lines.run("lookup", *LAYER, *options, "--page-size", "128", "--gpu", "sm_90", "--db", path, "--json") == 0
    assert {answer["source"] for answer in documents(lines, "answers")} == {"heuristic"}


def test_lookup_of_a_mixed_model_answers_for_each_kind_of_layer(
    lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTENTION_TUNER_DB", str(tmp_path / "none.db"))
    asked = ("--model", "gpt-oss-20b", "--kv-dtype", "float8_e5m2", "--batch", "64x1@9000", "--gpu", "sm_90")
    assert lines.run("lookup", *asked, "--json") == 0
    layer = "num_q_heads=64,num_kv_heads=8,head_dim=64,dtype=bfloat16,kv_dtype=float8_e5m2"
    assert [answer["spec"] for answer in documents(lines, "answers")] == [
        f"{layer},sliding_window=128,has_sinks=True", f"{layer},has_sinks=True"]


def test_lookup_without_a_database_is_answered_by_rule(
    lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTENTION_TUNER_DB", str(tmp_path / "none.db"))
    assert lines.run("lookup", "--model", "llama-3-8b", "--batch", "64x1@16383", "--gpu", "sm_90") == 0
    assert "source heuristic" in lines.out
    assert list(tmp_path.iterdir()) == []


def test_an_export_imports_to_the_same_answers(lines: Lines, path: str, tmp_path: Path) -> None:
    exported, other = str(tmp_path / "out.json"), str(tmp_path / "other.db")
    assert lines.run("export", exported, "--db", path) == 0
    assert "3 configs written" in lines.out
    assert lines.run("import", exported, "--db", other) == 0
    assert "3 configs" in lines.out
    assert load_table(other).id == load_table(path).id


def test_an_export_can_be_of_one_gpu(lines: Lines, path: str, tmp_path: Path) -> None:
    exported = tmp_path / "out.json"
    assert lines.run("export", str(exported), "--gpu", "NVIDIA H100", "--db", path, "--json") == 0
    assert json.loads(lines.out) == {"file": str(exported), "configs": 1, "kept": 0, "provisional": 0, "left_out": 0,
                                     "dropped": []}


def test_an_export_leaves_out_what_is_provisional_unless_it_is_asked_for(lines: Lines, tmp_path: Path) -> None:
    path = database(tmp_path, config(H100), config(H100, Batch.parse("2x1@48"), full_check=False))
    exported = tmp_path / "out.json"
    assert lines.run("export", str(exported), "--db", path) == 0
    assert lines.out == f"1 configs written to {exported}\n"
    assert lines.err.startswith("1 provisional configs")
    assert "--provisional" in lines.err
    assert import_json(exported) == [config(H100)]
    assert lines.run("export", str(exported), "--provisional", "--db", path) == 0
    assert "2 configs written" in lines.out
    assert lines.err == "1 of the configs are provisional: they have passed only the quick check\n"
    (group,) = json.loads(exported.read_text())["groups"]
    assert sorted(each["full_check"] for each in group["configs"]) == [False, True]


def test_an_export_of_nothing_but_provisional_configs_is_refused(lines: Lines, tmp_path: Path) -> None:
    exported = tmp_path / "out.json"
    path = database(tmp_path, config(H100, full_check=False))
    assert lines.run("export", str(exported), "--db", path) == 2
    assert "check --full --best, or add them with --provisional" in lines.err
    assert not exported.exists()


def full_check_of(best: BestConfig, state: str = "passed") -> FullCheck:
    cases = (CaseResult("large logits", state, 0.5, "" if state == "passed" else "row 3 is wrong"),)
    return FullCheck(SPEC, best.variant, best.gpu.name, best.environment, cases, "2026-11-30T00:00:00+00:00")


def test_what_passed_is_exported_whatever_it_was_the_best_for(lines: Lines, tmp_path: Path) -> None:
    quick = [config(H100, batch, full_check=False) for batch in (BATCH, Batch.parse("1x17@32,2x1@40"))]
    assert quick[0].variant == quick[1].variant
    path, exported = database(tmp_path, *quick), tmp_path / "out.json"
    with Store.open(path) as store:
        store.put_full_check(full_check_of(quick[0]))
    assert lines.run("export", str(exported), "--db", path) == 0
    assert set(import_json(exported)) == {replace(each, full_check=True) for each in quick}


def test_what_failed_is_neither_exported_nor_kept_in_an_export(lines: Lines, tmp_path: Path) -> None:
    bad, good = config(H100), config(H100, Batch.parse("2x1@99"))
    good = replace(good, variant=good.variant.replace(block_n=64))
    path, exported = database(tmp_path, bad, good), tmp_path / "out.json"
    export_json([bad], exported)
    with Store.open(path) as store:
        store.put_full_check(full_check_of(bad, "failed"))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert lines.run("export", str(exported), "--merge", "--provisional", "--db", path) == 0
    assert "failed the full check's case 'large logits': row 3 is wrong" in lines.err
    assert import_json(exported) == [good]


def test_an_export_that_grows_keeps_what_it_held_provisionally(lines: Lines, tmp_path: Path) -> None:
    held, stored = config(H100, full_check=False), config(H100, Batch.parse("2x1@99"), full_check=False)
    passed = config(H100, Batch.parse("2x1@48"))
    path, exported = database(tmp_path, stored, passed), tmp_path / "out.json"
    export_json([held], exported)
    assert lines.run("export", str(exported), "--merge", "--db", path, "--json") == 0
    assert json.loads(lines.out) == {"file": str(exported), "configs": 2, "kept": 1, "provisional": 1, "left_out": 1,
                                     "dropped": []}
    assert set(import_json(exported)) == {held, passed}


def test_an_export_can_grow_the_one_that_is_there(lines: Lines, tmp_path: Path) -> None:
    old, better, new = config(H100), config(H100, Batch.parse("2x1@48"), ms=1.0), config(H100, Batch.parse("2x1@99"))
    exported = tmp_path / "out.json"
    path = database(tmp_path, config(H100, Batch.parse("2x1@48")), new)
    assert lines.run("export", str(exported), "--merge", "--db", path) == 0
    assert lines.out == f"2 configs written to {exported}\n"
    gone = replace(config(H100, Batch.parse("2x1@300")), variant=replace(old.variant, template="gone"))
    export_json([old, better, gone], exported)
    assert lines.run("export", str(exported), "--merge", "--db", path) == 0
    assert lines.out == f"3 configs written to {exported}, 2 of them kept from before\n"
    assert "was not kept: it cannot run any more: its template is not installed" in lines.err
    assert "it takes 2 ms, 100.0% more than the 1 ms of the one kept" in lines.err
    assert set(import_json(exported)) == {old, better, new}
    text = exported.read_text()
    assert lines.run("export", str(exported), "--merge", "--db", path, "--json") == 0
    document = json.loads(lines.out)
    (dropped,) = document.pop("dropped")
    assert document == {"file": str(exported), "configs": 3, "kept": 2, "provisional": 0, "left_out": 0}
    assert (dropped["batch"], dropped["kept"]) == ("2x1@48", better.variant.key())
    assert "100.0% more" in dropped["reason"]
    assert exported.read_text() == text


def test_nothing_is_left_of_no_export(lines: Lines, tmp_path: Path) -> None:
    gone = replace(config(H100), variant=replace(config(H100).variant, template="gone"))
    exported = tmp_path / "out.json"
    assert lines.run("export", str(exported), "--merge", "--db", database(tmp_path, gone)) == 2
    assert "can run any more" in lines.err
    assert not exported.exists()


def test_an_export_does_not_grow_what_it_cannot_read(lines: Lines, path: str, tmp_path: Path) -> None:
    exported = tmp_path / "out.json"
    exported.write_text("{}")
    assert lines.run("export", str(exported), "--merge", "--db", path) == 2
    assert "no export of tuned configs" in lines.err
    assert exported.read_text() == "{}"


@pytest.mark.parametrize("options", [(), ("--gpu", "NVIDIA H200")])
def test_there_is_no_export_of_nothing(lines: Lines, tmp_path: Path, options: tuple[str, ...]) -> None:
    path = database(tmp_path, *([config(H100)] if options else []))
    assert lines.run("export", str(tmp_path / "out.json"), "--db", path, *options) == 2
    assert "tune first" in lines.err
    assert not (tmp_path / "out.json").exists()


def test_an_export_cannot_be_written_where_nothing_can(lines: Lines, path: str, tmp_path: Path) -> None:
    assert lines.run("export", str(tmp_path / "no" / "out.json"), "--db", path) == 2
    assert "no/out.json" in lines.err
    assert lines.err.count("\n") == 1


def test_importing_replaces_what_is_stored_for_the_same_shape(lines: Lines, path: str, tmp_path: Path) -> None:
    exported = str(tmp_path / "out.json")
    lines.run("export", exported, "--db", path)
    other = tmp_path / "b"
    other.mkdir()
    stored = database(other, config(ms=7.0))
    assert lines.run("import", exported, "--db", stored) == 0
    with Store.open(stored, create=False) as store:
        assert sorted(best.timing.median_ms for best in store.best_configs()) == [2.0, 2.0, 2.0]


def test_show_counts_why_trials_have_no_time(lines: Lines, path: str) -> None:
    variant = config().variant
    setting = Setting(SPEC, BATCH, 16, INTERPRETER, Regime("interpreter"))
    outcomes = (Failed(variant, "compile", "it [does] not"), Failed(variant, "compile", "it [does] not"),
                Wrong(variant, Check(9.0)), Timed(variant, Check(0.1), config().timing))
    with Store.open(path) as store:
        run_id = store.start_run({})
        for outcome in outcomes:
            store.add_trial(TrialRecord(run_id, setting, config().environment, outcome))
    assert lines.run("show", "--db", path, "--failures", "--json") == 0
    document = json.loads(lines.out)
    assert document["trials"] == {"failed": 2, "wrong": 1, "timed": 1}
    assert document["failures"] == [
        {"outcome": "failed", "stage": "compile", "reason": "it [does] not", "count": 2},
        {"outcome": "wrong", "stage": "", "reason": "wrong result", "count": 1},
    ]
    assert lines.run("show", "--db", path, "--failures") == 0
    assert "it [does] not" in lines.out
    assert "4 trials" in lines.out


def test_importing_a_bad_file_makes_no_database(lines: Lines, path: str, tmp_path: Path) -> None:
    exported, other = tmp_path / "out.json", tmp_path / "folder" / "other.db"
    lines.run("export", str(exported), "--db", path)
    document = json.loads(exported.read_text())
    document["groups"][-1]["configs"][-1]["batch"] = "garbage"
    exported.write_text(json.dumps(document))
    assert lines.run("import", str(exported), "--db", str(other)) == 2
    assert ".batch' cannot be used: cannot read 'garbage'" in lines.err
    assert lines.err.count("\n") == 1
    assert not other.parent.exists()


def test_two_databases_are_merged_and_why_is_said(lines: Lines, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    slow, quick = config(H100, ms=4.0), config(H100, Batch.parse("2x1@48"), ms=1.0, full_check=False)
    mine = database(tmp_path / "a", slow, config(H100, Batch.parse("2x1@48")))
    other = database(tmp_path / "b", config(H100), quick, config(H100, Batch.parse("2x1@99")))
    with Store.open(other) as store:
        store.put_losses("NVIDIA H100", [Loss("NVIDIA H100", "bucket", 0.0, 2, 0.01)])
    assert lines.run("import", other, "--merge", "--db", mine) == 0
    assert lines.out == f"2 configs of {other} stored in {mine}\n"
    assert "it takes 4 ms, 100.0% more than the 2 ms of the one kept" in lines.err
    assert "it has passed the quick check only" in lines.err
    with Store.open(mine, create=False) as store:
        assert sorted((best.batch, best.timing.median_ms) for best in store.best_configs()) == [
            (str(BATCH), 2.0), ("2x1@48", 2.0), ("2x1@99", 2.0)]
        assert [loss.loss for loss in store.losses()] == [0.01]
    assert lines.run("import", other, "--db", mine, "--json") == 0
    assert json.loads(lines.out) == {"database": mine, "configs": 3, "dropped": []}


@pytest.mark.parametrize("form", ["json", "folder"])
def test_every_format_is_imported_to_the_same_answers(lines: Lines, path: str, tmp_path: Path, form: str) -> None:
    exported, other = str(tmp_path / "out"), str(tmp_path / "other.db")
    assert lines.run("export", exported, "--format", form, "--db", path) == 0
    assert lines.run("import", exported, "--db", other) == 0
    assert load_table(other).id == load_table(path).id
    asked = ("lookup", *LAYER, "--batch", str(BATCH), "--gpu", "NVIDIA H100", "--db", str(tmp_path / "none.db"))
    with Store.open(tmp_path / "none.db"):
        pass
    assert lines.run(*asked, "--configs", exported) == 0
    assert "source exact: in a file, tuned on" in lines.out


def test_an_unknown_format_is_refused(lines: Lines, path: str, tmp_path: Path) -> None:
    assert lines.run("export", str(tmp_path / "out"), "--format", "yaml", "--db", path) == 2
    assert "unknown format 'yaml'; accepted are json, folder" in lines.err
    assert not (tmp_path / "out").exists()


def test_a_lookup_can_be_strict_and_borrow_where_it_is_told_to(lines: Lines, path: str) -> None:
    asked = ("lookup", *LAYER, "--batch", "1x32@17,2x1@40", "--db", path)
    assert lines.run(*asked, "--gpu", "NVIDIA H100", "--worst", "bucket") == 1
    assert "nothing is tuned on NVIDIA H100 for bucket" in lines.err
    assert lines.run(*asked, "--gpu", "NVIDIA H100", "--worst", "fastest") == 2
    assert "no source 'fastest'" in lines.err
    assert lines.run(*asked, "--gpu", "sm_90") == 0
    assert "source heuristic" in lines.out
    assert lines.run(*asked, "--gpu", "sm_90", "--like", "NVIDIA H100", "--json") == 0
    assert [(answer["source"], answer["lender"]) for answer in documents(lines, "answers")] == [
        ("neighbour", "NVIDIA H100")]
