from __future__ import annotations

import json
from dataclasses import replace

import pytest
from cli_samples import SPEC, config

from attention_tuner.kernel_templates.gpu import INTERPRETER
from attention_tuner.kernel_templates.outcome import CaseResult, FullCheck
from attention_tuner.tuner.console.full_check_report import note_full_checks, print_full_checks
from attention_tuner.tuner.full_check.checks import Subject

GOOD = FullCheck(SPEC, config().variant, INTERPRETER.name, config().environment, (
    CaseResult("one [token]", "passed", 0.25), CaseResult("verification", "passed", 0.5),
    CaseResult("long contexts", "not run", reason="it needs a GPU"),
), "2026-12-01T00:00:00+00:00")
BAD = replace(GOOD, variant=config().variant.replace(block_n=64),
              cases=(*GOOD.cases[:1], CaseResult("verification", "failed", None, "row [3]")))

Capture = pytest.CaptureFixture[str]


def test_a_table_says_what_passed_and_a_line_what_failed(capsys: Capture) -> None:
    print_full_checks("a.db", INTERPRETER, [GOOD, BAD], as_json=False)
    out = capsys.readouterr().out
    assert "2 of 2" in out
    assert "1 of 2" in out
    assert "0.5" in out
    assert f"{BAD.variant.key()} failed 'verification': row [3]" in out
    assert "passed, 1 case not run" in " ".join(out.split())
    assert "1 case not run, it needs a GPU: long contexts\n" in out
    assert out.endswith("1 of 2 variants passed, stored in a.db\n")


def test_nothing_to_check_is_said(capsys: Capture) -> None:
    print_full_checks("a.db", INTERPRETER, [], as_json=False)
    assert capsys.readouterr().out == "every best config in a.db that can be checked here has passed\n"


def test_json_holds_every_case(capsys: Capture) -> None:
    print_full_checks("a.db", INTERPRETER, [GOOD, BAD], as_json=True)
    good, bad = json.loads(capsys.readouterr().out)["checks"]
    assert (good["passed"], good["failed_case"], len(good["cases"])) == (True, None, 3)
    assert (bad["passed"], bad["failed_case"]) == (False, "verification")
    assert (good["result"], bad["result"]) == ("passed, 1 case not run", "failed")
    assert bad["cases"][1] == {"name": "verification", "state": "failed", "worst_ratio": None, "reason": "row [3]"}


def test_what_begins_is_noted_on_stderr(capsys: Capture) -> None:
    note_full_checks([Subject(SPEC, GOOD.variant)])
    assert capsys.readouterr().err == f"full check of 1 variant: {SPEC.key()}, pages of 16\n"
