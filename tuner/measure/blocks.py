"""A race in equal heat: turns of equal length in balanced orders, in blocks that a sentinel can discard.

Near the tensor-core limit a variant slows down by 4 to 9 % as power rises. A difference of half a percent shows only
between samples taken in the same heat, which three rules provide. Turns are short: power follows within tenths of a
second, so it is that of the whole field. Turns are equally long and begin with as much untimed work as is timed, so
each variant runs after itself. Every variant follows every other equally often, so the one before favours nobody.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from .race import balanced_orders, sound_blocks

T = TypeVar("T", bound=Hashable)

BLOCK_ROUNDS = 3
# After half a second, power is that of the field.
WARM_UP_S = 0.5
# The timed half of a turn. Samples of short launches take 0.2 to 0.4 ms, so whole ones come within a fifth of it.
TURN_MS = 1.0


def _never(start_s: float, end_s: float) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Course(Generic[T]):
    """Measurements of a race."""

    # Runs an entrant and returns its milliseconds.
    turn: Callable[[T], float]
    # Returns the milliseconds of work that is always the same.
    sentinel: Callable[[], float] | None = None
    # True if the GPU was throttled between two times of `clock`.
    throttled: Callable[[float, float], bool] = _never
    # Present moment in seconds.
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class Raced(Generic[T]):
    """The samples of a race."""

    # Milliseconds of every entrant; all have the same rounds.
    samples_ms: dict[T, tuple[float, ...]]
    # Blocks asked for.
    blocks: int
    # Blocks that were run and discarded.
    discarded: int = 0
    # Sentinel times of all blocks that were run, discarded or not.
    sentinels_ms: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class _Block(Generic[T]):
    index: int
    samples: tuple[tuple[T, float], ...]
    start_s: float
    end_s: float
    sentinel_ms: float


def run_blocks(
    course: Course[T], entrants: Sequence[T], rounds: int, seed: int, patience_s: float = math.inf
) -> Raced[T]:
    """Run `rounds` rounds over `entrants`, and each discarded block again in its own orders.

    At most as many blocks are run again as were asked for, and only if they end within `patience_s` seconds of the
    start. Blocks that are then missing stay out; if no block counts, the samples of all are returned.
    """
    start = course.clock()
    orders = balanced_orders(len(entrants), seed)
    count = math.ceil(rounds / BLOCK_ROUNDS)
    cuts = [index * rounds // count for index in range(count + 1)]
    plan = [[entrants[i] for r in range(a, b) for i in orders[r % len(orders)]] for a, b in itertools.pairwise(cuts)]
    if course.sentinel is not None:
        # The first call also builds the sentinel.
        course.sentinel()
        _warm_up(course, itertools.cycle(itertools.chain.from_iterable(plan)), start + WARM_UP_S)
    run = [_run(course, index, turns) for index, turns in enumerate(plan)]
    kept = _kept(course, run)
    while len(kept) < count and len(run) < 2 * count:
        if course.clock() + run[-1].end_s - run[-1].start_s > start + patience_s:
            break
        index = next(index for index in range(count) if index not in kept)
        run.append(_run(course, index, plan[index]))
        kept = _kept(course, run)
    counted = [kept[index] for index in sorted(kept)] or run
    samples: dict[T, list[float]] = {entrant: [] for entrant in entrants}
    for entrant, ms in itertools.chain.from_iterable(block.samples for block in counted):
        samples[entrant].append(ms)
    return Raced(
        samples_ms={entrant: tuple(each) for entrant, each in samples.items()},
        blocks=count,
        discarded=len(run) - len(kept),
        sentinels_ms=tuple(block.sentinel_ms for block in run) if course.sentinel else (),
    )


def equal_turns(lengths_ms: Mapping[T, float]) -> dict[T, int]:
    """Number of samples in each entrant's turn, so that all turns are equally long; `lengths_ms` are of one sample.

    A turn takes `TURN_MS`, or the median entrant's sample if that is longer. Turns as long as the slowest entrant's
    would cost time for a verdict that is clear anyway.
    """
    turn_ms = max(TURN_MS, statistics.median_high(lengths_ms.values()))
    return {entrant: max(1, round(turn_ms / length)) for entrant, length in lengths_ms.items()}


def expected_s(times_ms: Sequence[float], rounds: int) -> float:
    """Estimated seconds of a race on a GPU between entrants that take `times_ms`, if no block is discarded."""
    turn_ms = max(TURN_MS, statistics.median_high(times_ms))
    return WARM_UP_S + 2 * rounds * sum(max(turn_ms, ms) for ms in times_ms) / 1e3


def _warm_up(course: Course[T], turns: Iterator[T], until_s: float) -> None:
    while course.clock() < until_s:
        course.turn(next(turns))


def _run(course: Course[T], index: int, turns: Sequence[T]) -> _Block[T]:
    start = course.clock()
    samples = tuple((entrant, course.turn(entrant)) for entrant in turns)
    # Without a sentinel no block differs from the others.
    sentinel_ms = 1.0 if course.sentinel is None else course.sentinel()
    return _Block(index, samples, start, course.clock(), sentinel_ms)


def _kept(course: Course[T], run: Sequence[_Block[T]]) -> dict[int, _Block[T]]:
    """The blocks that count, by their place in the race. All are judged again, because each moves the median."""
    throttled = [course.throttled(block.start_s, block.end_s) for block in run]
    sound = sound_blocks([block.sentinel_ms for block in run], throttled)
    kept: dict[int, _Block[T]] = {}
    for block, is_sound in zip(run, sound, strict=True):
        if is_sound:
            kept.setdefault(block.index, block)
    return kept
