"""Which launcher runs a step: the variant that is chosen for it, with room for it, and a workspace shared by all."""

# pyright: basic
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..db.lookup.lookup import lookup
from ..kernel_templates.batch import SHORT_QUERY, Batch, BatchBucket, Lengths
from ..kernel_templates.errors import GpuError, VariantError
from ..kernel_templates.gpu import INTERPRETER, Gpu
from ..kernel_templates.heuristic import candidates
from ..kernel_templates.launch.cache_keys import settled_launcher
from ..kernel_templates.launch.device import present_gpu
from ..kernel_templates.launch.launcher import Launcher
from ..kernel_templates.launch.work_list import INTERPRETED
from ..kernel_templates.launch.workspace import Workspace
from ..kernel_templates.limits import next_power_of_two
from ..kernel_templates.registry import template_of
from ..kernel_templates.spec import AttentionSpec
from ..kernel_templates.variant import Variant

Chooser = Callable[[AttentionSpec, BatchBucket, int, Gpu], Variant]
"""Says which variant to launch for batches of a bucket, with pages of so many tokens, on a GPU."""

# The most keys of a segment of short and of long sequences in a batch-invariant attention. Fewer give a lone sequence
# more programs, and more partial results to write and merge.
FIXED_SPLIT = (1024, 8192)
# The batch that a batch-invariant attention's one variant is chosen for, as far as its limits allow.
USUAL_SEQS, USUAL_CHUNK, USUAL_CONTEXT = 64, 512, 8192


def from_default_table(spec: AttentionSpec, bucket: BatchBucket, page_size: int, gpu: Gpu) -> Variant:
    """The variant of `db.lookup`: the user's own database, what ships, then the heuristic."""
    return lookup(spec, bucket, page_size, gpu).variant


class Place(NamedTuple):
    """A device and what it is."""

    device: torch.device
    gpu: Gpu


def present_place() -> Place:
    """The current CUDA device, or the CPU where Triton interprets. Raises `GpuError` where there is neither."""
    if INTERPRETED:
        return Place(torch.device("cpu"), INTERPRETER)
    if not torch.cuda.is_available():
        raise GpuError("there is no NVIDIA GPU; with TRITON_INTERPRET=1 the kernels run on the CPU")
    device = torch.device("cuda", torch.cuda.current_device())
    return Place(device, _gpu(device))


# Asking for the driver's version starts a program.
@functools.cache
def _gpu(device: torch.device) -> Gpu:
    gpu = present_gpu()
    if gpu is None:
        raise GpuError(f"{device} is no NVIDIA GPU")
    return gpu


class Launchers:
    """The launchers of one layer, for steps of at most `limits`: sequences and query tokens.

    One for each variant that `choose` gives, and one for each captured graph. With `batch_invariant` all steps have
    one variant, and keys are cut without regard to other sequences.
    """

    def __init__(
        self, spec: AttentionSpec, page_size: int, limits: tuple[int, int], place: Place, choose: Chooser,
        batch_invariant: bool,
    ) -> None:  # fmt: skip
        self._spec, self._page_size, self._place, self._choose = spec, page_size, place, choose
        self._max_seqs, self._max_tokens = limits
        self._eager: dict[Variant, Launcher] = {}
        self.workspace = Workspace()
        self._usual = self._usual_bucket() if batch_invariant else None

    def eager(self, step: Lengths, return_lse: bool) -> Launcher:
        """The launcher for a step, kept by its variant, with room for it."""
        variant = self._variant(step, return_lse)
        launcher = self._eager.get(variant) or self._make(variant)
        launcher.exact_grid = True
        longest = step.longest_kv if self._usual else 0
        reserved = launcher.reserved or (0, 0)
        if step.num_seqs > reserved[0] or step.num_tokens > reserved[1] or longest > launcher.longest_kv:
            launcher.longest_kv = max(launcher.longest_kv, next_power_of_two(longest))
            seqs, tokens = (max(old, next_power_of_two(new)) for old, new in
                            zip(reserved, (step.num_seqs, step.num_tokens), strict=True))
            before = self.workspace.generation
            launcher.reserve(min(seqs, self._max_seqs), min(tokens, self._max_tokens), self._place.device)
            if self.workspace.generation != before:
                # The others would keep the memory that was outgrown.
                self._eager.clear()
        self._eager[variant] = launcher
        return launcher

    def for_graph(self, largest: Lengths, return_lse: bool) -> Launcher:
        """A new launcher with room for every step that is no larger than `largest`."""
        launcher = self._make(self._variant(largest, return_lse))
        launcher.longest_kv = largest.longest_kv
        launcher.reserve(largest.num_seqs, largest.num_tokens, self._place.device)
        return launcher

    def _make(self, variant: Variant) -> Launcher:
        launcher = settled_launcher(variant, self._spec, self._place.gpu)
        launcher.workspace = self.workspace
        launcher.fixed_split = FIXED_SPLIT if self._usual else None
        return launcher

    def _variant(self, step: Lengths, return_lse: bool) -> Variant:
        """The variant chosen for a step; the likeliest other one where that cannot write a log-sum-exp and must."""
        bucket = self._usual or BatchBucket.of(step)
        variant = self._choose(self._spec, bucket, self._page_size, self._place.gpu)
        if variant.page_size != self._page_size:
            raise VariantError(f"variant {variant.key()!r} was chosen for pages of {self._page_size}")
        if not return_lse or template_of(variant).writes_lse:
            return variant
        others = candidates(self._spec, bucket, self._page_size, self._place.gpu)
        return next(other for other in others if template_of(other).writes_lse)

    def _usual_bucket(self) -> BatchBucket:
        seqs = min(USUAL_SEQS, self._max_seqs, self._max_tokens)
        chunk = min(USUAL_CHUNK, self._max_tokens - (seqs - 1))
        first = chunk if chunk > SHORT_QUERY else 1
        return BatchBucket.of(Batch(((first, USUAL_CONTEXT), *(((1, USUAL_CONTEXT),) * (seqs - 1)))))
