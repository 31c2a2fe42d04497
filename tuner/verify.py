"""Verification of stored winners after a driver, Triton or a kernel has changed, and tuning anew those that moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..db.records import EnvironmentOf, utc_now
from ..db.store import Store
from ..kernel_templates.batch import Batch
from ..kernel_templates.gpu import Gpu
from ..kernel_templates.outcome import BestConfig, Timing, Verdict
from ..kernel_templates.registry import why_invalid
from ..kernel_templates.task import Task
from ..kernel_templates.variant import Variant
from .final import CLEAR_RATIO, STAGES, Final
from .leads import rivals
from .measure.race import ALPHA, TIE, compare, num_comparisons
from .run import Executor, Run
from .search import Search, search_only
from .settings import Listener, Settings
from .tune import tune

# Variants that a winner is raced with, itself and the default among them; the interpreter takes seconds for each.
ENTRANTS = 8
INTERPRETED_ENTRANTS = 3
# A winner whose time has changed by more than this has moved, even if nothing beats it: for most variants, windows of
# measurement differ by less.
CHANGED = 0.05

HELD, CHANGED_TIME, BEATEN, LOST, UNDECIDED = "held", "changed", "beaten", "lost", "undecided"
"""States of a winner: it still wins and takes as long as before; it takes another time; another is faster beyond noise;
it cannot run or is wrong; or there was no time to decide, or the GPU was not steady."""

MOVED = (CHANGED_TIME, BEATEN, LOST)


@dataclass(slots=True)
class Verified:
    """Result of verifying one config."""

    config: BestConfig
    state: str = UNDECIDED
    timing: Timing | None = None  # new time of the winner, where known
    fastest: Variant | None = None  # fastest variant of the race
    fastest_ms: float | None = None  # its median time
    fresh: BestConfig | None = None  # config stored in its place because it held
    retuned: BestConfig | None = None  # config that a search has found since

    @property
    def task(self) -> Task:
        """Task that the config was tuned for."""
        return Task(self.config.shape.spec, Batch.parse(self.config.batch), self.config.variant.page_size)

    @property
    def ratio(self) -> float | None:
        """New time over the one stored before; None if it is not known."""
        return None if self.timing is None else self.timing.median_ms / self.config.timing.median_ms

    @property
    def has_moved(self) -> bool:
        """True if the winner has moved and was not tuned anew."""
        return self.state in MOVED and self.retuned is None


def stale(configs: Sequence[BestConfig], gpu: Gpu, environment_of: EnvironmentOf) -> list[BestConfig]:
    """Configs that were not measured in the present environment or cannot run on `gpu` any more."""
    return [
        config for config in configs
        if why_invalid(config.variant, config.shape.spec, gpu)
        or config.environment != environment_of(config.variant.template, gpu)
    ]


def verify(configs: Sequence[BestConfig], run: Run) -> list[Verified]:
    """Race the winner of each config with its rivals and store anew those that hold, by the end of `run`.

    Trials of the rivals are stored like any others, and those that still hold are not made again.
    """
    found = [Verified(config) for config in configs]
    for verified in found:
        # Time is not divided among the configs: none might be decided then. The rest is verified next time.
        if run.seconds_left > 0:
            _verify(verified, run)
    return found


def retune(
    found: Sequence[Verified], gpu: Gpu, store: Store, settings: Settings, executor: Executor,
    listener: Listener | None = None,
) -> None:
    """Tune anew what has moved, within `settings`, and note the new configs in `found`. Raises as `tune` does."""
    moved = [verified for verified in found if verified.has_moved]
    tasks = list(dict.fromkeys(verified.task for verified in moved))
    results = tune(tasks, gpu, store, settings, executor, listener) if tasks else []
    best = {result.task: result.best for result in results}
    for verified in moved:
        verified.retuned = best[verified.task]


def _verify(verified: Verified, run: Run) -> None:
    config, task = verified.config, verified.task
    if why_invalid(config.variant, task.spec, run.gpu):
        verified.state = LOST
        return
    end = run.budget.verify_end(run.executor.clock())
    most = INTERPRETED_ENTRANTS if run.gpu.is_interpreter else ENTRANTS
    search = search_only(task, run, rivals(config, run.store, run.gpu, most), end)
    if config.variant in search.unfit:
        verified.state = LOST
    elif config.variant in search.timed and search.baseline is not None:
        final = Final(search, search.baseline)
        final.decide(end)
        _judge(verified, search, final)
        if verified.state == HELD:
            _renew(verified, run, final)


def _judge(verified: Verified, search: Search, final: Final) -> None:
    """Set the state of the winner, by the race or, if it is far behind, by the trials before it."""
    winner = verified.config.variant
    if winner in search.unfit:
        verified.state = LOST
        return
    has_raced = final.has_raced(winner) and winner in final.timings
    regime = search.timed[winner].regime
    timings = final.timings if has_raced else {v: t for v, t in search.timed.items() if t.regime == regime}
    fastest = min(timings, key=lambda v: timings[v].median_ms)
    is_far_behind = timings[winner].median_ms > CLEAR_RATIO * timings[fastest].median_ms
    if not has_raced and not is_far_behind:
        # Times of trials are not compared more closely than that.
        return
    verified.timing, verified.fastest, verified.fastest_ms = timings[winner], fastest, timings[fastest].median_ms
    if is_far_behind or _is_beaten(winner, fastest, timings):
        verified.state = BEATEN
    else:
        ratio = verified.ratio or 0.0
        verified.state = HELD if 1 / (1 + CHANGED) <= ratio <= 1 + CHANGED else CHANGED_TIME


def _is_beaten(winner: Variant, fastest: Variant, timings: Mapping[Variant, Timing]) -> bool:
    interval = compare(timings[fastest], timings[winner], ALPHA / STAGES / max(1, num_comparisons(len(timings))))
    return fastest != winner and interval.is_faster and interval.median < -TIE


def _renew(verified: Verified, run: Run, final: Final) -> None:
    """Store the winner with its new times, as measured in the present environment."""
    config = verified.config
    assert verified.timing is not None
    assert final.decision is not None
    variant, verdict = final.decision
    # A variant chosen before the winner is no faster: it is simpler, or the race could not tell.
    is_chosen = variant == config.variant or verdict is Verdict.AMBIGUOUS
    verified.fresh = replace(
        config, gpu=run.gpu, timing=verified.timing, default_timing=final.timings[final.baseline],
        verdict=verdict if is_chosen else Verdict.TIE, full_check=False,
        environment=run.executor.environment_of(config.variant.template, run.gpu), measured_at=utc_now())
    run.history.put_best(verified.task, verified.fresh)
