"""Launches the kernel over a work list: what the templates of this family share."""

# pyright: basic
from __future__ import annotations

import abc
import hashlib
from dataclasses import astuple, dataclass
from typing import Any

import torch
from triton import knobs

from ..batch import MAX_TOKENS, Batch, IntArray, Lengths
from ..errors import BatchError
from ..gpu import Gpu
from ..limits import Body, next_power_of_two
from ..spec import AttentionSpec
from ..triton_family.attention import attention_kernel
from ..triton_family.combine import combine_kernel
from ..variant import Variant
from .launcher import LOG2_E, Launcher, Tensors, features_of, offset_dtype, run_or_compile
from .plan import ENTRY_FIELDS, ITEM_FIELDS, MERGE_FIELDS, WorkList, fixed_segments, work_list
from .room import Limit, Room
from .tiles import Tiles, cut_tiles
from .upload import Upload

INTERPRETED = bool(knobs.runtime.interpret)
# Rows of an entry of the reduction: few, so that there are many programs, but for the interpreter, where each program
# costs milliseconds.
COMBINE_ROWS = 16 if INTERPRETED else 4
COMBINE_WARPS = 4
# So many programs of the reduction run at once on a multiprocessor.
COMBINE_PROGRAMS = 8
# CUDA's limit of a grid's second dimension.
MOST_ROWS_OF_A_GRID = 65_535
# What stands first in the uploaded buffer: the numbers of items, of entries and of items of long sequences. One more
# and an even number of items keep what follows aligned to 16 bytes, as the kernels are compiled for.
COUNTS = 4


@dataclass(frozen=True, slots=True)
class KernelConstants:
    """What the attention kernel is compiled with: the bodies for long and for short sequences, and how.

    `partials` is the dtype of partial outputs; with `last_merges` the last program of a tile merges them.
    """

    long: Body
    short: Body
    num_warps: int
    num_stages: int
    tma: bool = False
    heads_first: bool = False
    partials: torch.dtype = torch.float32
    last_merges: bool = False

    @classmethod
    def of_two_bodies(cls, variant: Variant, **more: Any) -> KernelConstants:
        """Those of a variant with a body for long sequences and one for short ones, which may be the same."""
        return cls(
            Body(variant.number("block_m"), variant.number("block_n")),
            Body(variant.number("decode_block_m"), variant.number("decode_block_n")),
            num_warps=variant.number("num_warps"),
            num_stages=variant.number("num_stages"),
            tma=variant.text("kv_load") == "tma",
            heads_first=variant.text("order") == "heads",
            **more,
        )


class WorkListLauncher(Launcher):
    """A launcher that plans a work list on the host. A template says its bodies and how it cuts the batch."""

    # How many partial results an item of a short sequence writes.
    short_partials = 1
    _device: torch.device | None = None
    _room = Room(0, 0, 0)
    _upload: Upload
    _items: torch.Tensor
    _merges: torch.Tensor
    _entries: torch.Tensor
    _counts: torch.Tensor
    _partial: tuple[torch.Tensor, ...]
    _counters: torch.Tensor
    _num_items = 0
    _num_entries = 0
    # Whether both reductions, of one row a program and of more, are compiled. With a fixed split there is one.
    _has_both = False
    # Items of long and of short sequences.
    _num_planned: tuple[int, int] = (0, 0)

    def __init__(self, variant: Variant, spec: AttentionSpec, gpu: Gpu) -> None:
        super().__init__(variant, spec, gpu)
        self.constants = self.make_constants()

    @abc.abstractmethod
    def make_constants(self) -> KernelConstants:
        """The constants of the kernel for this variant."""

    @abc.abstractmethod
    def segments(self, tiles: Tiles) -> IntArray:
        """Into how many segments to cut each tile's keys."""

    def work_list(self, batch: Batch | Lengths) -> WorkList:
        """The work list of `batch`."""
        tiles = self.tiles(batch)
        segments = fixed_segments(tiles, *self.fixed_split) if self.fixed_split else self.segments(tiles)
        schedule = str(self.variant.as_dict().get("schedule", "long_first"))
        return work_list(tiles, segments, self.combine_rows, schedule, self.short_partials)

    def tiles(self, batch: Batch | Lengths) -> Tiles:
        """The tiles of `batch`, in the shapes of the two bodies."""
        c, spec = self.constants, self.spec
        return cut_tiles(batch, spec.group_size, c.long, c.short, spec.sliding_window, spec.has_tree_mask)

    @property
    def num_balanced(self) -> float:
        """How many items of a KV head the keys are balanced into: `waves` for each multiprocessor; 0 for no balance."""
        waves = self.variant.as_dict().get("waves", 0)
        return int(waves) * self.gpu.num_sms / self.spec.num_kv_heads

    @property
    def combine_rows(self) -> int:
        """Rows that one program of the reduction merges; 0 where the last program of a tile does it."""
        return 0 if self.constants.last_merges else COMBINE_ROWS

    @property
    def overlaps_reduction(self) -> bool:
        """Whether the reduction is launched while the attention kernel runs: programmatic dependent launch (PDL)."""
        return self.gpu.capability >= (9, 0) and not self.constants.last_merges

    def room(self, limit: Limit) -> Room:
        """The room for every batch within `limit`: balanced by `waves`, else in `num_segments` segments."""
        if self.fixed_split is not None:
            return limit.fixed(*(max(1, -(-self.longest_kv // keys)) for keys in self.fixed_split))
        if self.num_balanced:
            return limit.balanced(self.num_balanced)
        return limit.equal(int(self.variant.as_dict().get("num_segments", 1)))

    def reserve(self, num_seqs: int, num_tokens: int, device: torch.device | str) -> None:
        """See `Launcher.reserve`."""
        c = self.constants
        limit = Limit(num_seqs, num_tokens, self.spec.group_size, c.long, c.short, self.combine_rows,
                      self.short_partials)
        self._make_room(self.room(limit), device)
        super().reserve(num_seqs, num_tokens, device)

    def plan(self, batch: Batch | Lengths, device: torch.device | str) -> None:
        """Write the work list of `batch` to `device` and make room for its partial results.

        Planning anew for a batch that the room is enough for changes no address and, when `padded`, no grid.
        """
        work = self.work_list(batch)
        self.check_reserved(batch.num_seqs, work.num_tokens)
        needed = Room(len(work.items), len(work.entries), work.partial_rows)
        if self._device != indexed(device) or not self._room.holds(needed):
            if self.reserved is not None:
                raise BatchError(f"room is reserved on {self._device} for {self._room}, not on {device} for {needed}")
            # What there was room for before stays: batches of two kinds in turn need no new room each time.
            known = self._room if self._device == indexed(device) else Room(0, 0, 0)
            room = map(max, astuple(known), map(self.capacity, astuple(needed)))
            self._make_room(Room(*room), device)
        self._write(work)
        self._num_planned = (work.num_long, needed.items - work.num_long)
        grid = self._room if self.has_fixed_grid else needed
        self._num_items, self._num_entries = grid.items, grid.entries

    @property
    def has_fixed_grid(self) -> bool:
        """Whether the grid is as large as the room, whatever is planned."""
        return (self.padded or self.reserved is not None) and not self.exact_grid

    def _write(self, work: WorkList) -> None:
        """Send `work` to the device in one copy."""
        array = self._upload.array()
        num_items, num_entries = len(work.items), len(work.entries)
        array[:3] = num_items, num_entries, work.num_long
        stop = COUNTS + ITEM_FIELDS * num_items
        array[COUNTS:stop].reshape(num_items, ITEM_FIELDS)[:] = work.items
        if self.constants.last_merges:
            start = int(self._merges.storage_offset())
            stop = start + MERGE_FIELDS * num_items
            array[start:stop].reshape(num_items, MERGE_FIELDS)[:] = work.merges
        elif num_entries:
            start = int(self._entries.storage_offset())
            stop = start + ENTRY_FIELDS * num_entries
            array[start:stop].reshape(num_entries, ENTRY_FIELDS)[:] = work.entries
        self._upload.send(stop)

    def _make_room(self, room: Room, device: torch.device | str) -> None:
        """Allocate what the kernels read and write, for as much as `room` says."""
        self._device, self._room = indexed(device), room
        even = room.items + room.items % 2
        num_merges = even if self.constants.last_merges else 0
        sizes = (COUNTS, ITEM_FIELDS * even, MERGE_FIELDS * num_merges, ENTRY_FIELDS * room.entries)
        self._upload = Upload(sum(sizes), device)
        self._counts, items, merges, entries = self._upload.buffer.split(sizes)
        self._items, self._merges = items.view(-1, ITEM_FIELDS), merges.view(-1, MERGE_FIELDS)
        self._entries = entries.view(-1, ENTRY_FIELDS)
        rows = (self.spec.num_kv_heads, max(1, room.partial_rows))
        of_rows = (rows, torch.float32)
        outputs = ((*rows, self.spec.value_dim), self.constants.partials)
        self._partial = self.workspace.take((outputs, of_rows, of_rows), self._device)
        # Each launch leaves zeros behind.
        self._counters = torch.zeros(rows if self.constants.last_merges else 1, dtype=torch.int32, device=device)

    def workspaces(self) -> tuple[torch.Tensor, ...]:
        """The partial outputs [kv_heads, rows, value_dim], and their maxima and sums [kv_heads, rows] in float32."""
        return self._partial

    @property
    def programs(self) -> tuple[int, ...]:
        """The programs of each launch of the attention kernel."""
        return (self._num_items * self.spec.num_kv_heads,)

    def launch_key(self) -> str:
        """A hash of the grids and the work list, read back from the device, and of the layout of partial results."""
        counts = self._counts.tolist()
        layout = (self.programs, self._num_items, self._num_entries, self._room.partial_rows, counts)
        digest = hashlib.sha256(repr(layout).encode())
        for buffer, count in ((self._items, counts[0]), (self._merges, counts[0]), (self._entries, counts[1])):
            digest.update(buffer[:count].cpu().numpy().tobytes())
        return digest.hexdigest()

    def run(self, tensors: Tensors) -> None:
        """Launch the planned work list, then the reduction if there is room for any sequence that is split."""
        self._start_attention(tensors)
        if not self.constants.last_merges and (self._num_entries or self.compile_only):
            self._start_combine(tensors)

    @property
    def _widen(self) -> bool:
        return INTERPRETED and self.spec.dtype == "bfloat16"

    def _start_attention(self, tensors: Tensors) -> None:
        """Start the attention kernel on the planned items."""
        self._start_items(tensors, self.constants, self._num_items)

    def _start_items(self, tensors: Tensors, constants: KernelConstants, num_items: int, part: str = "") -> None:
        """Start the attention kernel on `num_items` items, of one `part` only or of all."""
        # More items than a grid has rows come in the other order, whatever the variant asks for.
        heads_first = constants.heads_first and num_items <= MOST_ROWS_OF_A_GRID
        grid = (num_items, self.spec.num_kv_heads)
        self.start(attention_kernel, grid[::-1] if heads_first else grid, self._arguments(tensors, constants),
                   self._compile_time(tensors, constants) | {"PART": part, "HEADS_FIRST": heads_first})

    def _arguments(self, t: Tensors, constants: KernelConstants) -> tuple[Any, ...]:
        """The arguments of an attention kernel."""
        return (
            self._items, self._merges, self._counts, t.q, t.k_cache, t.v_cache, *self._descriptors(t, constants),
            t.out, t.block_table, *self._partial, self._counters, self._partial[1].stride(0),
            features_of(t, self.spec), self.spec.softmax_scale * LOG2_E, *t.q.stride()[:2], *t.out.stride()[:2],
            *t.k_cache.stride()[:3], *t.v_cache.stride()[:3], t.block_table.stride(0),
        )  # fmt: skip

    def _compile_time(self, t: Tensors, c: KernelConstants) -> dict[str, Any]:
        """The compile-time arguments of an attention kernel, the grid's aside."""
        spec = self.spec
        return {
            "GROUP": spec.group_size, "HEAD_DIM": spec.head_dim, "VALUE_DIM": spec.value_dim,
            "PAGE_SIZE": self.variant.page_size,
            # A longer window than any sequence compiles to int32 arithmetic all the same.
            "WINDOW": min(spec.sliding_window or 0, MAX_TOKENS), "SOFT_CAP": spec.logits_soft_cap,
            "LONG_M": c.long.block_m, "LONG_N": c.long.block_n, "SHORT_M": c.short.block_m, "SHORT_N": c.short.block_n,
            "STAGES": c.num_stages, "LOAD": "tma" if c.tma else offset_dtype(t),
            "LAST_MERGES": c.last_merges, "WIDEN": self._widen,
            "PDL": self.overlaps_reduction, "num_warps": c.num_warps, "num_stages": c.num_stages,
        }  # fmt: skip

    def _start_combine(self, t: Tensors) -> None:
        spec = self.spec
        arguments = (self._entries, self._counts, t.out, *self._partial, self._partial[1].stride(0),
                     features_of(t, spec), *t.out.stride()[:2])
        chosen = self._rows_of_program()
        # The first time both are compiled, so that no other batch waits for the compiler.
        for rows in (chosen,) if self._has_both or self.fixed_split else (1, COMBINE_ROWS):
            # Of fewer rows more partial results, so that as many loads are on their way together.
            partials = max(8, 32 // rows)
            constants = {"GROUP": spec.group_size, "VALUE_DIM": spec.value_dim, "ROWS": rows, "PARTIALS": partials,
                         "WIDEN": self._widen, "PDL": self.overlaps_reduction, "num_warps": COMBINE_WARPS}  # fmt: skip
            if self.overlaps_reduction:
                constants["launch_pdl"] = True
            grid = (self._num_entries, spec.num_kv_heads, COMBINE_ROWS // rows)
            if rows == chosen or self.compile_only:
                self.start(combine_kernel, grid, arguments, constants)
            else:
                run_or_compile(combine_kernel, grid, arguments, constants, compile_only=True)
        self._has_both = True

    def _rows_of_program(self) -> int:
        """How many rows one program of the reduction merges: one of an entry's where so many programs run at once.

        Then each is over sooner: it has more partial results of its row on their way together. The count of entries
        that decides is that of the grid, rounded up to a power of two so that a padded one makes no difference. Where
        room is reserved, that is the room for the largest batch, for which the grid has programs: so there mostly
        `COMBINE_ROWS` are merged, of a small batch too; a smaller reservation, or `exact_grid`, merges one. With a
        fixed split always as many, because they decide in which order partial results are summed.
        """
        if self.fixed_split is not None:
            return COMBINE_ROWS
        entries = next_power_of_two(max(1, self._num_entries))
        programs = entries * self.spec.num_kv_heads * COMBINE_ROWS
        return 1 if programs <= COMBINE_PROGRAMS * self.gpu.num_sms and not INTERPRETED else COMBINE_ROWS

    def _descriptors(self, tensors: Tensors, constants: KernelConstants) -> tuple[Any, ...]:
        """TMA descriptors of K and V for the long and the short body, or four times None."""
        if not constants.tma:
            return (None,) * 4
        from triton.tools.tensor_descriptor import TensorDescriptor

        def describe(cache: torch.Tensor, block_n: int) -> Any:
            # Heads before slots, so that the unit dimensions lead and the load is a plain two-dimensional tile.
            view = cache.permute(0, 2, 1, 3)
            # Past a head's own numbers, a load gives zeros.
            block = [1, 1, block_n, next_power_of_two(cache.shape[-1])]
            return TensorDescriptor(view, list(view.shape), list(view.stride()), block)

        caches = (tensors.k_cache, tensors.v_cache)
        widths = (constants.long.block_n, constants.short.block_n)
        return tuple(describe(cache, width) for width in widths for cache in caches)


def indexed(device: torch.device | str) -> torch.device:
    """`device` as a tensor on it names it: "cuda" is the current one."""
    named = torch.device(device)
    if named.type == "cuda" and named.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return named
