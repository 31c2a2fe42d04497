"""What the trials of one search took: what the next one will take, and when it has hung."""

from __future__ import annotations

import statistics
from collections import deque

from ..kernel_templates.outcome import Failed, Outcome, Timed
from ..kernel_templates.task import Task
from .forecast import LAUNCHES_PER_TRIAL, interpreted_seconds

# Wall time of one job: the first of a task also computes the reference.
JOB_LIMIT_S = 120.0
# Once it is known what jobs take, one has hung that takes this much longer than the slowest: a kernel that never ends
# must not use up the time of the others.
HANG_FACTOR = 20
HANG_S = 10.0
# The interpreter's speed is only estimated.
INTERPRETER_MARGIN = 10
# How many of the last trials the cost of the next is judged by.
RECENT = 5


class Costs:
    """The seconds that trials of `task` took; `prepared_s` is what making all that they share took."""

    def __init__(self, task: Task, is_interpreted: bool) -> None:
        self.prepared_s = 0.0
        self._most_s = JOB_LIMIT_S
        if is_interpreted:
            self._most_s += INTERPRETER_MARGIN * LAUNCHES_PER_TRIAL * interpreted_seconds(task)
        self._recent: deque[float] = deque(maxlen=RECENT)
        # Of the trials that did not fail; no trial, no limit.
        self._slowest_s: float | None = None

    @property
    def trial_s(self) -> float:
        """What one of the last trials that were measured took, 0 while there is none."""
        return statistics.median(self._recent) if self._recent else 0.0

    @property
    def limit_s(self) -> float:
        """The seconds after which the next trial has hung."""
        if self._slowest_s is None:
            return self._most_s
        # A process that replaces another prepares the task again.
        return min(self._most_s, HANG_S + HANG_FACTOR * (self.prepared_s + self._slowest_s))

    def note(self, outcome: Outcome, seconds: float, busy_s: float) -> None:
        """Take in a trial that took `seconds` in all, `busy_s` of them in the worker."""
        # A twin's result is there at once, and says nothing of what the next trial takes.
        if not isinstance(outcome, Timed) or outcome.same_as is None:
            self._recent.append(seconds)
        if not isinstance(outcome, Failed):
            self._slowest_s = max(busy_s, self._slowest_s or 0.0)
