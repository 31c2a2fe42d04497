"""`SplitAttention` with one step of one feature wrong."""

from __future__ import annotations

import torch

from .mutants import Partial, SplitAttention


class WindowOneTooMany(SplitAttention):
    """Row i sees the key before its window."""

    def first_key(self, position: torch.Tensor) -> torch.Tensor:
        return super().first_key(position) - 1


class WindowOneTooFew(SplitAttention):
    """Row i does not see the first key of its window."""

    def first_key(self, position: torch.Tensor) -> torch.Tensor:
        return super().first_key(position) + 1


class WindowOfTheFirstRow(SplitAttention):
    """All rows see from where the first row's window begins."""

    def first_key(self, position: torch.Tensor) -> torch.Tensor:
        return super().first_key(position[:1]).expand(len(position))


class WindowIgnored(SplitAttention):
    """All earlier keys are seen."""

    def first_key(self, position: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(position)


class CapIgnored(SplitAttention):
    """Scores are not capped."""

    def capped(self, products: torch.Tensor) -> torch.Tensor:
        return products * self.scale


class CapBeforeScale(SplitAttention):
    """The cap is on the product, and the scale after it."""

    def capped(self, products: torch.Tensor) -> torch.Tensor:
        assert self.spec.logits_soft_cap is not None
        return self.scale * self.spec.logits_soft_cap * torch.tanh(products / self.spec.logits_soft_cap)


class CapInBase2(SplitAttention):
    """The cap is on the score times log2(e), as exp2 takes it."""

    def capped(self, products: torch.Tensor) -> torch.Tensor:
        assert self.spec.logits_soft_cap is not None
        log2_e, cap = 1.4426950408889634, self.spec.logits_soft_cap
        return cap * torch.tanh(products * self.scale * log2_e / cap) / log2_e


class CapByExponentials(SplitAttention):
    """tanh as (a - b) / (a + b) of two exponentials, which overflow."""

    def capped(self, products: torch.Tensor) -> torch.Tensor:
        assert self.spec.logits_soft_cap is not None
        x = products * self.scale / self.spec.logits_soft_cap
        return self.spec.logits_soft_cap * (x.exp() - (-x).exp()) / (x.exp() + (-x).exp())


class SinkDropped(SplitAttention):
    """The softmax has no sink."""

    def sink_partials(self, victim: int) -> list[Partial]:
        return []


class SinkTwice(SplitAttention):
    """The sink counts twice."""

    def sink_partials(self, victim: int) -> list[Partial]:
        return 2 * super().sink_partials(victim)


class SinkPerSegment(SplitAttention):
    """The sink counts in every segment."""

    def sink_partials(self, victim: int) -> list[Partial]:
        return len(self.segments(victim)) * super().sink_partials(victim)


class NeighboursSink(SplitAttention):
    """The sink is that of the next head."""

    def sinks(self) -> torch.Tensor:
        return super().sinks().roll(-1)


class SinkScaled(SplitAttention):
    """The sink is scaled as scores are."""

    def sinks(self) -> torch.Tensor:
        return self.scale * super().sinks()


class SinkInBase2(SplitAttention):
    """The sink is taken for a power of two, as exp2 takes scores."""

    def sinks(self) -> torch.Tensor:
        return super().sinks() * 0.6931471805599453


class NeighboursSlope(SplitAttention):
    """The slope is that of the next head."""

    def slopes(self) -> torch.Tensor:
        return super().slopes().flatten().roll(-1).view_as(super().slopes())


class SlopeDropped(SplitAttention):
    """There is no bias."""

    def slopes(self) -> torch.Tensor:
        return torch.zeros_like(super().slopes())


class SlopeUpward(SplitAttention):
    """Farther keys gain what they should lose."""

    def distance(self, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return -super().distance(rows, keys)


class SlopeWithinSegments(SplitAttention):
    """The distance is counted from where the segment begins."""

    def distance(self, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return super().distance(rows, keys - keys[0])


class CapAfterSlope(SplitAttention):
    """The bias is capped too."""

    def partial(self, victim: int, positions: torch.Tensor) -> Partial:
        self.rows = self.checker.batch.sequences[victim][1] + torch.arange(self.checker.batch.sequences[victim][0])
        self.positions = positions
        return super().partial(victim, positions)

    def capped(self, products: torch.Tensor) -> torch.Tensor:
        bias = super().slopes() * self.distance(self.rows, self.positions)
        return super().capped(products + bias / self.scale)

    def slopes(self) -> torch.Tensor:
        return torch.zeros_like(super().slopes())


class NeighboursKScale(SplitAttention):
    """The scale of K is that of the next KV head."""

    def kv_scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        k_scale, v_scale = super().kv_scales()
        return k_scale.roll(-1), v_scale


class NeighboursVScale(SplitAttention):
    """The scale of V is that of the next KV head."""

    def kv_scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        k_scale, v_scale = super().kv_scales()
        return k_scale, v_scale.roll(-1)


class KScaleDropped(SplitAttention):
    """K is not scaled."""

    def kv_scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        k_scale, v_scale = super().kv_scales()
        return torch.ones_like(k_scale), v_scale


class VScaleDropped(SplitAttention):
    """V is not scaled."""

    def kv_scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        k_scale, v_scale = super().kv_scales()
        return k_scale, torch.ones_like(v_scale)


class ScalesSwapped(SplitAttention):
    """The scales of K and V are taken for each other."""

    def kv_scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        k_scale, v_scale = super().kv_scales()
        return v_scale, k_scale


class QScaleDropped(SplitAttention):
    """Queries are not scaled."""

    def q_scale(self) -> torch.Tensor:
        return torch.ones_like(super().q_scale())


class NeighboursQScale(SplitAttention):
    """The scale of queries is that of the next KV head."""

    def q_scale(self) -> torch.Tensor:
        return super().q_scale().roll(-1)


class KScaleOfQueries(SplitAttention):
    """The scale of K is taken for that of the queries."""

    def q_scale(self) -> torch.Tensor:
        return super().kv_scales()[0]


class TreeIgnored(SplitAttention):
    """Query tokens see each other as causality says."""

    def words(self, victim: int) -> torch.Tensor:
        return 2 ** (1 + torch.arange(len(super().words(victim)))) - 1


class NeighboursBit(SplitAttention):
    """Each token's bit is taken for the next token's."""

    def bits(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().bits(tokens - 1)


class NeighboursWord(SplitAttention):
    """Each token sees what the one before it should."""

    def words(self, victim: int) -> torch.Tensor:
        return super().words(victim).roll(1)


class HighBitsLost(SplitAttention):
    """Of each word the lower half is read."""

    def words(self, victim: int) -> torch.Tensor:
        return super().words(victim) & 0xFFFFFFFF


class HighBitsOfTheSign(SplitAttention):
    """The lower half of each word is read as a signed number."""

    def words(self, victim: int) -> torch.Tensor:
        return super().words(victim).int().long()


class LongTreeHeeded(SplitAttention):
    """Sequences of more tokens than a word has bits heed their words."""

    most_tree_tokens = 1 << 20


class WindowOnTree(SplitAttention):
    """The window hides tokens that the tree shows."""

    def seen(self, victim: int, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return super().seen(victim, rows, keys) & (keys >= self.first_key(rows)[:, None])


class TailIgnored(SplitAttention):
    """What a head size has beyond its largest power of two is not multiplied."""

    def products(self, factor: torch.Tensor) -> torch.Tensor:
        width = 1 << (self.spec.head_dim.bit_length() - 1)
        return torch.cat([factor[..., :width], torch.zeros_like(factor[..., width:])], dim=-1)


class TailOfValuesIgnored(SplitAttention):
    """What a value has beyond its largest power of two is 0."""

    def partial(self, victim: int, positions: torch.Tensor) -> Partial:
        maxima, sums, values = super().partial(victim, positions)
        values[..., 1 << (self.spec.value_dim.bit_length() - 1) :] = 0
        return maxima, sums, values


class Tf32Products(SplitAttention):
    """Factors are cut to TF32: ten digits after the first."""

    def products(self, factor: torch.Tensor) -> torch.Tensor:
        return (factor.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


class LseWithoutSink(SplitAttention):
    """The log-sum-exp lacks the sink that the output has."""

    def lse(self, victim: int) -> torch.Tensor:
        return SinkDropped(self.checker, self.tile, self.segment).lse(victim)


class LseWithoutWindow(SplitAttention):
    """The log-sum-exp is of keys that the output does without."""

    def lse(self, victim: int) -> torch.Tensor:
        return WindowIgnored(self.checker, self.tile, self.segment).lse(victim)


class LseInBase2(SplitAttention):
    """The log-sum-exp is a binary logarithm."""

    def merged_lse(self, partials: list[Partial]) -> torch.Tensor:
        return super().merged_lse(partials) * 1.4426950408889634


class LseOfOneSegment(SplitAttention):
    """The log-sum-exp is that of the first segment."""

    def merged_lse(self, partials: list[Partial]) -> torch.Tensor:
        return super().merged_lse(partials[:1])
