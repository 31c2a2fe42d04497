"""The best config of a task: whether the stored one still holds, and when another takes its place."""

from __future__ import annotations

from ..db.records import utc_now
from ..kernel_templates.batch import Shape
from ..kernel_templates.outcome import BestConfig, Verdict
from ..kernel_templates.variant import Variant
from .final import SCREEN, Final
from .search import Search


def stored_best(search: Search, baseline: Variant) -> BestConfig | None:
    """The best config stored for the task, if it holds: it was timed as `baseline` was now, and has not failed."""
    run, task = search.run, search.task
    shape = Shape.of(task.spec, task.batch)
    for config in run.store.best_configs(
        spec=shape.spec, bucket=shape.bucket, page_size=task.page_size, gpu_name=run.gpu.name,
        regime=search.timed[baseline].regime,
    ):  # fmt: skip
        is_same = config.batch == str(task.batch) and config.gpu.num_sms == run.gpu.num_sms
        if (
            is_same
            and config.variant not in search.unfit
            and config.environment == run.executor.environment_of(config.variant.template, run.gpu)
        ):
            return config
    return None


def is_newest(stored: BestConfig, search: Search) -> bool:
    """Whether nothing was tried since `stored` was decided."""
    return not search.result.tried and search.newest <= stored.measured_at


def _stays(stored: BestConfig, search: Search, final: Final, decision: tuple[Variant, Verdict]) -> bool:
    """Whether `stored` is kept: it did not race, so that only what is clearly better by the search's times beats it."""
    variant, verdict = decision
    if final.has_raced(stored.variant):
        return False
    if stored.verdict is Verdict.AMBIGUOUS and verdict is not Verdict.AMBIGUOUS:
        return False
    known = search.timed.get(stored.variant, stored.timing)
    return known.median_ms <= SCREEN * search.timed[variant].median_ms


def keep(search: Search, final: Final) -> BestConfig | None:
    """Store what `final` decided, unless a stored best config stays; the one that is stored then."""
    run, task = search.run, search.task
    if final.decision is None:
        return None
    variant, verdict = final.decision
    stored = stored_best(search, final.baseline)
    if stored is not None and _stays(stored, search, final, final.decision):
        return stored
    best = BestConfig(
        shape=Shape.of(task.spec, task.batch),
        gpu=run.gpu,
        variant=variant,
        timing=final.timings[variant],
        default_timing=final.timings[final.baseline],
        verdict=verdict,
        full_check=False,
        environment=run.executor.environment_of(variant.template, run.gpu),
        batch=str(task.batch),
        measured_at=utc_now(),
    )
    run.store.put_best(best)
    return best
