"""The final race: the best of a search and the default, timed in turn until it is clear which is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ..db.records import utc_now
from ..kernel_templates.batch import Shape
from ..kernel_templates.outcome import BestConfig, Failed, JobError, Timing, Verdict
from ..kernel_templates.variant import Variant
from .measure.blocks import expected_s
from .measure.jobs import RaceJob, RaceResult
from .measure.race import ALPHA, choose, compare, num_comparisons, rounds_needed, simplicity
from .search import Search

# A variant this much slower than the fastest of a search is no finalist: times of one variant differ by up to 9 %
# between two windows of measurement, as power and clocks change.
SCREEN = 1.10
# Through the interpreter a round of eight takes seconds, and the times are no GPU's.
INTERPRETED_FINALISTS = 2
# The most that one race takes: nine variants at 0.1 to 1 s each.
RACE_LIMIT_S = 20.0
# The race is judged after n, 2 n and 4 n rounds, and ends with the first clear verdict.
LOOKS = 3


def _nothing() -> None:
    """Nothing is to be done."""


class Final:
    """The race between `baseline`, the fastest of `search` and what won nearby: all were found right and timed there.

    `decision` is the variant to keep and its verdict as far as is known, from the beginning on; None where every
    variant was lost. `timings` are those that it rests on: of the race or, where there was none, of the search.
    A variant that fails in the race is no longer one of `search`, which stores that, nor is what has its code and
    launch; without its `baseline`, the next one of `search` is.
    """

    def __init__(self, search: Search, baseline: Variant) -> None:
        self._search = search
        # The samples of all looks in which the card was in its usual state.
        self._raced: dict[Variant, Timing] = {}
        self._fall_back(baseline)

    def decide(
        self, deadline: float, meanwhile: Callable[[], None] = _nothing
    ) -> tuple[Variant, Verdict] | None:
        """The decision, after a race that ends by `deadline` or, where that is too soon, by the search's times.

        `meanwhile` is called while the race is run, if there is one. Samples that were taken while the card was not in
        its usual state leave the decision ambiguous, and the race is not run on: they only choose a variant where
        there are no others.
        """
        entrants = self._entrants(deadline)
        if len(entrants) < 2:
            return self.decision
        self._search.run.listener.racing(self._search.task, tuple(entrants))
        rounds = _rounds(len(entrants))
        for look in range(LOOKS):
            if look and not self._fits(entrants, rounds, deadline):
                break
            result = self._race(entrants, rounds, look, deadline, _nothing if look else meanwhile)
            self._drop([failed for failed in result.timings.values() if isinstance(failed, Failed)])
            found = {variant: timing for variant, timing in result.timings.items() if isinstance(timing, Timing)}
            if self.baseline not in found or len(found) < 2:
                break
            if not result.is_steady:
                if not self._raced:
                    variant, _ = choose(found, self.baseline)
                    self.decision, self.timings = (self._far_ahead(found, variant), Verdict.AMBIGUOUS), found
                break
            self._raced = {v: _joined(self._raced.get(v), found.get(v)) for v in {**self._raced, **found}}
            if self._judge() is not Verdict.AMBIGUOUS:
                break
            entrants = self._contenders(self._raced, entrants)
            rounds *= 2 if look else 1
        return self.decision

    def has_raced(self, variant: Variant) -> bool:
        """Whether the race compared `variant`, or what has its code and launch, with the others."""
        return self._root(variant) in map(self._root, self._raced)

    def _fall_back(self, baseline: Variant) -> None:
        """Decide by the times of the search."""
        self.baseline = baseline
        regime = self._search.timed[baseline].regime
        # What is launched in another way is served in another way: such times say nothing about each other.
        self._screened = {v: timing for v, timing in self._search.timed.items() if timing.regime == regime}
        self.timings: Mapping[Variant, Timing] = self._screened
        self.decision: tuple[Variant, Verdict] | None = self._without_race()

    def _judge(self) -> Verdict:
        """Decide by the times of the race."""
        variant, verdict = choose(self._raced, self.baseline, ALPHA / LOOKS)
        if verdict is Verdict.AMBIGUOUS:
            variant = self._far_ahead(self._raced, variant)
        self.decision, self.timings = (variant, verdict), self._raced
        return verdict

    def _far_ahead(self, timings: Mapping[Variant, Timing], chosen: Variant) -> Variant:
        """`chosen`, or where that is the baseline for want of rounds, what is faster than it beyond all doubt."""
        fastest = min(timings, key=lambda v: timings[v].median_ms)
        is_beyond = SCREEN * timings[fastest].median_ms < timings[self.baseline].median_ms
        return fastest if chosen == self.baseline and is_beyond else chosen

    def _drop(self, lost: Sequence[Failed]) -> None:
        """Decide without those that failed in the race."""
        if not lost:
            return
        for failed in lost:
            root = self._root(failed.variant)
            for variant in [v for v in self._screened if self._root(v) == root]:
                self._search.disqualify(replace(failed, variant=variant))
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

    def _entrants(self, deadline: float) -> list[Variant]:
        """The baseline, what won nearby and the finalists: as many as there is time to race."""
        ranked = sorted(self._distinct(), key=lambda v: self._screened[v].median_ms)
        limit_ms = SCREEN * self._screened[ranked[0]].median_ms
        finalists = [v for v in ranked if v != self.baseline and self._screened[v].median_ms <= limit_ms]
        nearby = [self._root(v) for v in self._search.neighbours]
        near = [v for v in ranked if v != self.baseline and self._root(v) in nearby]
        most = self._search.run.settings.finalists
        if self._search.run.gpu.is_interpreter:
            most, near = min(most, INTERPRETED_FINALISTS), []
        if self._search.run.executor.racer is not None:
            # A process of its own first makes what the search's has.
            deadline -= self._search.costs.prepared_s
        # The fastest first, so that they stay where there is little time.
        entrants = list(dict.fromkeys([self.baseline, *finalists[:1], *near, *finalists[:most]]))
        while len(entrants) > 1 and not self._fits(entrants, _rounds(len(entrants)), deadline):
            entrants.pop()
        return entrants

    def _distinct(self) -> list[Variant]:
        """One of each group that has the same code and launch: the baseline, or else the simplest."""
        groups: dict[Variant, list[Variant]] = {}
        for variant in self._screened:
            groups.setdefault(self._root(variant), []).append(variant)
        return [min(group, key=lambda v: (v != self.baseline, simplicity(v))) for group in groups.values()]

    def _root(self, variant: Variant) -> Variant:
        return self._search.same_as.get(variant, variant)

    def _contenders(self, raced: Mapping[Variant, Timing], entrants: Sequence[Variant]) -> list[Variant]:
        """The entrants without those that are clearly slower than another; the baseline stays."""
        leader = min(raced, key=lambda v: compare(raced[v], raced[self.baseline]).median)
        alpha = ALPHA / LOOKS / num_comparisons(len(raced))
        return [
            v for v in entrants
            if v in raced and (v in (self.baseline, leader) or not compare(raced[leader], raced[v], alpha).is_faster)
        ]  # fmt: skip

    def _fits(self, entrants: Sequence[Variant], rounds: int, deadline: float) -> bool:
        return self._search.run.executor.clock() + self._expected_s(entrants, rounds) <= deadline

    def _expected_s(self, entrants: Sequence[Variant], rounds: int) -> float:
        """Setting a variant up takes about what a trial of it took; then come its samples."""
        times_ms = [self._screened[variant].median_ms for variant in entrants]
        race_s = rounds * sum(times_ms) / 1e3 if self._search.run.gpu.is_interpreter else expected_s(times_ms, rounds)
        return len(entrants) * self._search.costs.trial_s + race_s

    def _race(
        self, entrants: Sequence[Variant], rounds: int, look: int, deadline: float, meanwhile: Callable[[], None]
    ) -> RaceResult:
        run, clock = self._search.run, self._search.run.executor.clock
        racer = run.executor.racer or run.executor.worker
        if not racer.ready(deadline - clock()):
            return RaceResult({})
        job = RaceJob(self._search.task, tuple(entrants), rounds, run.settings.seed + look, run.regime, deadline)
        busy_s = racer.busy_s
        racing = racer.submit(job, deadline - clock(), deadline)
        meanwhile()
        try:
            result = racing.result()
        except JobError:
            # What was decided before the process was lost stands.
            result = RaceResult({})
        self._search.result.measuring_seconds += racer.busy_s - busy_s
        self._search.result.discarded_blocks += result.discarded
        return result

    def _without_race(self) -> tuple[Variant, Verdict]:
        """The fastest of the search where that is beyond what windows of measurement differ by, else the baseline."""
        fastest, *others = sorted(self._distinct(), key=lambda v: self._screened[v].median_ms)
        if not others:
            return self.baseline, Verdict.TIE
        is_clear = SCREEN * self._screened[fastest].median_ms < self._screened[others[0]].median_ms
        if fastest == self.baseline:
            return fastest, Verdict.FAST if is_clear else Verdict.AMBIGUOUS
        return self._far_ahead(self._screened, self.baseline), Verdict.AMBIGUOUS


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


def _rounds(entrants: int) -> int:
    """The fewest rounds after which a race can be decided."""
    return rounds_needed(ALPHA / LOOKS / num_comparisons(entrants))


def _joined(before: Timing | None, after: Timing | None) -> Timing:
    """The samples of two looks, one after the other."""
    known = [timing for timing in (before, after) if timing is not None]
    return replace(known[0], samples_ms=sum((timing.samples_ms for timing in known), ()))
