"""Is a variant's output right? Every row and head is judged on its own."""

from __future__ import annotations

import bisect

import torch

from ..kernel_templates.batch import Batch, minimum_traffic
from ..kernel_templates.inputs import make_tensors
from ..kernel_templates.launch import Launcher, query_start_locs
from ..kernel_templates.outcome import Check
from ..kernel_templates.reference import paged_attention
from ..kernel_templates.spec import AttentionSpec

# A row may err by this many times what eager attention in the same dtype errs by on it, as
# FlashAttention's tests allow.
EAGER_FACTOR = 2.0
# Or by this many machine epsilons of its norm: rounding the result once errs by half of one at most.
ROW_FACTOR = 0.75
# The oracle is float64 up to this many operations: a second or two on a CPU, or on a GPU that is slow in it.
FLOAT64_FLOPS = 2**34


class Checker:
    """Inputs for one batch of one layer, what is right for them, and how far from it each row and head may be.

    The error of a row and head is the Euclidean norm over head_dim of its difference from the oracle, which is eager
    attention in float64, or in float32 for large batches. With `packed`, K and V are views of one tensor.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        batch: Batch,
        page_size: int,
        device: torch.device | str,
        seed: int = 0,
        packed: bool = False,
    ) -> None:
        self.spec = spec
        self.batch = batch
        self.device = torch.device(device)
        self.tensors = make_tensors(spec, batch, page_size, device, seed, packed)
        _, flops = minimum_traffic(spec, batch)
        self.oracle_dtype = torch.float64 if flops <= FLOAT64_FLOPS else torch.float32
        self.oracle, _ = paged_attention(self.tensors, batch, spec, self.oracle_dtype)
        eager, _ = paged_attention(self.tensors, batch, spec, self.tensors.q.dtype)
        floor = ROW_FACTOR * torch.finfo(eager.dtype).eps * _norm(self.oracle)
        self.tolerance = torch.maximum(EAGER_FACTOR * self._errors(eager), floor)

    def check(self, launcher: Launcher) -> Check:
        """Plan and run `launcher` on the inputs, its output and workspaces filled with NaN before, and judge it."""
        launcher.plan(self.batch, self.device)
        for tensor in (self.tensors.out, *launcher.workspaces()):
            tensor.fill_(torch.nan)
        launcher.run(self.tensors)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.judge(self.tensors.out)

    def judge(self, out: torch.Tensor) -> Check:
        """How far `out` [num_tokens, num_q_heads, head_dim] is from what is right: its worst row and head.

        A NaN anywhere fails the check: it is reported before any finite error.
        """
        ratios = self._errors(out) / self.tolerance
        # argmax takes the first NaN for the largest.
        token, head = divmod(int(ratios.argmax()), self.spec.num_q_heads)
        worst = float(ratios[token, head])
        return Check(worst, detail=f"{self._place(token, head)}: its error is {worst:.3g} times what is tolerated")

    def _errors(self, out: torch.Tensor) -> torch.Tensor:
        return _norm(out.to(self.oracle_dtype) - self.oracle)

    def _place(self, token: int, head: int) -> str:
        starts = query_start_locs(self.batch)
        sequence = bisect.bisect_right(starts, token) - 1
        query_len, context_len = self.batch.sequences[sequence]
        return (f"sequence {sequence} ({query_len} query tokens at {context_len}), "
                f"row {token - starts[sequence]}, query head {head}")


def _norm(rows: torch.Tensor) -> torch.Tensor:
    return rows.square().sum(dim=-1).sqrt()
