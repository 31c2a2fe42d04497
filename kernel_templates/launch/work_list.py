"""The base of launchers that run kernels over a work list: planning it, its memory, and room for later batches."""

# pyright: basic
from __future__ import annotations

import abc
import hashlib
from dataclasses import astuple, dataclass

import torch
from triton import knobs

from ..batch import Batch, IntArray, Lengths
from ..errors import BatchError
from ..gpu import Gpu
from ..spec import AttentionSpec
from ..template import Body
from ..variant import Variant
from .arguments import Partials, Work
from .launcher import DEFAULTS, Launcher, Settings, Tensors
from .memory import Upload, indexed
from .plan import ENTRY_FIELDS, ITEM_FIELDS, MERGE_FIELDS, WorkList, fixed_segments, work_list
from .room import Limit, Room
from .tiles import Tiles, cut_tiles

INTERPRETED = bool(knobs.runtime.interpret)
# Rows of an entry of the reduction. Few rows make many programs, but in the interpreter a program costs milliseconds.
COMBINE_ROWS = 16 if INTERPRETED else 4
# The uploaded buffer begins with the numbers of items, of entries and of items of long sequences. One more int32, and
# an even number of items, keep the rest aligned to 16 bytes, as the kernels are compiled for.
COUNTS = 4


@dataclass(frozen=True, slots=True)
class KernelConstants:
    """The attention kernel's compile-time choices, and the order of its items."""

    # The tile shapes for long and for short sequences.
    long: Body
    short: Body
    num_warps: int
    num_stages: int
    # K and V come through TMA.
    tma: bool = False
    # The programs of an item's KV heads follow one another, instead of those of a head's items.
    heads_first: bool = False
    # The dtype of partial outputs; their maxima and sums are float32.
    partials: torch.dtype = torch.float32
    # The last program of a tile merges the tile's partial results, instead of a reduction kernel.
    last_merges: bool = False
    # The order of items, as in `plan.work_list`.
    schedule: str = "long_first"


class WorkListLauncher(Launcher):
    """A launcher that plans a work list on the host. A template adds its tiles, how it cuts keys, and its kernels."""

    # Partial results that one item of a short sequence writes.
    short_partials = 1
    _device: torch.device | None = None
    _room = Room(0, 0, 0)
    _upload: Upload
    _work: Work
    _entries: torch.Tensor
    _partials: Partials
    # Items and entries that the grids have programs for.
    _num_items = 0
    _num_entries = 0
    # Planned items of long and of short sequences.
    _num_planned: tuple[int, int] = (0, 0)

    def __init__(self, variant: Variant, spec: AttentionSpec, gpu: Gpu, settings: Settings = DEFAULTS) -> None:
        super().__init__(variant, spec, gpu, settings)
        self.constants = self.make_constants()

    @abc.abstractmethod
    def make_constants(self) -> KernelConstants:
        """The constants of the kernel for this variant."""

    @abc.abstractmethod
    def segments(self, tiles: Tiles) -> IntArray:
        """The number of segments to cut each tile's keys into, without a fixed split."""

    @abc.abstractmethod
    def room(self, limit: Limit) -> Room:
        """The room for every batch within `limit`, without a fixed split."""

    @abc.abstractmethod
    def start_attention(self, tensors: Tensors) -> None:
        """Start the attention kernel on the planned items."""

    @abc.abstractmethod
    def start_reduction(self, tensors: Tensors) -> None:
        """Start the reduction on the planned entries."""

    def work_list(self, batch: Batch | Lengths) -> WorkList:
        """The work list of `batch`."""
        tiles, split = self.tiles(batch), self.settings.fixed_split
        segments = fixed_segments(tiles, *split) if split else self.segments(tiles)
        return work_list(tiles, segments, self.combine_rows, self.constants.schedule, self.short_partials)

    def tiles(self, batch: Batch | Lengths) -> Tiles:
        """The tiles of `batch`, in the shapes of the two bodies."""
        c, spec = self.constants, self.spec
        return cut_tiles(batch, spec.group_size, c.long, c.short, spec.sliding_window, spec.has_tree_mask)

    @property
    def combine_rows(self) -> int:
        """Rows that an entry of the reduction merges; 0 where the last program of a tile does it."""
        return 0 if self.constants.last_merges else COMBINE_ROWS

    @property
    def overlaps_reduction(self) -> bool:
        """True if the reduction is launched while the attention kernel runs: programmatic dependent launch (PDL)."""
        return self.gpu.capability >= (9, 0) and not self.constants.last_merges

    def reserve(self, num_seqs: int, num_tokens: int, device: torch.device | str, longest_kv: int = 0) -> None:
        """See `Launcher.reserve`."""
        c, split = self.constants, self.settings.fixed_split
        limit = Limit(num_seqs, num_tokens, self.spec.group_size, c.long, c.short, self.combine_rows,
                      self.short_partials)
        room = limit.fixed(*(max(1, -(-longest_kv // keys)) for keys in split)) if split else self.room(limit)
        self._make_room(room, device)
        super().reserve(num_seqs, num_tokens, device, longest_kv)

    def plan(self, batch: Batch | Lengths, device: torch.device | str) -> None:
        """Write the work list of `batch` to `device` and make room for its partial results.

        A later batch that fits the room changes no address and, when `padded`, no grid.
        """
        work = self.work_list(batch)
        self.check_reserved(batch.num_seqs, work.num_tokens)
        needed = Room(len(work.items), len(work.entries), work.partial_rows)
        if self._device != indexed(device) or not self._room.holds(needed):
            if self.reserved is not None:
                raise BatchError(f"room is reserved on {self._device} for {self._room}, not on {device} for {needed}")
            # The room never shrinks, so that two kinds of batches in turn need no new room each time.
            known = self._room if self._device == indexed(device) else Room(0, 0, 0)
            room = map(max, astuple(known), map(self.capacity, astuple(needed)))
            self._make_room(Room(*room), device)
        self._write(work)
        self._num_planned = (work.num_long, needed.items - work.num_long)
        grid = self._room if self.has_fixed_grid else needed
        self._num_items, self._num_entries = grid.items, grid.entries

    @property
    def has_fixed_grid(self) -> bool:
        """True if the grid is as large as the room, whatever is planned."""
        return (self.settings.padded or self.reserved is not None) and not self.settings.exact_grid

    def _write(self, work: WorkList) -> None:
        """Send `work` to the device in one copy."""
        array = self._upload.array()
        num_items, num_entries = len(work.items), len(work.entries)
        array[:3] = num_items, num_entries, work.num_long
        stop = COUNTS + ITEM_FIELDS * num_items
        array[COUNTS:stop].reshape(num_items, ITEM_FIELDS)[:] = work.items
        if self.constants.last_merges:
            start = int(self._work.merges.storage_offset())
            stop = start + MERGE_FIELDS * num_items
            array[start:stop].reshape(num_items, MERGE_FIELDS)[:] = work.merges
        elif num_entries:
            start = int(self._entries.storage_offset())
            stop = start + ENTRY_FIELDS * num_entries
            array[start:stop].reshape(num_entries, ENTRY_FIELDS)[:] = work.entries
        self._upload.send(stop)

    def _make_room(self, room: Room, device: torch.device | str) -> None:
        """Allocate the buffers of the kernels for `room`."""
        self._device, self._room = indexed(device), room
        even = room.items + room.items % 2
        num_merges = even if self.constants.last_merges else 0
        sizes = (COUNTS, ITEM_FIELDS * even, MERGE_FIELDS * num_merges, ENTRY_FIELDS * room.entries)
        self._upload = Upload(sum(sizes), device)
        counts, items, merges, entries = self._upload.buffer.split(sizes)
        self._work = Work(items.view(-1, ITEM_FIELDS), merges.view(-1, MERGE_FIELDS), counts)
        self._entries = entries.view(-1, ENTRY_FIELDS)
        rows = (self.spec.num_kv_heads, max(1, room.partial_rows))
        of_rows = (rows, torch.float32)
        outputs = ((*rows, self.spec.value_dim), self.constants.partials)
        # Each launch leaves zeros behind.
        counters = torch.zeros(rows if self.constants.last_merges else 1, dtype=torch.int32, device=device)
        out, maxima, sums = self.workspace.take((outputs, of_rows, of_rows), self._device)
        self._partials = Partials(out, maxima, sums, counters)

    def workspaces(self) -> tuple[torch.Tensor, ...]:
        """The partial outputs [kv_heads, rows, value_dim], and their maxima and sums [kv_heads, rows] in float32."""
        return self._partials[:3]

    @property
    def programs(self) -> tuple[int, ...]:
        """The programs of each launch of the attention kernel."""
        return (self._num_items * self.spec.num_kv_heads,)

    def launch_key(self) -> str:
        """A hash of the grids, of the work list read back from the device, and of the partial results' layout."""
        work, entries = self._work, self._entries
        counts = work.counts.tolist()
        layout = (self.programs, self._num_items, self._num_entries, self._room.partial_rows, counts)
        digest = hashlib.sha256(repr(layout).encode())
        for buffer, count in ((work.items, counts[0]), (work.merges, counts[0]), (entries, counts[1])):
            digest.update(buffer[:count].cpu().numpy().tobytes())
        return digest.hexdigest()

    def run(self, tensors: Tensors) -> None:
        """Launch the attention kernel, then the reduction if there is room for any sequence that is split."""
        self.start_attention(tensors)
        if not self.constants.last_merges and (self._num_entries or self.settings.compile_only):
            self.start_reduction(tensors)
