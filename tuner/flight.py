"""The measurement of one variant that is under way, while the search chooses others and has them compiled."""

from __future__ import annotations

from ..kernel_templates.outcome import Failed, Outcome
from .costs import Costs
from .measure.jobs import MeasureJob
from .run import Executor


class Flight:
    """The `job` of measuring a variant, begun as this is made, for at most `limit_s` seconds and until `deadline`."""

    def __init__(self, executor: Executor, job: MeasureJob, limit_s: float, deadline: float) -> None:
        self._executor = executor
        self._deadline = deadline
        self._start, self._busy_s = executor.clock(), executor.worker.busy_s
        self._end = 0.0
        self._future = executor.worker.submit(job, limit_s, deadline)
        self._future.add_done_callback(self._note_end)

    @property
    def busy_s(self) -> float:
        """The seconds for which the worker has been busy since."""
        return self._executor.worker.busy_s - self._busy_s

    def land(self, costs: Costs) -> Outcome | None:
        """The outcome, once there is one that the variant is to blame for; `costs` takes note of what it took.

        Raises `JobError` when its turn on the GPU did not come before the time was up.
        """
        outcome = self._future.result()
        # The callback of a future may come just after its result.
        end = self._end or self._executor.clock()
        costs.note(outcome, end - self._start, self.busy_s)
        # A variant is not to blame for a budget that ran out.
        is_cut_short = isinstance(outcome, Failed) and end >= self._deadline
        return None if is_cut_short else outcome

    def _note_end(self, _: object) -> None:
        self._end = self._executor.clock()
