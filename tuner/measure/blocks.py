"""A race in equal heat: turns of equal length in balanced orders, in blocks that a sentinel can discard.

Near the tensor-core limit a variant slows down by 4 to 9 % as power rises, so a difference of half a percent shows only
between samples that were taken in the same heat. Three things make it the same. Turns are so short that power, which
takes tenths of a second to follow, is that of the whole field. They are equally long, and begin with as much untimed
work as is then timed, so that what ran just before is the variant itself. And every variant follows every other
equally often, so that what is left of the one before is no one's advantage.
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
# Power has risen to that of the field after half a second.
WARM_UP_S = 0.5
# The timed half of a turn: whole samples, of 0.2 to 0.4 ms where launches are short, come within a fifth of it.
TURN_MS = 1.0


def _never(start_s: float, end_s: float) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Course(Generic[T]):
    """What a race is run on.

    `turn` runs an entrant and gives its milliseconds; `sentinel`, where there is one, the milliseconds of work that
    always is the same; `throttled` says whether the card was between two times of `clock`, in seconds.
    """

    turn: Callable[[T], float]
    sentinel: Callable[[], float] | None = None
    throttled: Callable[[float, float], bool] = _never
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class Raced(Generic[T]):
    """The samples in milliseconds of every entrant, of the same rounds, and how many of the blocks run were discarded.

    `blocks` were asked for; `sentinels_ms` are those of all that were run, discarded or not.
    """

    samples_ms: dict[T, tuple[float, ...]]
    blocks: int
    discarded: int = 0
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
    """Run `rounds` rounds over `entrants`, and each discarded block again, in its own orders.

    At most as many blocks are run again as were asked for, and only such as end within `patience_s` seconds of the
    start. What is then missing stays out; where no block counts, the samples are those of all.
    """
    start = course.clock()
    orders = balanced_orders(len(entrants), seed)
    count = math.ceil(rounds / BLOCK_ROUNDS)
    cuts = [index * rounds // count for index in range(count + 1)]
    plan = [[entrants[i] for r in range(a, b) for i in orders[r % len(orders)]] for a, b in itertools.pairwise(cuts)]
    if course.sentinel is not None:
        # Its first time also makes it.
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
    """How many samples, each of these milliseconds, an entrant needs to be timed for as long as the others.

    That is `TURN_MS`, or the sample of a middling entrant where that is longer: stretching all turns to one slow
    entrant's would cost more time than its own verdict, which is clear, is worth.
    """
    turn_ms = max(TURN_MS, statistics.median_high(lengths_ms.values()))
    return {entrant: max(1, round(turn_ms / length)) for entrant, length in lengths_ms.items()}


def expected_s(times_ms: Sequence[float], rounds: int) -> float:
    """About how many seconds a race between entrants of these times takes on a GPU, when no block is discarded."""
    turn_ms = max(TURN_MS, statistics.median_high(times_ms))
    return WARM_UP_S + 2 * rounds * sum(max(turn_ms, ms) for ms in times_ms) / 1e3


def _warm_up(course: Course[T], turns: Iterator[T], until_s: float) -> None:
    while course.clock() < until_s:
        course.turn(next(turns))


def _run(course: Course[T], index: int, turns: Sequence[T]) -> _Block[T]:
    start = course.clock()
    samples = tuple((entrant, course.turn(entrant)) for entrant in turns)
    # Without a sentinel every block is like the others.
    sentinel_ms = 1.0 if course.sentinel is None else course.sentinel()
    return _Block(index, samples, start, course.clock(), sentinel_ms)


def _kept(course: Course[T], run: Sequence[_Block[T]]) -> dict[int, _Block[T]]:
    """The blocks that count, by their place in the race: all are judged anew, for each moves the median."""
    throttled = [course.throttled(block.start_s, block.end_s) for block in run]
    sound = sound_blocks([block.sentinel_ms for block in run], throttled)
    kept: dict[int, _Block[T]] = {}
    for block, is_sound in zip(run, sound, strict=True):
        if is_sound:
            kept.setdefault(block.index, block)
    return kept
