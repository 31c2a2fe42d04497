"""The statistics of an interleaved race: which variant is fastest, and the choice among variants that tie.

Sample i of every timing is of round i, so that differences between rounds cancel in the ratio of a pair.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...kernel_templates.outcome import Timing, Verdict
from ...kernel_templates.registry import template_of
from ...kernel_templates.variant import Variant

# Chance of any wrong verdict in a race, divided by the number of comparisons (Bonferroni).
ALPHA = 0.05
# Times closer than this count as equal: one variant's time repeats within it on an idle GPU.
TIE = math.log(1.005)
# A block whose sentinel differs more than this from the race's was run by a GPU in another state.
DRIFT = math.log(1.015)


@dataclass(frozen=True, slots=True)
class Interval:
    """The median of the paired log-ratios of two timings, a's over b's, and a confidence interval for it.

    The bounds are infinite where there are too few pairs for the confidence that was asked for.
    """

    median: float
    low: float
    high: float

    @property
    def is_faster(self) -> bool:
        """True if a is clearly the faster."""
        return self.high < 0

    @property
    def is_tie(self) -> bool:
        """True if the two clearly differ by less than `TIE`."""
        return self.low >= -TIE and self.high <= TIE


def compare(a: Timing, b: Timing, alpha: float = ALPHA) -> Interval:
    """Compare the times of `a` with those of `b`, round by round.

    The interval misses the true ratio with a chance of at most `alpha`. It is that of the sign test, between two order
    statistics: Conover, Practical Nonparametric Statistics, 3rd edition, section 3.2. It holds for every distribution
    whose pairs are independent.
    """
    ratios = sorted(math.log(x / y) for x, y in zip(a.samples_ms, b.samples_ms, strict=False))
    rank = _rank(len(ratios), alpha)
    low, high = (ratios[rank - 1], ratios[-rank]) if rank else (-math.inf, math.inf)
    return Interval(statistics.median(ratios), low, high)


def rounds_needed(alpha: float) -> int:
    """The fewest rounds in which `compare` can find a difference."""
    return next(n for n in itertools.count(1) if _rank(n, alpha))


def num_comparisons(entrants: int) -> int:
    """Number of pairs among `entrants` variants."""
    return math.comb(entrants, 2)


def choose(timings: Mapping[Variant, Timing], default: Variant, alpha: float = ALPHA) -> tuple[Variant, Verdict]:
    """The variant to keep, and its verdict against the others, wrong with a chance of at most `alpha`.

    The default is kept unless another is clearly faster or clearly equal, so no variant slower than the default is
    kept. Among variants that tie with the fastest, the simplest is kept.
    """
    others = [variant for variant in timings if variant != default]
    if not others:
        return default, Verdict.TIE
    # Any variant may lead, so any pair may be compared.
    alpha /= num_comparisons(len(timings))
    against_default = {v: compare(timings[v], timings[default], alpha) for v in timings}
    leader = min(timings, key=lambda v: (against_default[v].median, simplicity(v)))
    intervals = {v: compare(timings[leader], timings[v], alpha) for v in timings if v != leader}
    tied = [v for v, interval in intervals.items() if interval.is_tie]
    eligible = [
        v for v in (leader, *tied) if v == default or against_default[v].is_faster or _no_slower(against_default[v])
    ]
    is_clear = all(interval.is_faster or interval.is_tie for interval in intervals.values())
    if not eligible:
        return default, Verdict.AMBIGUOUS
    verdict = (Verdict.TIE if tied else Verdict.FAST) if is_clear else Verdict.AMBIGUOUS
    return min(eligible, key=simplicity), verdict


def balanced_orders(count: int, seed: int) -> list[tuple[int, ...]]:
    """Orders of `count` entrants in which each has every place, and follows every other, equally often.

    There are `count` orders, or twice as many for an odd `count`: Williams, Experimental designs balanced for the
    estimation of residual effects of treatments, Australian Journal of Scientific Research A 2 (1949). `seed` draws
    the assignment of entrants in the design, and the sequence of the orders.
    """
    zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
    rows = [[(entrant + shift) % count for entrant in zigzag] for shift in range(count)]
    if count % 2:
        rows += [row[::-1] for row in rows]
    draw = random.Random(seed)
    names = draw.sample(range(count), count)
    return [tuple(names[entrant] for entrant in row) for row in draw.sample(rows, len(rows))]


def sound_blocks(sentinels_ms: Sequence[float], throttled: Sequence[bool]) -> tuple[bool, ...]:
    """For each block, true if it counts: not throttled, and its sentinel within `DRIFT` of the median.

    The median is over the blocks that were not throttled, and is the value of one of them.
    """
    steady = [ms for ms, hot in zip(sentinels_ms, throttled, strict=True) if not hot]
    if not steady:
        return (False,) * len(throttled)
    middle = statistics.median_low(steady)
    pairs = zip(sentinels_ms, throttled, strict=True)
    return tuple(not hot and abs(math.log(ms / middle)) <= DRIFT for ms, hot in pairs)


def simplicity(variant: Variant) -> tuple[int, int, bool, int, int, int, str]:
    """A rank, lower for the simpler of two variants.

    In this order: fewer launches, fewer segments, loads through pointers, fewer warps, smaller tiles, fewer departures
    from the plain variant; then the key, so that no two variants are alike.
    """
    traits = template_of(variant).traits(variant)
    tile = sum(body.block_m * body.block_n for body in traits.bodies)
    return (traits.launches, traits.segments, traits.has_tma, traits.num_warps, tile, traits.departures, variant.key())


def _no_slower(interval: Interval) -> bool:
    return interval.is_tie and interval.median <= 0


def _rank(count: int, alpha: float) -> int:
    """The largest k whose k-th smallest and k-th largest of `count` samples enclose the median with 1 - alpha.

    0 if even the smallest and the largest do not. The chance to miss is twice P(Binomial(count, 1/2) < k).
    """
    missed, rank = 0.0, 0
    while rank < count:
        missed += 2 * math.comb(count, rank) / 2**count
        if missed > alpha:
            break
        rank += 1
    return rank
