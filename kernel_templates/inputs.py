"""Inputs in which one key too many or too few changes a whole row of the output.

A norm is blind at length: among n random keys a wrong one moves a row by 1 / sqrt(n) of itself, at 65,536 less than an
eager attention of the same dtype rounds. So some keys are needles. All needles of one class share one direction, the
directions of classes are orthogonal (rows of a Hadamard matrix), and a query that is the sum of some directions attends
to the needles of those classes alone, and to each equally: their scores are exactly the same number. The classes are

    lattice   the first or last key, in turn, of every 16 keys of the context (no tile or page is smaller), up to
              `LATTICE_KEYS` of them; of longer contexts every second 16 keys, every third, ...
    edge      context keys at the first and last place of what a kernel may cut: the sequence, its sixteenths, its last
              page, and every power of two times 16 keys and times a page; values `NEEDLE_VALUE` times the lattice's
    own       every key of the chunk itself, in `OWN_CLASSES` classes one after the other, values as large

and what row i of sequence s attends to with query head h depends on (i + s + h) mod 4:

    0         lattice, edges, and the last key it sees (just inside the causal edge)
    1         what a random query attends to that has nothing in common with the lattice and the edges
    2         the first key that it must not see (just outside); the last row, where there is none, does as 0
    3         edges, and the last key it sees

Everything that must not be read is NaN: the output, physical page 0, the last page, slots after a sequence's last key.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import torch

from .batch import Batch
from .launch import Tensors, query_start_locs
from .spec import AttentionSpec

LATTICE_STEP = 16
LATTICE_KEYS = 4096
NEEDLE_VALUE = 2.0
OWN_CLASSES = 32
# One needle outweighs a million random keys: e^18 = 6.6e7, and those weigh e^(1/2) each in the mean.
NEEDLE_SCORE = 18.0
# A normal deviate of this deviation, and the sum of three directions of this length, are far from float16's 65,504.
MAX_QUERY_SIZE = 2.0**12

_LATTICE, _EDGE, _OWN = 0, 1, 2


def make_tensors(
    spec: AttentionSpec,
    batch: Batch,
    page_size: int,
    device: torch.device | str,
    seed: int,
    packed: bool = False,
    needles: bool = True,
) -> Tensors:
    """Random inputs for `batch`, made on `device`, in pages handed out at random; what must not be read is NaN.

    With `packed`, K and V are views of one tensor [num_pages, num_kv_heads, page_size, 2 * head_dim]. Without `needles`
    all of q, K and V is random: enough for timing. The block table has a column more than the longest sequence needs;
    its entries past a sequence's pages name page 0.
    """
    generator = torch.Generator(device).manual_seed(seed)
    block_table, num_pages = _block_table(batch, page_size, seed)
    k_cache, v_cache = _random_cache(spec, (num_pages, page_size), generator, packed)
    q = _random(spec, (batch.num_tokens, spec.num_q_heads, spec.head_dim), generator)
    q *= _query_size(spec)
    if needles:
        _plant_queries(spec, batch, q)
        _plant_keys(spec, needle_keys(batch, page_size), block_table, (k_cache, v_cache))
    for cache in (k_cache, v_cache):
        cache[[0, -1]] = torch.nan
        cache[_places(_unused_slots(batch, page_size), block_table, cache)] = torch.nan
    return Tensors(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=block_table.to(device),
        query_start_loc=torch.tensor(query_start_locs(batch), dtype=torch.int32, device=device),
        kv_lens=torch.tensor(batch.kv_lens, dtype=torch.int32, device=device),
        out=torch.full_like(q, torch.nan),
    )


@dataclass(frozen=True, slots=True)
class Keys:
    """Some keys of a batch: three CPU int64 tensors of one length. `position` is the logical one in the sequence."""

    sequence: torch.Tensor
    position: torch.Tensor
    needle_class: torch.Tensor

    @classmethod
    def of(cls, parts: list[tuple[int, torch.Tensor, torch.Tensor | int]]) -> Keys:
        """Join `(sequence, positions, class or classes)`."""
        return cls(
            torch.cat([torch.full_like(positions, sequence) for sequence, positions, _ in parts]),
            torch.cat([positions for _, positions, _ in parts]),
            torch.cat([torch.zeros_like(positions) + classes for _, positions, classes in parts]),
        )


def needle_keys(batch: Batch, page_size: int) -> Keys:
    """Where the needles stand, each key at most once."""
    parts: list[tuple[int, torch.Tensor, torch.Tensor | int]] = []
    for sequence, (query_len, context_len) in enumerate(batch.sequences):
        edges = torch.tensor(edge_positions(query_len, context_len, page_size), dtype=torch.int64)
        lattice = _lattice_positions(context_len, sequence)
        own = torch.arange(query_len)
        parts += [
            (sequence, lattice[~torch.isin(lattice, edges)], _LATTICE),
            (sequence, edges, _EDGE),
            (sequence, context_len + own, _OWN + own % OWN_CLASSES),
        ]
    return Keys.of(parts)


def edge_positions(query_len: int, context_len: int, page_size: int) -> list[int]:
    """The context keys just before and just after each place where a kernel may cut a sequence, in order."""
    kv_len = query_len + context_len
    sixteenth = math.ceil(kv_len / 16 / LATTICE_STEP) * LATTICE_STEP
    cuts = {0, context_len, (kv_len - 1) // page_size * page_size, *range(0, kv_len, sixteenth)}
    for unit in (LATTICE_STEP, page_size):
        cuts |= {unit << power for power in range(kv_len.bit_length())}
    return sorted({p for cut in cuts for p in (cut - 1, cut) if 0 <= p < context_len})


def _lattice_positions(context_len: int, sequence: int) -> torch.Tensor:
    units = math.ceil(context_len / LATTICE_STEP)
    stride = max(1, math.ceil(units / LATTICE_KEYS))
    unit = torch.arange(sequence % stride, units, stride)
    last = torch.arange(len(unit)) % 2
    positions = unit * LATTICE_STEP + last * (LATTICE_STEP - 1)
    return positions[positions < context_len]


def _unused_slots(batch: Batch, page_size: int) -> Keys:
    return Keys.of([(s, torch.arange(n, math.ceil(n / page_size) * page_size), 0) for s, n in enumerate(batch.kv_lens)])


def _block_table(batch: Batch, page_size: int, seed: int) -> tuple[torch.Tensor, int]:
    counts = [math.ceil(kv_len / page_size) for kv_len in batch.kv_lens]
    order = 1 + torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed))
    table = torch.zeros(batch.num_seqs, max(counts) + 1, dtype=torch.int32)
    for row, (start, count) in enumerate(zip(itertools.accumulate(counts, initial=0), counts, strict=False)):
        table[row, :count] = order[start : start + count]
    return table, sum(counts) + 2


def _random(spec: AttentionSpec, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    empty = torch.empty(shape, dtype=getattr(torch, spec.dtype), device=generator.device)
    return empty.normal_(generator=generator)


def _random_cache(
    spec: AttentionSpec, pages: tuple[int, int], generator: torch.Generator, packed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if packed:
        storage = _random(spec, (pages[0], spec.num_kv_heads, pages[1], 2 * spec.head_dim), generator)
        by_slot = storage.transpose(1, 2)
        return by_slot[..., : spec.head_dim], by_slot[..., spec.head_dim :]
    shape = (*pages, spec.num_kv_heads, spec.head_dim)
    return _random(spec, shape, generator), _random(spec, shape, generator)


def _query_size(spec: AttentionSpec) -> float:
    """The deviation of q that gives random scores one of about 1: a power of two, so that needles stay exact.

    Bounded, which makes random scores smaller where the scale is tiny, and the needles' keys larger.
    """
    return min(MAX_QUERY_SIZE, 2.0 ** round(-math.log2(spec.softmax_scale * math.sqrt(spec.head_dim))))


def _directions(spec: AttentionSpec) -> torch.Tensor:
    """A direction for each class: [2 + OWN_CLASSES, head_dim], of 1 and -1, and 0 past the largest power of two."""
    width = 1 << (spec.head_dim.bit_length() - 1)
    sylvester = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    hadamard = functools.reduce(torch.kron, [sylvester] * (width.bit_length() - 1))
    return torch.nn.functional.pad(hadamard[: _OWN + OWN_CLASSES], (0, spec.head_dim - width))


def _plant_queries(spec: AttentionSpec, batch: Batch, q: torch.Tensor) -> None:
    directions = (_query_size(spec) * _directions(spec)).to(q)
    rows = torch.cat([torch.arange(query_len) for query_len, _ in batch.sequences]).to(q.device)
    lengths = torch.tensor([query_len for query_len, _ in batch.sequences])
    sequences = torch.arange(batch.num_seqs).repeat_interleave(lengths).to(q.device)
    is_last = (rows + 1 == lengths.to(q.device)[sequences])[:, None]
    turn = (rows + sequences)[:, None] + torch.arange(spec.num_q_heads, device=q.device)
    turn = torch.where((turn % 4 == 2) & is_last, 0, turn % 4)[..., None]
    edges_and_own = directions[_EDGE] + directions[_OWN + rows % OWN_CLASSES][:, None]
    outside = directions[_OWN + (rows + 1) % OWN_CLASSES][:, None]
    inside = edges_and_own + directions[_LATTICE] * (turn == 0)
    # Without what it has in common with the many needles, whose equal scores would hide a maximum that is not tracked.
    needles = torch.nn.functional.normalize(_directions(spec)[: _EDGE + 1]).to(q)
    free = q - q @ needles.T @ needles
    q.copy_(torch.where(turn == 2, outside, torch.where(turn == 1, free, inside)))


def _plant_keys(
    spec: AttentionSpec, keys: Keys, block_table: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor]
) -> None:
    k_cache, v_cache = caches
    directions = _directions(spec)
    width = int(directions[0].count_nonzero())
    # Of few digits, so that a needle's score is the same number in every dtype and order of summation.
    size = math.ceil(4 * NEEDLE_SCORE / (spec.softmax_scale * _query_size(spec) * width)) / 4
    vectors = (size * directions).to(k_cache)[keys.needle_class.to(k_cache.device)]
    places = _places(keys, block_table, k_cache)
    k_cache[places] = vectors[:, None].expand(-1, spec.num_kv_heads, -1)
    values = v_cache[places]
    is_lattice = (keys.needle_class == _LATTICE).to(values.device)[:, None, None]
    # Lattice values are of one length, so that each of thousands counts the same in their sum.
    v_cache[places] = torch.where(is_lattice, values.sign(), NEEDLE_VALUE * values)


def _places(keys: Keys, block_table: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index a cache with these: the physical page and the slot of each key."""
    page_size = cache.shape[1]
    pages = block_table[keys.sequence, keys.position // page_size].long()
    return pages.to(cache.device), (keys.position % page_size).to(cache.device)
