"""The final race: the best of a search and the default, timed in turn until it is clear which is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ..kernel_templates.errors import JobError
from ..kernel_templates.outcome import Timing, Verdict
from ..kernel_templates.variant import Variant
from .blocks import expected_s
from .jobs import RaceJob, RaceResult
from .race import ALPHA, choose, compare, num_comparisons, rounds_needed, simplicity
from .search import Search

# A variant this much slower than the fastest of a search is no finalist: times of one variant differ by up to 9 %
# between two windows of measurement, as power and clocks change.
SCREEN = 1.10
# Through the interpreter a round of eight takes seconds, and the times are no GPU's.
INTERPRETED_FINALISTS = 2
# The race is judged after n, 2 n and 4 n rounds, and ends with the first clear verdict.
LOOKS = 3
# A race that takes longer than this has hung: so many times what was expected, and what a process needs to start.
LIMIT_FACTOR = 5
LIMIT_S = 120.0


def _nothing() -> None:
    """Nothing is to be done."""


class Final:
    """The race between `baseline`, the fastest of `search` and what won nearby: all were found right and timed there.

    `timings` are those that the decision rests on: of the race or, where there was none, of the search.
    """

    def __init__(self, search: Search, baseline: Variant) -> None:
        self._search = search
        self._baseline = baseline
        regime = search.timed[baseline].regime
        # What is launched in another way is served in another way: such times say nothing about each other.
        self._screened = {v: timing for v, timing in search.timed.items() if timing.regime == regime}
        self.timings: Mapping[Variant, Timing] = self._screened

    def decide(self, deadline: float, meanwhile: Callable[[], None] = _nothing) -> tuple[Variant, Verdict]:
        """The variant to keep: by a race that ends by `deadline` or, where that is too soon, by the search's times.

        `meanwhile` is called while the race is run, if there is one.
        """
        decision = self._without_race()
        entrants = self._entrants(deadline)
        if len(entrants) < 2:
            return decision
        self._search.run.listener.racing(self._search.task, tuple(entrants))
        rounds = _rounds(len(entrants))
        raced: dict[Variant, Timing] = {}
        is_steady = True
        for look in range(LOOKS):
            if look and not self._fits(entrants, rounds, deadline):
                break
            result = self._race(entrants, rounds, look, deadline, _nothing if look else meanwhile)
            found = {variant: timing for variant, timing in result.timings.items() if isinstance(timing, Timing)}
            if self._baseline not in found:
                break
            lost = [variant for variant in entrants if variant not in found]
            raced = {v: _joined(raced.get(v), found.get(v)) for v in {**raced, **found} if v not in lost}
            variant, verdict = choose(raced, self._baseline, ALPHA / LOOKS)
            # Samples that were taken while the card was not itself decide nothing.
            is_steady = is_steady and result.is_steady
            decision, self.timings = (variant, verdict if is_steady else Verdict.AMBIGUOUS), raced
            if decision[1] is not Verdict.AMBIGUOUS:
                break
            entrants = self._contenders(raced, entrants)
            rounds *= 2 if look else 1
        return decision

    def _entrants(self, deadline: float) -> list[Variant]:
        """The baseline, what won nearby and the finalists: as many as there is time to race."""
        ranked = sorted(self._distinct(), key=lambda v: self._screened[v].median_ms)
        limit_ms = SCREEN * self._screened[ranked[0]].median_ms
        finalists = [v for v in ranked if v != self._baseline and self._screened[v].median_ms <= limit_ms]
        nearby = [self._search.same_as.get(v, v) for v in self._search.neighbours]
        near = [v for v in ranked if v != self._baseline and self._search.same_as.get(v, v) in nearby]
        most = self._search.run.settings.finalists
        if self._search.run.gpu.is_interpreter:
            most, near = min(most, INTERPRETED_FINALISTS), []
        # The fastest first, so that they stay where there is little time.
        entrants = list(dict.fromkeys([self._baseline, *finalists[:1], *near, *finalists[:most]]))
        while len(entrants) > 1 and not self._fits(entrants, _rounds(len(entrants)), deadline):
            entrants.pop()
        return entrants

    def _distinct(self) -> list[Variant]:
        """One of each group that has the same code and launch: the baseline, or else the simplest."""
        groups: dict[Variant, list[Variant]] = {}
        for variant in self._screened:
            groups.setdefault(self._search.same_as.get(variant, variant), []).append(variant)
        return [min(group, key=lambda v: (v != self._baseline, simplicity(v))) for group in groups.values()]

    def _contenders(self, raced: Mapping[Variant, Timing], entrants: Sequence[Variant]) -> list[Variant]:
        """The entrants without those that are clearly slower than another; the baseline stays."""
        leader = min(raced, key=lambda v: compare(raced[v], raced[self._baseline]).median)
        alpha = ALPHA / LOOKS / num_comparisons(len(raced))
        return [
            v for v in entrants
            if v in raced and (v in (self._baseline, leader) or not compare(raced[leader], raced[v], alpha).is_faster)
        ]  # fmt: skip

    def _fits(self, entrants: Sequence[Variant], rounds: int, deadline: float) -> bool:
        return self._search.run.executor.clock() + self._expected_s(entrants, rounds) <= deadline

    def _expected_s(self, entrants: Sequence[Variant], rounds: int) -> float:
        """Setting a variant up takes about what a trial of it took; then come its samples."""
        times_ms = [self._screened[variant].median_ms for variant in entrants]
        race_s = rounds * sum(times_ms) / 1e3 if self._search.run.gpu.is_interpreter else expected_s(times_ms, rounds)
        return len(entrants) * self._search.trial_seconds + race_s

    def _race(
        self, entrants: Sequence[Variant], rounds: int, look: int, deadline: float, meanwhile: Callable[[], None]
    ) -> RaceResult:
        run, clock = self._search.run, self._search.run.executor.clock
        racer = run.executor.racer or run.executor.worker
        if not racer.ready(deadline - clock()):
            return RaceResult({})
        start = clock()
        left_s = deadline - start
        limit_s = min(LIMIT_S + LIMIT_FACTOR * self._expected_s(entrants, rounds), left_s)
        job = RaceJob(self._search.task, tuple(entrants), rounds, run.settings.seed + look, run.regime, left_s)
        racing = racer.submit(job, limit_s, deadline)
        ends: list[float] = []
        racing.add_done_callback(lambda _: ends.append(clock()))
        meanwhile()
        try:
            result = racing.result()
        except JobError:
            # What was decided before the process was lost stands.
            result = RaceResult({})
        # The callback of a future may come just after its result.
        self._search.result.measuring_seconds += (ends[0] if ends else clock()) - start
        self._search.result.discarded_blocks += result.discarded
        return result

    def _without_race(self) -> tuple[Variant, Verdict]:
        """The fastest of the search where that is beyond what windows of measurement differ by, else the baseline."""
        fastest = min(self._screened, key=lambda v: self._screened[v].median_ms)
        is_beyond = self._screened[fastest].median_ms * SCREEN < self._screened[self._baseline].median_ms
        verdict = Verdict.TIE if len(self._screened) == 1 else Verdict.AMBIGUOUS
        return fastest if is_beyond else self._baseline, verdict


def _rounds(entrants: int) -> int:
    """The fewest rounds after which a race can be decided."""
    return rounds_needed(ALPHA / LOOKS / num_comparisons(entrants))


def _joined(before: Timing | None, after: Timing | None) -> Timing:
    """The samples of two looks, one after the other."""
    known = [timing for timing in (before, after) if timing is not None]
    return replace(known[0], samples_ms=sum((timing.samples_ms for timing in known), ()))
