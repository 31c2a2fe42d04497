"""The final race between the best variants of a search and the default, and the best config that is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ..db.records import utc_now
from ..kernel_templates.batch import BatchBucket, Shape
from ..kernel_templates.outcome import BestConfig, Failed, JobError, Timing, Verdict
from ..kernel_templates.variant import Variant
from .measure.blocks import expected_s
from .measure.jobs import RaceJob, RaceResult
from .measure.race import ALPHA, choose, compare, num_comparisons, rounds_needed, simplicity
from .search import Search

# Times of one variant differ by up to 9 % between two windows of measurement, as power and clocks change. Only a larger
# ratio between trials is clear without a race: a variant slower than the fastest by this ratio is no finalist.
CLEAR_RATIO = 1.10
# Through the interpreter a round of eight takes seconds, and the times are no GPU's.
INTERPRETED_FINALISTS = 2
# The race is judged after n, 2 n and 4 n rounds, and ends with the first clear verdict.
STAGES = 3


def _nothing() -> None:
    """Do nothing."""


class Final:
    """Final race between `baseline`, the fastest variants of `search` and the winners of the nearest batches.

    Attributes:
    - `decision`: variant to keep and its verdict as far as known, from the beginning on; None if every variant was lost
    - `timings`: times that the decision rests on, of the race or, if there was none, of the search
    - `baseline`: variant that the others are compared with

    All entrants were found right and timed by the search. A variant that fails in the race is stored as failed, and so
    is every variant with its code and launch. If the baseline fails, the search's next one takes its place.
    """

    def __init__(self, search: Search, baseline: Variant) -> None:
        self._search = search
        # Samples of all stages in which the GPU was in its usual state.
        self._raced: dict[Variant, Timing] = {}
        self._fall_back(baseline)

    def decide(self, end: float, during_race: Callable[[], None] = _nothing) -> tuple[Variant, Verdict] | None:
        """Decide by a race that ends by `end` or, if that is too soon, by the times of the search.

        Calls `during_race` while the race runs, if there is one. Samples taken while the GPU was not in its usual state
        end the race and leave the decision ambiguous: they only choose a variant if there are no other samples.
        """
        run = self._search.run
        end = run.budget.race_end(run.executor.clock(), end)
        entrants = self._entrants(end)
        if len(entrants) < 2:
            return self.decision
        run.listener.racing(self._search.task, tuple(entrants))
        self._run_stages(entrants, end, during_race)
        if run.executor.racer is not None:
            # There may not be memory for both processes' tasks.
            run.executor.racer.free()
        return self.decision

    def has_raced(self, variant: Variant) -> bool:
        """True if the race compared `variant`, or one with its code and launch, with the others."""
        return self._root(variant) in map(self._root, self._raced)

    def _run_stages(self, entrants: list[Variant], end: float, during_race: Callable[[], None]) -> None:
        rounds = _rounds(len(entrants))
        for stage in range(STAGES):
            if stage and not self._fits(entrants, rounds, end):
                return
            result = self._race(entrants, rounds, stage, end, _nothing if stage else during_race)
            self._drop([failed for failed in result.timings.values() if isinstance(failed, Failed)])
            found = {variant: timing for variant, timing in result.timings.items() if isinstance(timing, Timing)}
            if self.baseline not in found or len(found) < 2:
                return
            if not result.is_steady:
                if not self._raced:
                    variant, _ = choose(found, self.baseline)
                    self.decision, self.timings = (self._far_ahead(found, variant), Verdict.AMBIGUOUS), found
                return
            self._raced = {v: _joined(self._raced.get(v), found.get(v)) for v in {**self._raced, **found}}
            if self._judge() is not Verdict.AMBIGUOUS:
                return
            entrants = self._contenders(self._raced, entrants)
            rounds *= 2 if stage else 1

    def _fall_back(self, baseline: Variant) -> None:
        """Decide by the times of the search."""
        self.baseline = baseline
        regime = self._search.timed[baseline].regime
        # A variant launched in another way is served in another way: their times cannot be compared.
        self._screened = {v: timing for v, timing in self._search.timed.items() if timing.regime == regime}
        self.timings: Mapping[Variant, Timing] = self._screened
        self.decision: tuple[Variant, Verdict] | None = self._without_race()

    def _judge(self) -> Verdict:
        """Decide by the times of the race."""
        variant, verdict = choose(self._raced, self.baseline, ALPHA / STAGES)
        if verdict is Verdict.AMBIGUOUS:
            variant = self._far_ahead(self._raced, variant)
        self.decision, self.timings = (variant, verdict), self._raced
        return verdict

    def _far_ahead(self, timings: Mapping[Variant, Timing], chosen: Variant) -> Variant:
        """The variant `chosen`, or the fastest if too few rounds chose the baseline though it is clearly slower."""
        fastest = min(timings, key=lambda v: timings[v].median_ms)
        is_beyond = CLEAR_RATIO * timings[fastest].median_ms < timings[self.baseline].median_ms
        return fastest if chosen == self.baseline and is_beyond else chosen

    def _drop(self, lost: Sequence[Failed]) -> None:
        """Decide without the variants that failed in the race."""
        if not lost:
            return
        for failed in lost:
            root = self._root(failed.variant)
            for variant in [v for v in self._screened if self._root(v) == root]:
                self._search.mark_failed(replace(failed, variant=variant))
                del self._screened[variant]
        self._raced = {v: timing for v, timing in self._raced.items() if v in self._screened}
        if self.baseline in self._screened and len(self._raced) > 1:
            self._judge()
            return
        self._raced = {}
        baseline = self.baseline if self.baseline in self._screened else self._search.baseline
        if baseline is None:
            self.decision = None
        else:
            self._fall_back(baseline)

    def _entrants(self, end: float) -> list[Variant]:
        """The baseline, the winners of the nearest batches and the finalists: as many as there is time to race."""
        ranked = sorted(self._distinct(), key=lambda v: self._screened[v].median_ms)
        limit_ms = CLEAR_RATIO * self._screened[ranked[0]].median_ms
        finalists = [v for v in ranked if v != self.baseline and self._screened[v].median_ms <= limit_ms]
        nearby = [self._root(v) for v in self._search.neighbours]
        near = [v for v in ranked if v != self.baseline and self._root(v) in nearby]
        most = self._search.run.settings.finalists
        if self._search.run.gpu.is_interpreter:
            most, near = min(most, INTERPRETED_FINALISTS), []
        if self._search.run.executor.racer is not None:
            # A process of its own must first prepare the inputs that the search's process has.
            end -= self._search.costs.prepared_s
        # The fastest come first, so that they stay if there is little time.
        entrants = list(dict.fromkeys([self.baseline, *finalists[:1], *near, *finalists[:most]]))
        while len(entrants) > 1 and not self._fits(entrants, _rounds(len(entrants)), end):
            entrants.pop()
        return entrants

    def _distinct(self) -> list[Variant]:
        """One variant of each group with the same code and launch: the baseline, or else the simplest."""
        groups: dict[Variant, list[Variant]] = {}
        for variant in self._screened:
            groups.setdefault(self._root(variant), []).append(variant)
        return [min(group, key=lambda v: (v != self.baseline, simplicity(v))) for group in groups.values()]

    def _root(self, variant: Variant) -> Variant:
        return self._search.same_as.get(variant, variant)

    def _contenders(self, raced: Mapping[Variant, Timing], entrants: Sequence[Variant]) -> list[Variant]:
        """Entrants that are not clearly slower than another; the baseline stays."""
        leader = min(raced, key=lambda v: compare(raced[v], raced[self.baseline]).median)
        alpha = ALPHA / STAGES / num_comparisons(len(raced))
        return [
            v for v in entrants
            if v in raced and (v in (self.baseline, leader) or not compare(raced[leader], raced[v], alpha).is_faster)
        ]  # fmt: skip

    def _fits(self, entrants: Sequence[Variant], rounds: int, end: float) -> bool:
        return self._search.run.executor.clock() + self._expected_s(entrants, rounds) <= end

    def _expected_s(self, entrants: Sequence[Variant], rounds: int) -> float:
        """Expected seconds of a stage: a trial's time to set each variant up, then the samples."""
        times_ms = [self._screened[variant].median_ms for variant in entrants]
        race_s = rounds * sum(times_ms) / 1e3 if self._search.run.gpu.is_interpreter else expected_s(times_ms, rounds)
        return len(entrants) * self._search.costs.trial_s + race_s

    def _race(
        self, entrants: Sequence[Variant], rounds: int, stage: int, end: float, during_race: Callable[[], None]
    ) -> RaceResult:
        run, clock = self._search.run, self._search.run.executor.clock
        racer = run.executor.racer or run.executor.worker
        if not racer.ready(end - clock()):
            return RaceResult({})
        job = RaceJob(self._search.task, tuple(entrants), rounds, run.settings.seed + stage, run.regime, end)
        busy_s = racer.busy_s
        racing = racer.submit(job, end - clock(), end)
        during_race()
        try:
            result = racing.result()
        except JobError:
            # The decision from before the process was lost stands.
            result = RaceResult({})
        self._search.result.measuring_seconds += racer.busy_s - busy_s
        self._search.result.discarded_blocks += result.discarded
        return result

    def _without_race(self) -> tuple[Variant, Verdict]:
        """The fastest variant of the search if it is clearly faster, else the baseline."""
        fastest, *others = sorted(self._distinct(), key=lambda v: self._screened[v].median_ms)
        if not others:
            return self.baseline, Verdict.TIE
        is_clear = CLEAR_RATIO * self._screened[fastest].median_ms < self._screened[others[0]].median_ms
        if fastest == self.baseline:
            return fastest, Verdict.FAST if is_clear else Verdict.AMBIGUOUS
        return self._far_ahead(self._screened, self.baseline), Verdict.AMBIGUOUS


def stored_best(search: Search, baseline: Variant, configs: Sequence[BestConfig]) -> BestConfig | None:
    """The config among stored `configs` that still holds for the task; None if none does.

    It was measured on this GPU in the present environment and the regime of `baseline`, and has not failed since.
    """
    run, task = search.run, search.task
    for config in configs:
        if (
            config.batch == str(task.batch)
            and config.gpu.num_sms == run.gpu.num_sms
            and config.timing.regime == search.timed[baseline].regime
            and config.variant not in search.unfit
            and config.environment == run.executor.environment_of(config.variant.template, run.gpu)
        ):
            return config
    return None


def is_newest(stored: BestConfig, search: Search) -> bool:
    """True if nothing was tried since `stored` was decided."""
    return not search.result.tried and search.newest <= stored.measured_at


def _stays(stored: BestConfig, search: Search, final: Final, decision: tuple[Variant, Verdict]) -> bool:
    """True if `stored` is kept: it did not race, and the decision is not clearly better by the search's times."""
    variant, verdict = decision
    if final.has_raced(stored.variant):
        return False
    if stored.verdict is Verdict.AMBIGUOUS and verdict is not Verdict.AMBIGUOUS:
        return False
    known = search.timed.get(stored.variant, stored.timing)
    return known.median_ms <= CLEAR_RATIO * search.timed[variant].median_ms


def keep(search: Search, final: Final) -> BestConfig | None:
    """Store the decision of `final`, unless the stored best config stays. Returns the config that is stored then."""
    run, task = search.run, search.task
    if final.decision is None:
        return None
    variant, verdict = final.decision
    # Read anew: another process may have raced for this task since the run began.
    present = run.store.best_configs(spec=task.spec, page_size=task.page_size, gpu_name=run.gpu.name,
                                     bucket=BatchBucket.of(task.batch))
    stored = stored_best(search, final.baseline, present)
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
    run.history.put_best(task, best)
    return best


def _rounds(entrants: int) -> int:
    """Fewest rounds after which a race can be decided."""
    return rounds_needed(ALPHA / STAGES / num_comparisons(entrants))


def _joined(before: Timing | None, after: Timing | None) -> Timing:
    """Samples of two stages, one after the other."""
    known = [timing for timing in (before, after) if timing is not None]
    return replace(known[0], samples_ms=sum((timing.samples_ms for timing in known), ()))
