"""Attention as an engine calls it: planned once for each step, run once for each layer."""

# pyright: basic
from __future__ import annotations

from numbers import Integral
from typing import Literal, TypedDict, Unpack, overload

import torch
from numpy.typing import ArrayLike

from ..kernel_templates.batch import MAX_SEQUENCES, MAX_TOKENS
from ..kernel_templates.errors import BatchError, SpecError
from ..kernel_templates.launch.launcher import ANY, Tensors, check_tensor
from ..kernel_templates.spec import AttentionSpec
from ..kernel_templates.template import PAGE_MULTIPLE
from ..kernel_templates.variant import Variant
from .custom_op import hybrid_attention_op, register
from .launchers import Chooser, GraphPlan, Launchers, Step, from_default_table, present_place
from .lengths import LengthBuffers, read_lengths

# The most tensor layouts remembered as checked; an engine has few.
MOST_REMEMBERED = 4096


class FeatureTensors(TypedDict, total=False):
    """Tensors that only layers with a feature need; see `Tensors`."""

    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    q_scale: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    tree_mask: torch.Tensor | None


FEATURES = tuple(FeatureTensors.__annotations__)


class HybridAttention:
    """Attention layers of one spec over a paged KV cache, for batches of at most `max_tokens` and `max_seqs`.

    Call `plan` once for each step, then `run` for each layer of this spec. Pages have a multiple of 16 tokens. Raises
    `GpuError` if there is neither a GPU nor the interpreter.

    Device: the CUDA device that is current here must also be current at each `run`; with the interpreter, the CPU. All
    steps and layers must run on one stream, from one thread at a time, because they share plans and workspaces.

    Compilation: the first runs compile. A later step compiles if it gets another variant or another shape of reduction.

    `choose` gives the variant to launch (default: `from_default_table`; for another table: `lambda *asked:
    table.lookup(*asked).variant`). It gets the bucket of a step, not its batch, so no answer has the source "exact".

    `batch_invariant`: one variant serves all batches, and KV is split by a sequence's own lengths only. A row's result
    then depends, bit for bit, only on its own sequence: queries, keys, values, query length and context length. Other
    chunks of the same tokens give another query length, so results may differ.

    CUDA graphs: call `plan_graph` with the largest batch for the graph, capture `run`, then call `GraphPlan.plan`
    before each replay. `torch.compile` takes `run` as one operator; keep `plan` outside.
    """

    def __init__(
        self, spec: AttentionSpec, page_size: int, max_tokens: int, max_seqs: int, *,
        choose: Chooser = from_default_table, batch_invariant: bool = False,
    ) -> None:  # fmt: skip
        if not isinstance(spec, AttentionSpec):
            raise SpecError(f"the layer must be an AttentionSpec, such as AttentionSpec(32, 8, 128), not {spec!r}")
        if not _is_whole(page_size, MAX_TOKENS) or page_size % PAGE_MULTIPLE:
            raise SpecError(f"page_size must be a multiple of {PAGE_MULTIPLE} from {PAGE_MULTIPLE}, not {page_size!r}")
        for name, limit, most in (("max_tokens", max_tokens, MAX_TOKENS), ("max_seqs", max_seqs, MAX_SEQUENCES)):
            if not _is_whole(limit, most):
                raise BatchError(f"{name} must be a whole number from 1 to {most}, not {limit!r}")
        self.spec, self.page_size, self.max_tokens, self.max_seqs = spec, page_size, max_tokens, max_seqs
        place = present_place()
        self.device = place.device
        self._index = self.device.index
        self._launchers = Launchers(spec, page_size, (max_seqs, max_tokens), place, choose, batch_invariant)
        self._lengths = LengthBuffers(max_seqs, self.device)
        self._remembered: set[object] = set()
        self._dtypes = tuple(getattr(torch, name) for name in (spec.query_dtype, spec.cache_dtype, spec.dtype))
        self._step: Step | None = None
        self.handle = register(self)

    @property
    def query_start_loc(self) -> torch.Tensor:
        """Index of each planned sequence's first query token, then their total: [max_seqs + 1] int32, fixed address."""
        return self._lengths.query_start_loc

    @property
    def kv_lens(self) -> torch.Tensor:
        """Context and query tokens of each planned sequence, then 0: [max_seqs] int32, fixed address."""
        return self._lengths.kv_lens

    @property
    def variant(self) -> Variant:
        """Variant that `run` would launch. Raises `BatchError` before the first plan."""
        return self._planned().launcher(return_lse=False).variant

    def plan(self, query_lens: ArrayLike, context_lens: ArrayLike) -> None:
        """Plan the next step from each sequence's number of query tokens and of earlier tokens in the cache.

        Lengths are lists, arrays or tensors of integers on the host; they are copied. Before `run`, the keys and values
        of the query tokens must be in the cache too. Nothing waits for the GPU. Raises `BatchError` beyond the limits.
        """
        self._activate(Step(self._launchers, read_lengths(query_lens, context_lens, self.max_seqs, self.max_tokens)))

    def plan_graph(self, query_lens: ArrayLike, context_lens: ArrayLike) -> GraphPlan:
        """Plan the largest batch of the next captured graph, and choose the graph's variant for it.

        The graph then serves every batch that has no more sequences and query tokens, and whose keys fit the captured
        block table. With `batch_invariant`, no sequence may be longer than the longest here. Call `run` once before the
        capture, because the first launch compiles.
        """
        largest = read_lengths(query_lens, context_lens, self.max_seqs, self.max_tokens)
        planned = GraphPlan(self._launchers, largest, self._activate)
        self._activate(planned)
        return planned

    @overload
    def run(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor,
        out: torch.Tensor | None = None, return_lse: Literal[False] = False, **features: Unpack[FeatureTensors],
    ) -> torch.Tensor: ...  # fmt: skip

    @overload
    def run(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor,
        out: torch.Tensor | None = None, *, return_lse: Literal[True], **features: Unpack[FeatureTensors],
    ) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip

    def run(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor,
        out: torch.Tensor | None = None, return_lse: bool = False, **features: Unpack[FeatureTensors],
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Launch the latest plan on one layer's tensors on the current stream; return `out` or `(out, lse)`.

        `Tensors` describes the tensors; `features` are those that the layer needs. Without `out` a new tensor is made.
        q, out and block_table may have more rows than planned; extra rows are not touched. lse is the log-sum-exp
        [num_tokens, num_q_heads] float32. Raises `SpecError` for tensors or features that do not fit the layer or
        another current device, and `BatchError` for too few rows.
        """
        if not isinstance(q, torch.Tensor):
            raise SpecError(f"q must be a tensor, not {type(q).__name__}")
        if out is None:
            out = q.new_empty((*q.shape[:2], self.spec.value_dim), dtype=self._dtypes[2])
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
        f = features.pop
        given = (f("sinks", None), f("alibi_slopes", None), f("q_scale", None), f("k_scale", None),
                 f("v_scale", None), f("tree_mask", None))  # fmt: skip
        if features:
            raise SpecError(f"run takes no tensor {next(iter(features))!r}; expected some of {', '.join(FEATURES)}")
        if torch.compiler.is_compiling():
            hybrid_attention_op(q, k_cache, v_cache, block_table, out, lse, *given, self.handle)
        else:
            self.launch(q, k_cache, v_cache, block_table, out, lse, *given)
        return out if lse is None else (out, lse)

    def launch(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor,
        out: torch.Tensor, lse: torch.Tensor | None, *features: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Run into given tensors, for the operator of `torch.compile`; `features` in the order of `FeatureTensors`."""
        step = self._planned()
        self._check(q, k_cache, v_cache, block_table, out)
        if self._index is not None and torch.cuda.current_device() != self._index:
            raise SpecError(f"the current device must be this attention's, {self.device}, not "
                            f"cuda:{torch.cuda.current_device()}")
        rows, (seqs, pages) = min(q.shape[0], out.shape[0]), block_table.shape
        mask = features[-1]
        if isinstance(mask, torch.Tensor) and mask.dim():
            rows = min(rows, mask.shape[0])
        step.check_fits(rows, seqs, pages * self.page_size)
        lengths = self._lengths
        step.launcher(lse is not None).run(Tensors(
            q, k_cache, v_cache, block_table, lengths.query_start_loc, lengths.kv_lens, out, *features, lse=lse
        ))

    def _activate(self, step: Step) -> None:
        """Make `step` the one that `run` launches."""
        self._lengths.write(step.lengths)
        self._step = step

    def _planned(self) -> Step:
        if self._step is None:
            raise BatchError("nothing is planned: call plan before run")
        return self._step

    def _check(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        """Raise `SpecError` for tensors that do not fit the layer. A layout is checked once."""
        given = (q, k_cache, v_cache, block_table, out)
        try:
            signature = (q.shape[1:], k_cache.shape[1:], v_cache.shape[1:], out.shape[1:], block_table.dim(),
                         k_cache.shape[0] == v_cache.shape[0], *[(t.dtype, t.device, t.stride(-1)) for t in given])
        except (AttributeError, IndexError):
            # An argument is no tensor or has no axis. The checks below name it.
            signature = None
        if signature in self._remembered:
            return
        spec, (q_dtype, cache_dtype, dtype) = self.spec, self._dtypes
        cache = (ANY, self.page_size, spec.num_kv_heads)
        for name, tensor, shape, wanted in (
            ("q", q, (ANY, spec.num_q_heads, spec.head_dim), q_dtype),
            ("k_cache", k_cache, (*cache, spec.head_dim), cache_dtype),
            ("v_cache", v_cache, (*cache, spec.value_dim), cache_dtype),
            ("out", out, (ANY, spec.num_q_heads, spec.value_dim), dtype),
            ("block_table", block_table, (ANY, ANY), torch.int32),
        ):
            check_tensor(name, tensor, shape, wanted, self.device)
        if len(k_cache) != len(v_cache):
            raise SpecError("k_cache and v_cache must have the same number of pages, not "
                            f"{len(k_cache)} and {len(v_cache)}")
        if len(self._remembered) >= MOST_REMEMBERED:
            self._remembered.clear()
        self._remembered.add(signature)


def _is_whole(number: object, most: int) -> bool:
    """True if `number` is an integer from 1 to `most`, and no bool."""
    return isinstance(number, Integral) and not isinstance(number, bool) and 1 <= int(number) <= most
