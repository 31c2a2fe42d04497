"""What is planned: one step, and the launchers that run it."""

# pyright: basic
from __future__ import annotations

from typing import TYPE_CHECKING

from numpy.typing import ArrayLike

from ..kernel_templates.batch import Lengths
from ..kernel_templates.launch.launcher import Launcher
from ..kernel_templates.registry import template_of
from .lengths import check_fits

if TYPE_CHECKING:
    from .hybrid_attention import HybridAttention


class Step:
    """A planned step. A template that writes no log-sum-exp is joined by one that does when one is first asked for."""

    def __init__(self, attention: HybridAttention) -> None:
        self._attention = attention
        self.lengths = Lengths.of([1], [0])
        self._launcher: Launcher | None = None
        self._with_lse: Launcher | None = None

    def begin(self, lengths: Lengths) -> None:
        """Plan a step with the variant that suits it."""
        self.lengths, self._with_lse = lengths, None
        self._launcher = self._planned(return_lse=False)
        if template_of(self._launcher.variant).writes_lse:
            self._with_lse = self._launcher

    def launcher(self, return_lse: bool) -> Launcher:
        """The planned launcher that writes the log-sum-exp, or the likely faster one that need not."""
        if not return_lse:
            assert self._launcher is not None
            return self._launcher
        if self._with_lse is None:
            self._with_lse = self._planned(return_lse=True)
        return self._with_lse

    def _planned(self, return_lse: bool) -> Launcher:
        launcher = self._made(return_lse)
        self._attention.check_not_capturing()
        launcher.plan(self.lengths, self._attention.device)
        return launcher

    def _made(self, return_lse: bool) -> Launcher:
        return self._attention.launchers.eager(self.lengths, return_lse)


class GraphPlan(Step):
    """The plan of one captured size: the variant chosen for its largest step, with addresses and a grid that stay.

    A replay reads the very tensors that `run` was captured with: a step must have room in them.
    """

    def __init__(self, attention: HybridAttention, largest: Lengths) -> None:
        super().__init__(attention)
        self._largest = largest
        self._captured: tuple[int, int, int] | None = None
        self.begin(largest)

    def note_captured(self, rows: int, seqs: int, keys: int) -> None:
        """Remember what captured tensors have room for, as in `check_fits`: the least of each."""
        known = self._captured or (rows, seqs, keys)
        self._captured = min(known[0], rows), min(known[1], seqs), min(known[2], keys)

    def plan(self, query_lens: ArrayLike, context_lens: ArrayLike) -> None:
        """Plan a step that the captured graph is then replayed for; lengths as in `HybridAttention.plan`.

        Raises `BatchError` for more sequences or query tokens than the largest step has, or the captured tensors have
        rows for; for longer sequences than the captured block table has pages for, or, in a batch-invariant attention,
        than the longest of the largest step.
        """
        lengths = self._attention.checked(query_lens, context_lens)
        if self._captured:
            check_fits(lengths, *self._captured)
        self._attention.check_not_capturing()
        for launcher in {id(each): each for each in (self._launcher, self._with_lse) if each}.values():
            launcher.plan(lengths, self._attention.device)
        self.lengths = lengths
        self._attention.use(self)

    def _made(self, return_lse: bool) -> Launcher:
        return self._attention.launchers.for_graph(self._largest, return_lse)
