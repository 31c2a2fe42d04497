"""Attention that splits the keys as a kernel does, right and with every bug that a check must see.

`SplitAttention` is right: partial results over segments in float32, probabilities rounded to the dtype, merged by their
log-sum-exp, with every feature of the layer. Each other class gets one step wrong, and only for one sequence, the
victim; the rest of its output is the oracle's. All work on logical positions, so that a segment is any list of keys and
a tile any run of them.
"""

from __future__ import annotations

import torch

from attention_tuner.kernel_templates.batch import TREE_TOKENS
from attention_tuner.kernel_templates.launch.launcher import query_start_locs
from attention_tuner.tuner.measure.check import Checker

Partial = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class SplitAttention:
    """Right. `tile` and `segment` are in keys; `place` in [0, 1] says where in the sequence a bug strikes.

    `strikes_somewhere` is false for a bug that strikes everywhere.
    """

    strikes_somewhere = False
    most_tree_tokens: int = TREE_TOKENS

    def __init__(self, checker: Checker, tile: int, segment: int, place: float = 0.5) -> None:
        self.checker, self.tensors, self.spec = checker, checker.tensors, checker.spec
        self.tile, self.segment, self.place = tile, segment, place
        self.scale = self.spec.softmax_scale

    def output(self, victim: int) -> torch.Tensor:
        """The output of the whole batch, all but the victim's rows from the oracle."""
        return self.merge(victim, self.partials(victim))

    def lse(self, victim: int) -> torch.Tensor:
        """The log-sum-exp of the whole batch, all but the victim's rows from the oracle."""
        lse = self.checker.oracle_lse.float()
        rows = slice(*query_start_locs(self.checker.batch)[victim : victim + 2])
        lse[rows] = self.merged_lse([*self.partials(victim), *self.sink_partials(victim)]).transpose(0, 1)
        return lse

    def merged_lse(self, partials: list[Partial]) -> torch.Tensor:
        maxima, sums, _ = (torch.stack(part) for part in zip(*partials, strict=True))
        summed = (sums * torch.exp(maxima - maxima.amax(0))).sum(0)
        return (maxima.amax(0) + summed.log()).view(self.spec.num_q_heads, -1)

    def merge(self, victim: int, partials: list[Partial]) -> torch.Tensor:
        out = self.checker.oracle.to(self.tensors.out.dtype)
        start, stop = query_start_locs(self.checker.batch)[victim : victim + 2]
        partials = [*partials, *self.sink_partials(victim)]
        maxima, sums, values = (torch.stack(part) for part in zip(*partials, strict=True))
        weights = self.weights(maxima)
        merged = (values * weights).sum(0) / (sums * weights).sum(0)
        out[start:stop] = merged.view(self.spec.num_q_heads, stop - start, -1).transpose(0, 1).to(out.dtype)
        return out

    def partials(self, victim: int) -> list[Partial]:
        return [self.partial(victim, positions) for positions in self.segments(victim)]

    def segments(self, victim: int) -> list[torch.Tensor]:
        return list(torch.arange(self.first_read(victim), self.kv_len(victim)).split(self.segment))

    def first_read(self, victim: int) -> int:
        """Where the first tile of keys starts: that of the first row's window."""
        _, context_len = self.checker.batch.sequences[victim]
        first = 0 if self.spec.sliding_window is None else int(self.first_key(torch.tensor([context_len])))
        return max(first, 0) // self.tile * self.tile

    def partial(self, victim: int, positions: torch.Tensor) -> Partial:
        """Maxima and sums [num_kv_heads, group * rows, 1] and unscaled values of the keys at `positions`."""
        query_len, context_len = self.checker.batch.sequences[victim]
        start = query_start_locs(self.checker.batch)[victim]
        q = self.products(self.tensors.q[start : start + query_len].float().transpose(0, 1))
        q = q.reshape(self.spec.num_kv_heads, -1, self.spec.head_dim)
        pages, slots = self.places(victim, positions)
        k, v = (self.heads(cache[pages, slots].float()) for cache in (self.tensors.k_cache, self.tensors.v_cache))
        k_scale, v_scale = self.kv_scales()
        products = (q @ self.products(k).transpose(1, 2)).unflatten(1, (-1, query_len))
        products *= (self.q_scale() * k_scale)[:, None, None, None]
        rows = context_len + torch.arange(query_len)
        scores = self.capped(products) + self.slopes() * self.distance(rows, positions)
        scores = torch.where(self.seen(victim, rows, positions), scores, -torch.inf).flatten(1, 2)
        maxima = scores.amax(-1, keepdim=True).clamp(min=-1e30)
        weights = torch.exp(scores - maxima)
        values = weights.to(self.tensors.out.dtype).float() @ v * v_scale[:, None, None]
        return maxima, weights.sum(-1, keepdim=True), values

    def seen(self, victim: int, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Whether the row at each position sees the key at each: [len(rows), len(keys)]."""
        seen = keys <= self.last_key(rows)[:, None]
        if self.spec.sliding_window is not None:
            seen &= keys >= self.first_key(rows)[:, None]
        if self.spec.has_tree_mask and 1 < len(rows) <= self.most_tree_tokens:
            seen = torch.where(keys < rows[0], seen, self.words(victim)[:, None] >> self.bits(keys - rows[0]) & 1 == 1)
        return seen

    def sink_partials(self, victim: int) -> list[Partial]:
        """The sinks as partial results without values."""
        if not self.spec.has_sinks:
            return []
        query_len, _ = self.checker.batch.sequences[victim]
        maxima = self.sinks().repeat_interleave(query_len).view(self.spec.num_kv_heads, -1, 1)
        return [(maxima, torch.ones_like(maxima), maxima.new_zeros(*maxima.shape[:2], self.spec.value_dim))]

    def capped(self, products: torch.Tensor) -> torch.Tensor:
        cap = self.spec.logits_soft_cap
        return products * self.scale if cap is None else cap * torch.tanh(products * self.scale / cap)

    def slopes(self) -> torch.Tensor:
        slopes = torch.zeros(self.spec.num_q_heads) if self.tensors.alibi_slopes is None else self.tensors.alibi_slopes
        return slopes.view(self.spec.num_kv_heads, -1, 1, 1)

    def distance(self, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return (keys - rows[:, None]).float()

    def sinks(self) -> torch.Tensor:
        assert self.tensors.sinks is not None
        return self.tensors.sinks

    def q_scale(self) -> torch.Tensor:
        q_scale = self.tensors.q_scale
        return torch.ones(self.spec.num_kv_heads) if q_scale is None else q_scale

    def kv_scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        one = torch.ones(self.spec.num_kv_heads)
        k_scale, v_scale = self.tensors.k_scale, self.tensors.v_scale
        return one if k_scale is None else k_scale, one if v_scale is None else v_scale

    def products(self, factor: torch.Tensor) -> torch.Tensor:
        """A factor of the first product as the hardware takes it."""
        return factor

    def first_key(self, position: torch.Tensor) -> torch.Tensor:
        return position - (self.spec.sliding_window or 0) + 1

    def words(self, victim: int) -> torch.Tensor:
        assert self.tensors.tree_mask is not None
        return self.tensors.tree_mask[slice(*query_start_locs(self.checker.batch)[victim : victim + 2])]

    def bits(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens.clamp(0, 63)

    def places(self, victim: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        page_size = self.tensors.k_cache.shape[1]
        return self.tensors.block_table[victim, positions // page_size].long(), positions % page_size

    def heads(self, keys: torch.Tensor) -> torch.Tensor:
        return keys.transpose(0, 1)

    def last_key(self, position: torch.Tensor) -> torch.Tensor:
        return position

    def weights(self, maxima: torch.Tensor) -> torch.Tensor:
        return torch.exp(maxima - maxima.amax(0))

    def kv_len(self, victim: int) -> int:
        return self.checker.batch.kv_lens[victim]

    def struck(self, count: int) -> int:
        """Which of `count` things a bug strikes."""
        return round(self.place * (count - 1))


class MaskOneTooMany(SplitAttention):
    """Row i sees key context_len + i + 1 where the sequence has it: not the last row."""

    def last_key(self, position: torch.Tensor) -> torch.Tensor:
        return position + 1


class SequenceOneTooLong(MaskOneTooMany):
    """The last row sees a key past the end of the sequence too."""

    def kv_len(self, victim: int) -> int:
        return super().kv_len(victim) + 1


class MaskOneTooFew(SplitAttention):
    """Row i does not see its own key."""

    def last_key(self, position: torch.Tensor) -> torch.Tensor:
        return position - 1


class TileSkipped(SplitAttention):
    """One tile of keys is never read. With a tile of one, one key."""

    strikes_somewhere = True

    def segments(self, victim: int) -> list[torch.Tensor]:
        start = self.first_read(victim)
        first = start + self.struck(-(-(self.kv_len(victim) - start) // self.tile)) * self.tile
        parts = [part[(part < first) | (part >= first + self.tile)] for part in super().segments(victim)]
        return [part for part in parts if len(part)]


class SegmentSkipped(SplitAttention):
    """One segment's partial result is not merged."""

    strikes_somewhere = True

    def partials(self, victim: int) -> list[Partial]:
        partials = super().partials(victim)
        del partials[self.struck(len(partials))]
        return partials


class SegmentTwice(SplitAttention):
    """One segment's partial result is merged twice."""

    strikes_somewhere = True

    def partials(self, victim: int) -> list[Partial]:
        partials = super().partials(victim)
        return [*partials, partials[self.struck(len(partials))]]


class StalePartial(SplitAttention):
    """One segment's partial result is what another sequence left there."""

    strikes_somewhere = True

    def partials(self, victim: int) -> list[Partial]:
        partials, stale = super().partials(victim), super().partials(victim - 1)
        struck = self.struck(len(partials))
        partials[struck] = stale[struck]
        return partials


class MergedWithoutRescaling(SplitAttention):
    """Partial results are added as if their maxima were the same."""

    def weights(self, maxima: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(maxima)


class WrongPage(SplitAttention):
    """One page is read where its neighbour in the sequence should be."""

    strikes_somewhere = True

    def places(self, victim: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        page_size = self.tensors.k_cache.shape[1]
        first = self.first_read(victim) // page_size
        struck = first + self.struck(self.kv_len(victim) // page_size - first)
        neighbour = page_size if struck == 0 else -page_size
        return super().places(victim, positions + neighbour * (positions // page_size == struck))


class NeighboursRequest(SplitAttention):
    """The keys are those of another sequence of the batch."""

    def places(self, victim: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().places(victim - 1, positions)


class WrongKvHead(SplitAttention):
    """The KV heads are in the wrong order."""

    def heads(self, keys: torch.Tensor) -> torch.Tensor:
        return keys.transpose(0, 1).roll(1, 0)


class MissingScale(SplitAttention):
    """Scores are not scaled."""

    def __init__(self, checker: Checker, tile: int, segment: int, place: float = 0.5) -> None:
        super().__init__(checker, tile, segment, place)
        self.scale = 1.0


class UnmaskedSlots(SplitAttention):
    """Slots after the last key are read, given no weight, and not masked."""

    def kv_len(self, victim: int) -> int:
        page_size = self.tensors.k_cache.shape[1]
        return (super().kv_len(victim) // page_size + 1) * page_size


MUTANTS = (
    MaskOneTooMany,
    SequenceOneTooLong,
    MaskOneTooFew,
    TileSkipped,
    SegmentSkipped,
    SegmentTwice,
    StalePartial,
    MergedWithoutRescaling,
    WrongPage,
    NeighboursRequest,
    WrongKvHead,
    MissingScale,
    UnmaskedSlots,
)
