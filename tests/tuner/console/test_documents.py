from __future__ import annotations

import json
import math
from collections import Counter

from cli_samples import BATCH, H100, SPEC, config

from attention_tuner.db import ConfigTable
from attention_tuner.kernel_templates.batch import Batch, BatchBucket
from attention_tuner.kernel_templates.heuristic import default_variant
from attention_tuner.kernel_templates.outcome import Check, Failed, Regime, Skipped, Timed, Timing, Wrong
from attention_tuner.kernel_templates.task import Task
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.search_spaces.space import survey
from attention_tuner.tuner.console import documents
from attention_tuner.tuner.settings import TaskResult

VARIANT = default_variant(SPEC, BATCH, 16)
TASK = Task(SPEC, BATCH, 16)


def as_json(document: documents.Document) -> documents.Document:
    """`document` as a strict reader of JSON sees it."""
    return json.loads(json.dumps(document, allow_nan=False))


def test_a_config_holds_its_gpu_and_environment() -> None:
    document = as_json(documents.config_document(config(H100)))
    assert document["gpu"]["name"] == H100.name
    assert document["environment"]["triton"] == "3.9.0"
    assert Variant.parse(document["variant"]["key"]) == VARIANT
    assert document["speedup"] == 2


def test_an_answer_says_its_source_and_the_config_it_is_from() -> None:
    stored = config(H100)
    table = ConfigTable.of([stored])
    document = as_json(documents.answer_document(SPEC, BATCH, table.lookup(SPEC, BATCH, 16, H100)))
    assert document["source"] == "exact"
    assert document["distance"] == 0
    assert document["origin"] == "database"
    assert document["config"]["batch"] == str(BATCH)
    assert Variant.parse(document["variant"]).as_dict() == document["values"]
    other = as_json(documents.answer_document(SPEC, BATCH, ConfigTable.of([]).lookup(SPEC, BATCH, 16, H100)))
    assert other["source"] == "heuristic"
    assert other["config"] is None
    assert other["origin"] is None


def test_every_outcome_has_a_document() -> None:
    timing = Timing((1.0, 2.0, 4.0), Regime("graph"), 0.5)
    timed = as_json(documents.outcome_document(Timed(VARIANT, Check(0.5), timing)))
    assert (timed["outcome"], timed["time"]["median_ms"], timed["time"]["regime"]["capture"]) == ("timed", 2.0, "graph")
    assert timed["time"]["quartiles_ms"] == [1.5, 3.0]
    wrong = as_json(documents.outcome_document(Wrong(VARIANT, Check(math.nan, detail="row 3"))))
    assert wrong["outcome"] == "wrong"
    assert wrong["check"] == {"worst_ratio": None, "level": "quick", "detail": "row 3"}
    failed = as_json(documents.outcome_document(Failed(VARIANT, "compile", "it does not")))
    assert (failed["outcome"], failed["stage"], failed["reason"]) == ("failed", "compile", "it does not")
    assert as_json(documents.outcome_document(Skipped(VARIANT, "no time")))["reason"] == "no time"


def test_an_infinite_error_is_null_too() -> None:
    assert documents.finite({"worst_ratio": math.inf, "level": "quick"}) == {"worst_ratio": None, "level": "quick"}


def test_a_survey_counts_what_it_leaves_out() -> None:
    found = survey(SPEC, BatchBucket.of(BATCH), 16, H100)
    document = as_json(documents.survey_document(TASK, found, 2))
    assert document["valid"] == len(found.valid) == sum(document["valid_by_template"].values())
    assert document["variants"] == [variant.key() for variant in found.valid[:2]]
    assert sum(document["rejected"].values()) == found.rejected.total() > 0
    assert Batch.parse(document["batch"]) == BATCH


def test_failures_are_listed_with_the_most_frequent_first() -> None:
    reasons = Counter({("failed", "time", "hung"): 1, ("wrong", "", "wrong result"): 3})
    assert documents.failures_document(reasons)[0] == {
        "outcome": "wrong", "stage": "", "reason": "wrong result", "count": 3}


def test_a_result_has_its_shares_and_its_failures_in_groups() -> None:
    reasons = Counter({("failed", "compile", f"Required: {size}"): 1 for size in (131072, 262144)})
    result = TaskResult(TASK, reasons=reasons, tried=8, repeated=3, seconds=4.0, measuring_seconds=3.0,
                        compiling_seconds=1.0)
    document = as_json(documents.result_document(result, None))
    assert (document["measuring_share"], document["compiling_share"]) == (0.75, 0.25)
    assert (document["measured_per_second"], document["repeated"]) == (2.0, 3)
    assert [(each["reason"], each["count"]) for each in document["failures"]] == [("Required: N", 2)]
    idle = as_json(documents.result_document(TaskResult(TASK), None))
    assert (idle["measuring_share"], idle["measured_per_second"]) == (None, 0)
