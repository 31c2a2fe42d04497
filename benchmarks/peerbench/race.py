"""The race on one batch and page size: checks every contender against the oracle, then times all in turns."""

from __future__ import annotations

import gc
import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch

from attention_tuner.kernel_templates.launch.launcher import Launcher, Tensors
from attention_tuner.kernel_templates.outcome import Check
from attention_tuner.tuner.measure.bench import Workbench
from attention_tuner.tuner.measure.stopwatch import Stopwatch

from .contender import Contender, RefusedError, reason_of
from .ours import GRAPH, Candidate, Ours

SEED = 0
# A contender slower than the fastest by this factor is timed by one launch only.
MUCH_SLOWER = 20.0


class DeviceLostError(Exception):
    """The GPU does not respond any more. The entry of the contender at fault has the reason."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The result of one contender."""

    name: str
    # "timed", "slow" (timed by one eager launch), "wrong", "refused" or "failed".
    state: str
    # Number of the script's run. Ratios compare entries of one run.
    run: int
    reason: str = ""
    variant: str | None = None
    source: str | None = None
    is_plain: bool = False
    worst_ratio: float | None = None
    first_ms: float | None = None
    samples_ms: tuple[float, ...] = ()
    regime: str | None = None
    launches: int | None = None


class Race:
    """The contenders of one workbench in run number `run`; all read the same tensors."""

    def __init__(self, bench: Workbench, run: int) -> None:
        self._bench = bench
        self._run = run
        self._checker = bench.checker(SEED)
        self._best_ms = math.inf
        self._watches: dict[str, Stopwatch[Tensors]] = {}
        self.entries: dict[str, Entry] = {}

    def enter_ours(self, candidate: Candidate) -> None:
        """Check and prepare one of this project's variants."""

        def make() -> Contender:
            launcher, _ = self._bench.planned(candidate.variant, GRAPH)
            return Ours(self._bench.task, launcher)

        blank = Entry(f"ours:{candidate.variant.template}", "failed", self._run, variant=candidate.variant.key(),
                      source=candidate.source, is_plain=candidate.is_plain)  # fmt: skip
        self._enter(blank, make)

    def enter(self, name: str, make: Callable[[], Contender]) -> None:
        """Check and prepare the contender that `make` returns. Call this after `enter_ours`."""
        self._enter(Entry(name, "failed", self._run), make)

    def zero_unused(self) -> None:
        """Replace NaN in unused cache slots by zeros, because peers may multiply them by a probability of 0."""
        for tensors in (self._checker.tensors, *self._bench.buffers(GRAPH)):
            for cache in (tensors.k_cache, tensors.v_cache):
                cache.nan_to_num_(nan=0.0)

    def time(self, rounds: int) -> None:
        """Take a sample of each correct contender in each of `rounds` rounds; the order rotates."""
        samples: dict[str, list[float]] = defaultdict(list)
        for turn in range(rounds):
            names = list(self._watches)
            first = turn % max(1, len(names))
            for name in names[first:] + names[:first]:
                try:
                    samples[name] += self._watches[name].samples(1)
                except Exception as error:  # noqa: BLE001 - another project's code, which may raise anything
                    del self._watches[name]
                    self._lost(replace(self.entries[name], state="failed"), error)
        for name, watch in self._watches.items():
            self.entries[name] = replace(self.entries[name], samples_ms=tuple(samples[name]),
                                         regime=str(watch.regime), launches=watch.launches)  # fmt: skip

    def _enter(self, blank: Entry, make: Callable[[], Contender]) -> None:
        try:
            self.entries[blank.name] = self._entered(blank, make)
        except RefusedError as error:
            self.entries[blank.name] = replace(blank, state="refused", reason=reason_of(error))
        except Exception as error:  # noqa: BLE001 - another project's code, which may raise anything
            self._lost(blank, error)

    def _entered(self, blank: Entry, make: Callable[[], Contender]) -> Entry:
        contender = make()
        check, first_ms = self._checked(contender)
        contender.release(self._checker.tensors)
        entry = replace(blank, worst_ratio=None if math.isnan(check.worst_ratio) else check.worst_ratio,
                        first_ms=first_ms)  # fmt: skip
        if not check.passed:
            return replace(entry, state="wrong", reason=check.detail)
        if first_ms > MUCH_SLOWER * self._best_ms:
            reason = f"one launch took {first_ms / self._best_ms:.0f} times the fastest's"
            return replace(entry, state="slow", reason=reason)
        self._best_ms = min(self._best_ms, first_ms)
        for tensors in self._bench.buffers(GRAPH):
            contender.prepare(tensors)
        # A contender has all that a stopwatch needs of a launcher.
        launcher = contender.launcher if isinstance(contender, Ours) else cast(Launcher, contender)
        self._watches[entry.name] = self._bench.stopwatch(launcher, GRAPH)
        return replace(entry, state="timed")

    def _checked(self, contender: Contender) -> tuple[Check, float]:
        """The check and the milliseconds of a second launch, which would show leftovers of the first one."""
        tensors = self._checker.tensors
        contender.prepare(tensors)
        contender.run(tensors)
        tensors.out.fill_(torch.nan)
        self._synchronize()
        start = time.perf_counter()
        returned = contender.run(tensors)
        self._synchronize()
        first_ms = (time.perf_counter() - start) * 1e3
        return self._checker.judge(contender.output(tensors, returned)), first_ms

    def _lost(self, entry: Entry, error: Exception) -> None:
        """Note that a contender failed. Raises `DeviceLostError` if the GPU was lost with it."""
        self.entries[entry.name] = replace(entry, reason=reason_of(error))
        # Tracebacks keep tensors alive.
        error.__traceback__ = None
        gc.collect()
        try:
            self._synchronize()
        except RuntimeError as lost:
            raise DeviceLostError(f"{entry.name} lost the GPU: {reason_of(error)}") from lost

    def _synchronize(self) -> None:
        if not self._bench.gpu.is_interpreter:
            torch.cuda.synchronize()
