"""The launchers of the plain Triton templates, and the reduction that `gluon_hopper` launches too."""

# pyright: basic
from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..batch import MAX_TOKENS, Batch, IntArray, Lengths
from ..launch.arguments import Code, Heads, Inputs, Layer, Strides
from ..launch.launcher import Tensors, features_of, offset_dtype, run_or_compile
from ..launch.plan import balanced_by_part, balanced_segments, equal_segments
from ..launch.room import Limit, Room
from ..launch.tiles import Tiles
from ..launch.work_list import COMBINE_ROWS, INTERPRETED, KernelConstants, WorkListLauncher
from ..limits import next_power_of_two
from .arithmetic import LOG2_E
from .combine import combine_kernel
from .kernel import attention_kernel, persistent_attention_kernel
from .templates import bodies, unified_body

COMBINE_WARPS = 4
# Programs of the reduction that run at once on an SM.
COMBINE_PROGRAMS = 8
# CUDA's limit of a grid's second dimension.
MOST_ROWS_OF_A_GRID = 65_535


class TritonLauncher(WorkListLauncher):
    """Launches the attention kernel in plain Triton and the reduction."""

    # True once both reductions, of one row a program and of more, are compiled.
    _has_both = False

    def start_attention(self, tensors: Tensors) -> None:
        """Start the attention kernel on the planned items."""
        self._start_items(tensors, self.constants, self._num_items)

    def _start_items(self, tensors: Tensors, constants: KernelConstants, num_items: int, part: str = "") -> None:
        """Start the attention kernel on `num_items` items, of one `part` only or of both."""
        # A grid's second dimension is limited, so with more items the items come first, whatever the variant says.
        heads_first = constants.heads_first and num_items <= MOST_ROWS_OF_A_GRID
        grid = (num_items, self.spec.num_kv_heads)
        self.start(attention_kernel, grid[::-1] if heads_first else grid, self._arguments(tensors, constants),
                   self._compile_time(tensors, constants) | {"PART": part, "HEADS_FIRST": heads_first})

    def _arguments(self, t: Tensors, constants: KernelConstants) -> tuple[Any, ...]:
        """The arguments of an attention kernel."""
        return (
            self._work, Inputs(t.q, t.k_cache, t.v_cache), *self._descriptors(t, constants), t.out, t.block_table,
            self._partials, self._partials.max.stride(0), features_of(t, self.spec),
            self.spec.softmax_scale * LOG2_E.value, Strides.of(t.q, t.out, t.k_cache, t.v_cache),
            t.block_table.stride(0),
        )  # fmt: skip

    def _compile_time(self, t: Tensors, c: KernelConstants) -> dict[str, Any]:
        """The compile-time arguments of an attention kernel, without those of the grid."""
        spec = self.spec
        # A window longer than any sequence must still compile to int32 arithmetic.
        window = min(spec.sliding_window or 0, MAX_TOKENS)
        return {
            "LAYER": Layer(spec.group_size, spec.head_dim, spec.value_dim, self.variant.page_size, window,
                           spec.logits_soft_cap),
            "LONG": c.long, "SHORT": c.short,
            "CODE": Code(c.num_stages, "tma" if c.tma else offset_dtype(t), c.last_merges, self._widen),
            "PDL": self.overlaps_reduction, "num_warps": c.num_warps, "num_stages": c.num_stages,
        }  # fmt: skip

    @property
    def _widen(self) -> bool:
        return INTERPRETED and self.spec.dtype == "bfloat16"

    def _descriptors(self, tensors: Tensors, constants: KernelConstants) -> tuple[Any, ...]:
        """TMA descriptors of K and V for the long and the short body, or four times None."""
        if not constants.tma:
            return (None,) * 4
        from triton.tools.tensor_descriptor import TensorDescriptor

        def describe(cache: torch.Tensor, block_n: int) -> Any:
            # Heads come before slots: the unit dimensions then lead, and the load is a plain two-dimensional tile.
            view = cache.permute(0, 2, 1, 3)
            # Columns past the head size are loaded as zeros.
            block = [1, 1, block_n, next_power_of_two(cache.shape[-1])]
            return TensorDescriptor(view, list(view.shape), list(view.stride()), block)

        caches = (tensors.k_cache, tensors.v_cache)
        widths = (constants.long.block_n, constants.short.block_n)
        return tuple(describe(cache, width) for width in widths for cache in caches)

    def start_reduction(self, tensors: Tensors) -> None:
        """Start the reduction on the planned entries."""
        t, spec = tensors, self.spec
        partials = self._partials._replace(counters=None)
        arguments = (self._entries, self._work.counts, t.out, partials, partials.max.stride(0), features_of(t, spec),
                     *t.out.stride()[:2])
        chosen = self._rows_of_program()
        # The first launch compiles both, so that no later batch waits for the compiler. A fixed split has only one.
        for rows in (chosen,) if self._has_both or self.settings.fixed_split else (1, COMBINE_ROWS):
            # With fewer rows a program takes more partial results, so that as many loads are in flight.
            constants = {"LAYER": Heads(spec.group_size, spec.value_dim), "ROWS": rows, "PARTIALS": max(8, 32 // rows),
                         "WIDEN": self._widen, "PDL": self.overlaps_reduction, "num_warps": COMBINE_WARPS}  # fmt: skip
            if self.overlaps_reduction:
                constants["launch_pdl"] = True
            grid = (self._num_entries, spec.num_kv_heads, COMBINE_ROWS // rows)
            if rows == chosen or self.settings.compile_only:
                self.start(combine_kernel, grid, arguments, constants)
            else:
                run_or_compile(combine_kernel, grid, arguments, constants, compile_only=True)
        self._has_both = True

    def _rows_of_program(self) -> int:
        """Rows that one program of the reduction merges: one where all programs run at once, else an entry's.

        A program of one row ends sooner, because it has more of the row's partial results in flight. The grid's count
        of entries decides, rounded up to a power of two so that padding makes no difference. A large reservation
        therefore mostly gives `COMBINE_ROWS`, for small batches too; a smaller one, or `exact_grid`, gives one. With a
        fixed split the count is always `COMBINE_ROWS`, because it decides in which order partial results are summed.
        """
        if self.settings.fixed_split is not None:
            return COMBINE_ROWS
        entries = next_power_of_two(max(1, self._num_entries))
        programs = entries * self.spec.num_kv_heads * COMBINE_ROWS
        return 1 if programs <= COMBINE_PROGRAMS * self.gpu.num_sms and not INTERPRETED else COMBINE_ROWS


class UnifiedLauncher(TritonLauncher):
    """Launches `unified`: tiles of one shape, and the same number of segments for every sequence."""

    def make_constants(self) -> KernelConstants:
        """One body, whatever the sequence."""
        (body,) = unified_body(self.variant)
        return KernelConstants(body, body, self.variant.number("num_warps"), self.variant.number("num_stages"))

    def segments(self, tiles: Tiles) -> IntArray:
        """Every tile's keys in `num_segments` equal ranges."""
        return equal_segments(tiles, self.variant.number("num_segments"))

    def room(self, limit: Limit) -> Room:
        """See `WorkListLauncher.room`."""
        return limit.equal(self.variant.number("num_segments"))


class BalancedLauncher(TritonLauncher):
    """Cuts keys into `waves` items for each SM; long and short sequences have tiles of their own shapes."""

    def make_constants(self) -> KernelConstants:
        """The two bodies, which are one when their shapes agree."""
        v = self.variant
        long, short = bodies(v)
        return KernelConstants(
            long,
            short,
            num_warps=v.number("num_warps"),
            num_stages=v.number("num_stages"),
            tma=v.text("kv_load") == "tma",
            heads_first=v.text("order") == "heads",
        )

    @property
    def num_balanced(self) -> float:
        """The items of a KV head that keys are balanced into; 0 where keys are not cut."""
        return self.variant.number("waves") * self.gpu.num_sms / self.spec.num_kv_heads

    def segments(self, tiles: Tiles) -> IntArray:
        """Key ranges for `waves` programs an SM."""
        if not self.num_balanced:
            return equal_segments(tiles, 1)
        return balanced_segments(tiles, self.num_balanced, self.variant.number("long_weight"))

    def room(self, limit: Limit) -> Room:
        """See `WorkListLauncher.room`."""
        return limit.balanced(self.num_balanced) if self.num_balanced else limit.equal(1)


class FusedLauncher(BalancedLauncher):
    """Launches `fused`: one program for each item and KV head."""

    def make_constants(self) -> KernelConstants:
        """The two bodies, and how partial results are ordered, stored and merged."""
        v = self.variant
        return dataclasses.replace(
            super().make_constants(),
            partials=getattr(torch, v.text("partials")),
            last_merges=v.text("reduction") == "last_program",
            schedule=v.text("schedule"),
        )


class PersistentLauncher(FusedLauncher):
    """Launches `persistent`: a fixed grid of programs that take one item of one KV head after another."""

    @property
    def programs(self) -> tuple[int, ...]:
        """A fixed number for each SM."""
        return (self.gpu.num_sms * self.variant.number("programs_per_sm"),)

    def start_attention(self, tensors: Tensors) -> None:
        """Start the fixed grid."""
        c = self.constants
        constants = self._compile_time(tensors, c) | {"HEADS_FIRST": c.heads_first, "HEADS": self.spec.num_kv_heads}
        self.start(persistent_attention_kernel, self.programs, self._arguments(tensors, c), constants)


class TwoLaunchLauncher(BalancedLauncher):
    """Launches `two_launch`: items of long sequences, then those of short ones, then one reduction."""

    # The items that the grids of the two launches have programs for. With reserved room both have all.
    _grids: tuple[int, int] = (0, 0)

    @property
    def num_balanced(self) -> float:
        """As many items for each launch as fill the GPU."""
        return 2 * super().num_balanced

    def segments(self, tiles: Tiles) -> IntArray:
        """Key ranges for `waves` programs an SM in each launch."""
        return balanced_by_part(tiles, self.num_balanced / 2) if self.num_balanced else equal_segments(tiles, 1)

    def plan(self, batch: Batch | Lengths, device: torch.device | str) -> None:
        """See `WorkListLauncher.plan`."""
        super().plan(batch, device)
        long, short = self._num_planned
        if self.reserved is not None and self.has_fixed_grid:
            self._grids = (self._num_items, self._num_items)
        elif self.has_fixed_grid:
            # Padded grids do not shrink.
            self._grids = (max(self._grids[0], self.capacity(long)), max(self._grids[1], self.capacity(short)))
        else:
            self._grids = (long, short)

    @property
    def programs(self) -> tuple[int, ...]:
        """The programs of both launches."""
        return tuple(num_items * self.spec.num_kv_heads for num_items in self._grids)

    def start_attention(self, tensors: Tensors) -> None:
        """Start the two launches, without one that has no items."""
        c = self.constants
        # Each launch compiles one body, so that it does not carry the registers and shared memory of the other.
        long = dataclasses.replace(c, short=c.long)
        short = dataclasses.replace(c, long=c.short, num_warps=self.variant.number("decode_num_warps"))
        for part, constants, num_items in zip(("long", "short"), (long, short), self._grids, strict=True):
            if num_items:
                self._start_items(tensors, constants, num_items, part)
