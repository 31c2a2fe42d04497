"""Keys and queries by which one key too many or too few changes a whole row of the output.

With random keys a check is blind at length: one wrong key among n moves a row by 1 / sqrt(n) of itself, which at 65,536
keys is less than eager attention of the same dtype rounds. So some keys are needles. All needles of a class share one
direction, and the directions of classes are orthogonal (rows of a Hadamard matrix). A query that is the sum of some
directions attends to the needles of those classes alone, and to each equally: their scores are the same number. The
classes are

    lattice   the first or last key, in turn, of every 16 keys of the context (no tile or page is smaller), up to
              `LATTICE_KEYS` of them; of longer contexts every second 16 keys, every third, ...
    edge      context keys at the first and last place of what a kernel may cut: the sequence, its sixteenths, its last
              page, every power of two times 16 keys and times a page, and the sixteenths of what a window leaves;
              values `NEEDLE_VALUE` times the lattice's
    window    the context keys where a row's window begins, in `num_cycled` classes one after the other, values as large
    own       every key of the chunk itself, likewise

and the keys that row i of sequence s attends to with query head h depend on (i + s + h) mod 4:

    0         lattice, edges, and the last keys it sees: the last before the causal edge, the first inside its window,
              its parent in the tree
    1         the keys of a random query that has nothing in common with the lattice and the edges
    2         keys it must not see: the one after the causal edge, the one before its window, the last token before it
              that is not on its branch; a row without such keys takes those of 0
    3         edges, and the last keys it sees; with a soft cap, at scores near the cap, those of the edges a bit lower
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from ..batch import TREE_TOKENS, Batch
from ..launch.launcher import query_start_locs
from ..spec import AttentionSpec

LATTICE_STEP = 16
LATTICE_KEYS = 4096
NEEDLE_VALUE = 2.0
MAX_CYCLED = 32
# One needle outweighs a million random keys: e^18 = 6.6e7, and those weigh e^(1/2) each in the mean.
NEEDLE_SCORE = 18.0
# The most of a small soft cap that a score reaches: nearer to the cap, all large scores become equal.
MOST_OF_CAP = 0.75
# With a large soft cap scores reach this: beyond it, bfloat16 queries cannot hold two scores that differ by a few.
MAX_NEAR_CAP = 2.0**8
# A normal deviate of this deviation, and the sum of a few directions of this length, are far from float16's 65,504.
MAX_QUERY_SIZE = 2.0**12

_LATTICE, _EDGE, _CYCLED, _NONE = 0, 1, 2, -1


@dataclass(frozen=True, slots=True)
class Keys:
    """Some keys of a batch: three CPU int64 tensors of one length."""

    sequence: torch.Tensor
    # The logical position in the sequence.
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


@dataclass(frozen=True, slots=True)
class Classes:
    """The classes of keys near the end of one sequence."""

    query_len: int
    context_len: int
    window: int | None
    num_cycled: int

    @classmethod
    def of(cls, spec: AttentionSpec, sequence: tuple[int, int]) -> Classes:
        """The classes of a sequence `(query_len, context_len)`."""
        return cls(*sequence, spec.sliding_window, num_cycled(spec))

    @property
    def rows(self) -> torch.Tensor:
        """The positions of the query tokens."""
        return self.context_len + torch.arange(self.query_len)

    @property
    def window_keys(self) -> torch.Tensor:
        """The context keys that are the last before the window of some row, or the first inside it."""
        if self.window is None or not self.query_len:
            return torch.arange(0)
        first = self.context_len - self.window
        return torch.arange(max(first, 0), max(0, min(first + self.query_len + 1, self.context_len)))

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """The classes of query tokens and of `window_keys` at these positions, -1 where there is neither."""
        own = positions - self.context_len
        of_window = _CYCLED + self.num_cycled + (own + (self.window or 0)) % self.num_cycled
        of_window = torch.where(torch.isin(positions, self.window_keys), of_window, _NONE)
        is_own = (own >= 0) & (own < self.query_len)
        return torch.where(is_own, _CYCLED + own % self.num_cycled, of_window)

    def watched(self, words: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Classes of the last keys each row sees, and of keys it must not see: two of [query_len, 3], padded with -1.

        `words` are the rows' words of the tree mask, empty where there is none.
        """
        nowhere = torch.full((self.query_len,), _NONE)
        first = before = parent = stranger = nowhere
        if self.window is not None:
            # In a window of one key, the first key is the row's own.
            first = nowhere if self.window == 1 else self.rows - self.window + 1
            before = self.rows - self.window
        if words:
            first, before = (torch.where(x < self.context_len, x, _NONE) for x in (first, before))
            parent, stranger = (torch.where(x < 0, _NONE, self.context_len + x) for x in relatives(words))
        inside, outside = (self.rows, first, parent), (self.rows + 1, before, stranger)
        return self.at(torch.stack(inside, dim=1)), self.at(torch.stack(outside, dim=1))


def relatives(words: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Each tree token's last earlier token that it sees, and the last that it does not; -1 where there is none.

    `words` are those of a tree mask.
    """

    def last(token: int, is_seen: int) -> int:
        return next((b for b in reversed(range(token)) if words[token] >> b & 1 == is_seen), _NONE)

    tokens = range(len(words))
    return torch.tensor([last(t, 1) for t in tokens]), torch.tensor([last(t, 0) for t in tokens])


def num_cycled(spec: AttentionSpec) -> int:
    """The number of classes of own keys, and of window keys: as many as leave all directions orthogonal."""
    return min(MAX_CYCLED, _width(spec) // 2 - 1)


def needle_keys(spec: AttentionSpec, batch: Batch, page_size: int) -> Keys:
    """The needles' places, each key at most once."""
    parts: list[tuple[int, torch.Tensor, torch.Tensor | int]] = []
    for sequence, (query_len, context_len) in enumerate(batch.sequences):
        classes = Classes.of(spec, (query_len, context_len))
        window = classes.window_keys
        edges = torch.tensor(edge_positions(query_len, context_len, page_size, spec.sliding_window), dtype=torch.int64)
        edges = edges[~torch.isin(edges, window)]
        lattice = _lattice_positions(context_len, sequence)
        parts += [
            (sequence, lattice[~torch.isin(lattice, torch.cat([edges, window]))], _LATTICE),
            (sequence, edges, _EDGE),
            (sequence, window, classes.at(window)),
            (sequence, classes.rows, classes.at(classes.rows)),
        ]
    return Keys.of(parts)


def edge_positions(query_len: int, context_len: int, page_size: int, window: int | None = None) -> list[int]:
    """The context keys just before and just after each place where a kernel may cut a sequence, in order."""
    kv_len = query_len + context_len
    cuts = {0, context_len, max(kv_len - 1, 0) // page_size * page_size}
    for first in {0, max(0, context_len + 1 - (window or kv_len))}:
        sixteenth = max(1, math.ceil((kv_len - first) / 16 / LATTICE_STEP)) * LATTICE_STEP
        cuts |= {*range(first, kv_len, sixteenth), *range(first // LATTICE_STEP * LATTICE_STEP, kv_len, sixteenth)}
    for unit in (LATTICE_STEP, page_size):
        cuts |= {unit << power for power in range(kv_len.bit_length())}
    return sorted({p for cut in cuts for p in (cut - 1, cut) if 0 <= p < context_len})


def query_size(spec: AttentionSpec) -> float:
    """The deviation of q that gives random scores one of about 1: a power of two, so that needles stay exact.

    Bounded, which makes random scores smaller where the scale is tiny, and the needles' keys larger.
    """
    return min(MAX_QUERY_SIZE, 2.0 ** round(-math.log2(spec.softmax_scale * math.sqrt(spec.head_dim))))


def needle_sizes(spec: AttentionSpec, k_scale: torch.Tensor | None) -> torch.Tensor:
    """The length of a needle's coordinates, as the cache holds them, for each KV head: [num_kv_heads] float64."""
    unit = spec.softmax_scale * query_size(spec) * _width(spec)
    wanted = _uncapped(spec, NEEDLE_SCORE) / (unit * _k_scales(spec, k_scale))
    # With three binary digits a cache in 8 bits holds it, and a needle's score is the same number in every dtype and
    # order of summation.
    digit = 2.0 ** (wanted.log2().floor() - 2)
    return (wanted / digit).ceil() * digit


def needle_scores(spec: AttentionSpec, k_scale: torch.Tensor | None) -> torch.Tensor:
    """The score of a needle that a row attends to, after the soft cap, for each KV head: [num_kv_heads] float64."""
    unit = spec.softmax_scale * query_size(spec) * _width(spec)
    scores = unit * needle_sizes(spec, k_scale) * _k_scales(spec, k_scale)
    cap = spec.logits_soft_cap
    return scores if cap is None else cap * (scores / cap).tanh()


def plant_queries(spec: AttentionSpec, batch: Batch, q: torch.Tensor, tree_mask: torch.Tensor | None) -> None:
    """Turn random queries [num_tokens, num_q_heads, head_dim] into those of the module's table, in place."""
    directions = torch.nn.functional.pad(query_size(spec) * _directions(spec), (0, 0, 0, 1)).to(q)
    inside, outside = (classes.to(q.device) for classes in _watched(spec, batch, tree_mask))
    lengths = torch.tensor([query_len for query_len, _ in batch.sequences])
    sequences = torch.arange(batch.num_seqs).repeat_interleave(lengths)
    rows = torch.cat([torch.arange(query_len) for query_len, _ in batch.sequences])
    turn = (rows + sequences).to(q.device)[:, None] + torch.arange(spec.num_q_heads, device=q.device)
    has_none = (outside == _NONE).all(1)[:, None]
    turn = torch.where((turn % 4 == 2) & has_none, 0, turn % 4)[..., None]
    seen_last = directions[inside].sum(1)[:, None]
    times, lead = _near_the_cap(spec)
    choices = (
        seen_last + directions[_EDGE] + directions[_LATTICE],
        _without_needles(spec, q),
        directions[outside].sum(1)[:, None],
        times * (directions[_EDGE] + (1 + lead) * seen_last),
    )
    for number, choice in enumerate(choices):
        q.copy_(torch.where(turn == number, choice, q))


def plant_keys(
    spec: AttentionSpec,
    needle_class: torch.Tensor,
    places: tuple[torch.Tensor, torch.Tensor],
    caches: tuple[torch.Tensor, torch.Tensor],
    k_scale: torch.Tensor | None,
) -> None:
    """Turn random keys and values into needles of the classes [num_keys], at `places` (page, slot) of K and V."""
    is_lattice = (needle_class == _LATTICE).to(caches[0].device)[:, None]
    classes = needle_class.to(caches[0].device)
    sizes = needle_sizes(spec, k_scale).float()
    for head in range(spec.num_kv_heads):
        k, v = (cache[:, :, head] for cache in caches)
        k[places] = (sizes[head] * _directions(spec)).to(k)[classes]
        values = v[places].float()
        # Lattice values have one length, so that each of thousands counts the same in their sum.
        v[places] = torch.where(is_lattice, values.sign(), NEEDLE_VALUE * values).to(v)


def _watched(
    spec: AttentionSpec, batch: Batch, tree_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Classes.watched` for all rows of the batch: two of [num_tokens, 3]."""
    words = [] if tree_mask is None else [int(word) for word in tree_mask]
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for sequence, start in zip(batch.sequences, query_start_locs(batch), strict=False):
        heeded = words[start : start + sequence[0]] if 1 < sequence[0] <= TREE_TOKENS else []
        pairs.append(Classes.of(spec, sequence).watched(heeded))
    inside, outside = zip(*pairs, strict=True)
    return torch.cat(inside), torch.cat(outside)


def _without_needles(spec: AttentionSpec, q: torch.Tensor) -> torch.Tensor:
    """q without its part along the many needles, whose equal scores would hide a maximum that is not tracked."""
    needles = torch.nn.functional.normalize(_directions(spec)[: _EDGE + 1]).to(q)
    return q - q @ needles.T @ needles


def _near_the_cap(spec: AttentionSpec) -> tuple[float, float]:
    """The factor that brings a query's needle scores near the soft cap, and the extra share that some of them get.

    Without the cap the latter would weigh about e^3 times as much as the others. Both are powers of two.
    """
    if spec.logits_soft_cap is None:
        return 1.0, 0.0
    score = _uncapped(spec, NEEDLE_SCORE)
    times = 2.0 ** round(math.log2(max(1.0, min(spec.logits_soft_cap, MAX_NEAR_CAP) / score)))
    times = min(times, 2 * MAX_QUERY_SIZE / query_size(spec))
    return times, min(1.0, 2.0 ** round(math.log2(3 / (times * score))))


def _uncapped(spec: AttentionSpec, score: float) -> float:
    """The score that the soft cap turns into `score`, or into `MOST_OF_CAP` of the cap where that is less."""
    cap = spec.logits_soft_cap
    return score if cap is None else cap * math.atanh(min(score / cap, MOST_OF_CAP))


def _k_scales(spec: AttentionSpec, k_scale: torch.Tensor | None) -> torch.Tensor:
    return torch.ones(spec.num_kv_heads, dtype=torch.float64) if k_scale is None else k_scale.double().cpu()


def _width(spec: AttentionSpec) -> int:
    """The number of nonzero coordinates of a direction: the largest power of two in the head size."""
    return 1 << (spec.head_dim.bit_length() - 1)


def _directions(spec: AttentionSpec) -> torch.Tensor:
    """A direction for each class: [2 + 2 * num_cycled, head_dim], of 1 and -1, and 0 past the largest power of two."""
    width = _width(spec)
    sylvester = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    hadamard = functools.reduce(torch.kron, [sylvester] * (width.bit_length() - 1))
    return torch.nn.functional.pad(hadamard[: _CYCLED + 2 * num_cycled(spec)], (0, spec.head_dim - width))


def _lattice_positions(context_len: int, sequence: int) -> torch.Tensor:
    units = math.ceil(context_len / LATTICE_STEP)
    stride = max(1, math.ceil(units / LATTICE_KEYS))
    unit = torch.arange(sequence % stride, units, stride)
    last = torch.arange(len(unit)) % 2
    positions = unit * LATTICE_STEP + last * (LATTICE_STEP - 1)
    return positions[positions < context_len]
