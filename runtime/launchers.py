"""Launchers of one layer: choose a variant for each step, reserve memory, plan and launch."""

# pyright: basic
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from numpy.typing import ArrayLike

from ..db.lookup.lookup import lookup
from ..kernel_templates.batch import SHORT_QUERY, Batch, BatchBucket, Lengths
from ..kernel_templates.errors import BatchError, GpuError, VariantError
from ..kernel_templates.gpu import INTERPRETER, Gpu
from ..kernel_templates.heuristic import candidates
from ..kernel_templates.launch.device import present_gpu
from ..kernel_templates.launch.launcher import Launcher, Settings, make_launcher
from ..kernel_templates.launch.memory import Workspace
from ..kernel_templates.launch.work_list import INTERPRETED
from ..kernel_templates.limits import next_power_of_two
from ..kernel_templates.registry import template_of
from ..kernel_templates.spec import AttentionSpec
from ..kernel_templates.variant import Variant
from .lengths import check_fits, read_lengths

Chooser = Callable[[AttentionSpec, BatchBucket, int, Gpu], Variant]
"""Chooses the variant to launch: `choose(spec, bucket, page_size, gpu)`."""

# The most keys of a segment of short and of long sequences in batch-invariant attention. Fewer keys give a single
# sequence more programs, but also more partial results to write and merge.
FIXED_SPLIT = (1024, 8192)
# The usual batch, for which batch-invariant attention chooses its variant, reduced to the attention's limits.
USUAL_SEQS, USUAL_CHUNK, USUAL_CONTEXT = 64, 512, 8192


def from_default_table(spec: AttentionSpec, bucket: BatchBucket, page_size: int, gpu: Gpu) -> Variant:
    """Variant from `db.lookup`: the user's database, the shipped configs or the heuristic."""
    return lookup(spec, bucket, page_size, gpu).variant


class Place(NamedTuple):
    """Device that an attention runs on."""

    # The CUDA device, or the CPU for the interpreter.
    device: torch.device
    # The GPU of this device, or the interpreter.
    gpu: Gpu

    def check_not_capturing(self) -> None:
        """Raise `BatchError` while the current stream is captured: a graph would repeat one step's plan."""
        if self.is_capturing():
            raise BatchError("a step cannot be planned while a graph is captured; call plan, and run once, before that")

    def is_capturing(self) -> bool:
        """True while a CUDA graph is captured on the current stream."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def present_place() -> Place:
    """Find the current CUDA device, or the CPU for the interpreter. Raises `GpuError` if there is neither."""
    if INTERPRETED:
        return Place(torch.device("cpu"), INTERPRETER)
    if not torch.cuda.is_available():
        raise GpuError("there is no NVIDIA GPU; with TRITON_INTERPRET=1 the kernels run on the CPU")
    device = torch.device("cuda", torch.cuda.current_device())
    return Place(device, _gpu(device))


# Cached, because reading the driver version starts a process.
@functools.cache
def _gpu(device: torch.device) -> Gpu:
    gpu = present_gpu()
    if gpu is None:
        raise GpuError(f"{device} is no NVIDIA GPU")
    return gpu


class Launchers:
    """Launchers of one layer: one for each variant that `choose` gives, and one for each captured graph.

    `limits` are the most sequences and query tokens of a step. With `batch_invariant` all steps have one variant, and
    splits do not depend on other sequences. All launchers share one workspace.
    """

    def __init__(
        self, spec: AttentionSpec, page_size: int, limits: tuple[int, int], place: Place, choose: Chooser,
        batch_invariant: bool,
    ) -> None:  # fmt: skip
        self._spec, self._page_size, self._choose = spec, page_size, choose
        self.place, self.limits = place, limits
        self._max_seqs, self._max_tokens = limits
        self._eager: dict[Variant, Launcher] = {}
        self.workspace = Workspace()
        self._usual = self._usual_bucket() if batch_invariant else None

    def eager(self, step: Lengths, return_lse: bool) -> Launcher:
        """Launcher with room for a step, kept for later steps of its variant."""
        variant = self._variant(step, return_lse)
        launcher = self._eager.get(variant) or self._make(variant, exact_grid=True)
        longest = step.longest_kv if self._usual else 0
        reserved = launcher.reserved or (0, 0)
        if step.num_seqs > reserved[0] or step.num_tokens > reserved[1] or longest > launcher.longest_kv:
            seqs, tokens = (max(old, next_power_of_two(new)) for old, new in
                            zip(reserved, (step.num_seqs, step.num_tokens), strict=True))
            before = self.workspace.generation
            launcher.reserve(min(seqs, self._max_seqs), min(tokens, self._max_tokens), self.place.device,
                             max(launcher.longest_kv, next_power_of_two(longest)))
            if self.workspace.generation != before:
                # Other launchers would keep the old, smaller workspace alive.
                self._eager.clear()
        self._eager[variant] = launcher
        return launcher

    def for_graph(self, largest: Lengths, return_lse: bool) -> Launcher:
        """Make a launcher with room for every step up to `largest`."""
        launcher = self._make(self._variant(largest, return_lse), exact_grid=False)
        launcher.reserve(largest.num_seqs, largest.num_tokens, self.place.device, largest.longest_kv)
        return launcher

    def _make(self, variant: Variant, exact_grid: bool) -> Launcher:
        split = FIXED_SPLIT if self._usual else None
        settings = Settings(exact_grid=exact_grid, fixed_split=split, workspace=self.workspace)
        return make_launcher(variant, self._spec, self.place.gpu, settings)

    def _variant(self, step: Lengths, return_lse: bool) -> Variant:
        """Choose the variant of a step, or, if it cannot write a needed log-sum-exp, the first candidate that can."""
        bucket = self._usual or BatchBucket.of(step)
        variant = self._choose(self._spec, bucket, self._page_size, self.place.gpu)
        if variant.page_size != self._page_size:
            raise VariantError(f"`choose` gave variant {variant.key()!r}; expected one for pages of {self._page_size}")
        if not return_lse or template_of(variant).writes_lse:
            return variant
        for other in candidates(self._spec, bucket, self._page_size, self.place.gpu):
            if template_of(other).writes_lse:
                return other
        raise VariantError(f"no variant that writes a log-sum-exp is valid for layer {self._spec.key()} on "
                           f"{self.place.gpu.name}, with pages of {self._page_size}")

    def _usual_bucket(self) -> BatchBucket:
        """Bucket of the usual batch, reduced to the limits."""
        seqs = min(USUAL_SEQS, self._max_seqs, self._max_tokens)
        chunk = min(USUAL_CHUNK, self._max_tokens - (seqs - 1))
        first = chunk if chunk > SHORT_QUERY else 1
        return BatchBucket.of(Batch(((first, USUAL_CONTEXT), *(((1, USUAL_CONTEXT),) * (seqs - 1)))))


class Step:
    """Planned step: lengths, and the launcher planned for them.

    If the launcher's template cannot write the log-sum-exp, a launcher of another template is planned at the first
    need.
    """

    def __init__(self, launchers: Launchers, lengths: Lengths) -> None:
        self.lengths = lengths
        self._launchers = launchers
        self._without_lse = self._planned(return_lse=False)
        self._with_lse = self._without_lse if template_of(self._without_lse.variant).writes_lse else None

    def launcher(self, return_lse: bool) -> Launcher:
        """Planned launcher; with `return_lse`, one that can write the log-sum-exp."""
        if not return_lse:
            return self._without_lse
        if self._with_lse is None:
            self._with_lse = self._planned(return_lse=True)
        return self._with_lse

    def check_fits(self, rows: int, seqs: int, keys: int) -> None:
        """Raise `BatchError` if the tensors of a run are too small; see `lengths.check_fits`."""
        check_fits(self.lengths, rows, seqs, keys)

    def _planned(self, return_lse: bool) -> Launcher:
        place = self._launchers.place
        place.check_not_capturing()
        launcher = self._made(return_lse)
        launcher.plan(self.lengths, place.device)
        return launcher

    def _made(self, return_lse: bool) -> Launcher:
        return self._launchers.eager(self.lengths, return_lse)


class GraphPlan(Step):
    """Plan of one captured graph, whose variant, addresses and grid are those of the largest step.

    A replay reads the captured tensors, so every step must fit into them.
    """

    def __init__(self, launchers: Launchers, largest: Lengths, activate: Callable[[Step], None]) -> None:
        self._largest = largest
        self._activate = activate
        # Query rows, sequences and keys that fit all captured tensors; None before a capture.
        self._captured: tuple[int, int, int] | None = None
        super().__init__(launchers, largest)

    def plan(self, query_lens: ArrayLike, context_lens: ArrayLike) -> None:
        """Plan the step of the next replay; lengths as in `HybridAttention.plan`.

        Raises `BatchError` if the step has more sequences or query tokens than the largest step or the captured
        tensors, or a sequence too long for the captured block table. In batch-invariant attention, also if a sequence
        is longer than the longest of the largest step.
        """
        lengths = read_lengths(query_lens, context_lens, *self._launchers.limits)
        if self._captured:
            check_fits(lengths, *self._captured)
        self._launchers.place.check_not_capturing()
        for launcher in {id(each): each for each in (self._without_lse, self._with_lse) if each}.values():
            launcher.plan(lengths, self._launchers.place.device)
        self.lengths = lengths
        self._activate(self)

    def check_fits(self, rows: int, seqs: int, keys: int) -> None:
        """See `Step.check_fits`. In a capture, record the smallest sizes of all captured tensors."""
        super().check_fits(rows, seqs, keys)
        if self._launchers.place.is_capturing():
            known = self._captured or (rows, seqs, keys)
            self._captured = min(known[0], rows), min(known[1], seqs), min(known[2], keys)

    def _made(self, return_lse: bool) -> Launcher:
        return self._launchers.for_graph(self._largest, return_lse)
