"""The check of a variant's output: every row and head is compared with a reference on its own."""

from __future__ import annotations

import bisect
import math

import torch

from ...kernel_templates.batch import Batch, minimum_traffic
from ...kernel_templates.launch.launcher import Launcher, Tensors, query_start_locs
from ...kernel_templates.oracle.inputs import make_tensors
from ...kernel_templates.oracle.reference import paged_attention
from ...kernel_templates.outcome import Check
from ...kernel_templates.spec import AttentionSpec

# A row's error may be this many times that of eager attention in the same dtype, as in FlashAttention's tests.
EAGER_FACTOR = 2.0
# Or this many machine epsilons of the row's norm: rounding the result once gives at most half of one.
ROW_FACTOR = 0.75
# In float32, intermediate values are no wider than the result and are summed in another order than eager's. Products
# rounded to TF32 give errors of some thousand epsilons.
FLOAT32_FACTOR = 32.0
# The same for a log-sum-exp, which is float32 for every dtype.
LSE_FACTOR = 64.0
# The oracle is float64 up to this many operations, which take a second or two on a CPU or on a GPU slow in float64.
FLOAT64_FLOPS = 2**34


class Checker:
    """Inputs for one batch of one layer, their right outputs, and the tolerated error of each row and head.

    The error of a row and head is the Euclidean norm over value_dim of its difference from the oracle, which is eager
    attention in float64, or in float32 for large batches of narrower layers. Inputs are drawn
    from `seed`, or given as `tensors`; where these have an `lse`, the log-sum-exp is judged too.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        batch: Batch,
        page_size: int,
        device: torch.device | str,
        seed: int = 0,
        tensors: Tensors | None = None,
    ) -> None:
        self.spec = spec
        self.batch = batch
        self.device = torch.device(device)
        self.tensors = tensors or make_tensors(spec, batch, page_size, device, seed)
        dtype = self.tensors.out.dtype
        _, flops = minimum_traffic(spec, batch)
        is_wide = dtype == torch.float32 or flops <= FLOAT64_FLOPS
        self.oracle_dtype = torch.float64 if is_wide else torch.float32
        self.oracle, self.oracle_lse = paged_attention(self.tensors, batch, spec, self.oracle_dtype)
        eager, eager_lse = paged_attention(self.tensors, batch, spec, dtype)
        # The log-sum-exp of a row that sees no key is infinite.
        size = self.oracle_lse.abs().nan_to_num(posinf=0.0)
        # A weight's error grows with its score, which the log-sum-exp bounds. With a soft cap it grows with the cap,
        # because a capped score is a difference of numbers as large.
        size = size.clamp(min=spec.logits_soft_cap or 0.0)
        factor = FLOAT32_FACTOR + 2 * size if dtype == torch.float32 else ROW_FACTOR
        # Below this norm, all numbers of the dtype are equally far apart.
        smallest = torch.finfo(dtype).smallest_normal * math.sqrt(spec.value_dim)
        floor = factor * torch.finfo(dtype).eps * _norm(self.oracle).clamp(min=smallest)
        self.tolerance = torch.maximum(EAGER_FACTOR * self._errors(eager), floor)
        floor = LSE_FACTOR * torch.finfo(torch.float32).eps * size.clamp(min=1)
        self.lse_tolerance = torch.maximum(EAGER_FACTOR * self._lse_errors(eager_lse), floor)

    def check(self, launcher: Launcher) -> Check:
        """Plan and run `launcher` on the inputs, with NaN in outputs and workspaces before, and judge the outputs."""
        launcher.plan(self.batch, self.device)
        outputs = [self.tensors.out] if self.tensors.lse is None else [self.tensors.out, self.tensors.lse]
        for tensor in (*outputs, *launcher.workspaces()):
            tensor.fill_(torch.nan)
        launcher.run(self.tensors)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.judge(*outputs)

    def judge(self, out: torch.Tensor, lse: torch.Tensor | None = None) -> Check:
        """Judge `out` [num_tokens, num_q_heads, value_dim] by its worst row and head.

        The natural log-sum-exp `lse` [num_tokens, num_q_heads] is judged too where it is given. A NaN anywhere fails
        the check and is reported before any finite error.
        """
        ratios = self._errors(out) / self.tolerance
        of_lse = torch.zeros_like(ratios) if lse is None else self._lse_errors(lse) / self.lse_tolerance
        # maximum returns NaN if either is NaN, and argmax takes the first NaN for the largest.
        token, head = divmod(int(torch.maximum(ratios, of_lse).argmax()), self.spec.num_q_heads)
        worst, worst_lse = float(ratios[token, head]), float(of_lse[token, head])
        judged = "its error"
        if not worst >= worst_lse and not math.isnan(worst):
            worst, judged = worst_lse, "its log-sum-exp's error"
        return Check(worst, detail=f"{self._place(token, head)}: {judged} is {worst:.3g} times the tolerance")

    def _errors(self, out: torch.Tensor) -> torch.Tensor:
        return _norm(out.to(self.oracle_dtype) - self.oracle)

    def _lse_errors(self, lse: torch.Tensor) -> torch.Tensor:
        errors = (lse.to(self.oracle_dtype) - self.oracle_lse).abs()
        # Where a row sees no key both are infinite: equal, although their difference is NaN.
        return errors.masked_fill(lse == self.oracle_lse, 0)

    def _place(self, token: int, head: int) -> str:
        starts = query_start_locs(self.batch)
        sequence = bisect.bisect_right(starts, token) - 1
        query_len, context_len = self.batch.sequences[sequence]
        return (f"sequence {sequence} ({query_len} query tokens at {context_len}), "
                f"row {token - starts[sequence]}, query head {head}")


def _norm(rows: torch.Tensor) -> torch.Tensor:
    return rows.square().sum(dim=-1).sqrt()
