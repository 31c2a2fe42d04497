"""What `--json` prints: records as objects that JSON can hold."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ...db.answer import Answer
from ...db.lookup.export import config_to_json
from ...db.lookup.merge import Choice
from ...kernel_templates.batch import Batch
from ...kernel_templates.outcome import BestConfig, Failed, FullCheck, Outcome, Skipped, Timed, Timing, Wrong
from ...kernel_templates.spec import AttentionSpec
from ...kernel_templates.task import Task
from ...search_spaces.space import Survey
from ..costs import Forecast
from ..measure.rates import Rates, floor_ms
from ..settings import TaskResult
from .text import full_check_result, grouped

Document = dict[str, Any]


def config_document(config: BestConfig) -> Document:
    """A best config as exports hold it, with its GPU and environment."""
    return {**config_to_json(config), "gpu": asdict(config.gpu), "environment": asdict(config.environment)}


def answer_document(spec: AttentionSpec, batch: Batch, answer: Answer) -> Document:
    """A lookup's answer: the variant's key and values, where it comes from, and the config that it is taken from."""
    return {
        "spec": spec.key(),
        "batch": str(batch),
        "page_size": answer.variant.page_size,
        "variant": answer.variant.key(),
        "template": answer.variant.template,
        "values": answer.variant.as_dict(),
        "source": answer.source,
        "stale": answer.stale,
        "distance": answer.distance,
        "origin": answer.origin,
        "loss": answer.loss,
        "lender": answer.lender,
        "config": answer.config and config_document(answer.config),
    }


def choices_document(choices: Sequence[Choice]) -> Document:
    """What a merge did not keep, under "dropped", each with what was kept in its place and why."""
    return {"dropped": [
        {
            "spec": choice.dropped.shape.spec.key(),
            "batch": choice.dropped.batch,
            "page_size": choice.dropped.variant.page_size,
            "gpu": choice.dropped.gpu.name,
            "variant": choice.dropped.variant.key(),
            "kept": choice.kept and choice.kept.variant.key(),
            "reason": choice.reason,
        }
        for choice in choices
    ]}


def outcome_document(outcome: Outcome) -> Document:
    """What came of a variant: `outcome` is timed, wrong, failed or skipped, beside what that one has."""
    document: Document = {"variant": outcome.variant.key(), "outcome": type(outcome).__name__.lower()}
    match outcome:
        case Timed(_, check, timing):
            return document | {"check": asdict(check), "time": timing_document(timing)}
        case Wrong(_, check):
            return document | {"check": finite(asdict(check))}
        case Failed(_, stage, reason):
            return document | {"stage": stage, "reason": reason}
        case Skipped(_, reason):
            return document | {"reason": reason}


def full_check_document(check: FullCheck) -> Document:
    """A full check: whether what was run passed, the first case that failed, and what came of every case."""
    return {
        "spec": check.spec.key(),
        "page_size": check.variant.page_size,
        "variant": check.variant.key(),
        "passed": check.passed,
        "result": full_check_result(check),
        "failed_case": check.failure and check.failure.name,
        "environment": asdict(check.environment),
        "cases": [asdict(case) for case in check.cases],
    }


def survey_document(task: Task, found: Survey, limit: int | None = None) -> Document:
    """The valid variants of a shape, at most `limit` of them, with counts by template and by reason of rejection."""
    return {
        **task_document(task),
        "valid": len(found.valid),
        "valid_by_template": dict(Counter(variant.template for variant in found.valid)),
        "rejected": dict(found.rejected),
        "variants": [variant.key() for variant in found.valid[:limit]],
    }


def forecast_document(each: Forecast) -> Document:
    """What tuning one task would take."""
    return {
        **task_document(each.task),
        "valid": len(each.survey.valid),
        "valid_by_template": dict(each.valid_by_template),
        "rejected": dict(each.survey.rejected),
        "trials": len(each.trials),
        "compiles": len(each.compiles),
        "seconds": each.seconds,
    }


def result_document(result: TaskResult, rates: Rates | None) -> Document:
    """What came of one task: its best config, and the share of the physical floor where the rates are known."""
    best = result.best
    return {
        **task_document(result.task),
        "best": best and config_document(best),
        "baseline": result.baseline and result.baseline.key(),
        "floor_share": floor_share(result, rates),
        "outcomes": dict(result.outcomes),
        "failures": failures_document(grouped(result.reasons)),
        "outdated": dict(result.outdated),
        "tried": result.tried,
        "reused": result.reused,
        "repeated": result.repeated,
        "seconds": result.seconds,
        "measuring_seconds": result.measuring_seconds,
        "compiling_seconds": result.compiling_seconds,
        "measuring_share": share(result.measuring_seconds, result.seconds),
        "compiling_share": share(result.compiling_seconds, result.seconds),
        "measured_per_second": result.measured_per_second,
        "discarded_blocks": result.discarded_blocks,
        "compiles": result.compiles,
        "shared_compiles": result.shared,
        "crossed": result.crossed,
        "cross_seconds": result.cross_seconds,
    }


def floor_share(result: TaskResult, rates: Rates | None) -> float | None:
    """The physical floor over the best variant's time, None where it is not known.

    It is of rates that a plain sum and a plain matrix product reached, so that the best kernels are a little above 1.
    """
    if result.best is None or rates is None:
        return None
    return floor_ms(result.task.spec, result.task.batch, rates) / result.best.timing.median_ms


def share(seconds: float, wall_seconds: float) -> float | None:
    """The part of `wall_seconds` that `seconds` are; None of no time at all."""
    return seconds / wall_seconds if wall_seconds else None


def failures_document(reasons: Counter[tuple[str, str, str]]) -> list[Document]:
    """Why trials have no time: outcome, stage, reason and count, the most frequent first."""
    names = ("outcome", "stage", "reason", "count")
    return [dict(zip(names, (*kind, count), strict=True)) for kind, count in reasons.most_common()]


def task_document(task: Task) -> Document:
    """What is tuned, as texts that the commands read."""
    return {"spec": task.spec.key(), "batch": str(task.batch), "page_size": task.page_size}


def timing_document(timing: Timing) -> Document:
    """A timing's samples, median and quartiles in milliseconds, and its regime."""
    return {
        "median_ms": timing.median_ms,
        "quartiles_ms": list(timing.quartiles_ms),
        "samples_ms": list(timing.samples_ms),
        "plan_ms": timing.plan_ms,
        "regime": asdict(timing.regime),
    }


def finite(document: Document) -> Document:
    """`document` with null in the place of the infinite and of NaN, which JSON does not have."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in document.items()
    }
