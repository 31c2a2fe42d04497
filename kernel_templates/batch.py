"""Batches of sequences, and the bucket that a batch is tuned and looked up under."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import BatchError
from .spec import AttentionSpec

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from .lengths import Lengths

# A sequence with at most this many query tokens is decode or verification: memory-bound, on small tiles.
SHORT_QUERY = 8
# A sequence of 2 to so many query tokens heeds a tree mask, a word for each token; one of more is causal.
TREE_TOKENS = 64

# Far beyond any engine's, so that a slip of the finger is told instead of filling the memory. Kernels count the tokens
# of a sequence in 32 bits, up to the end of the tile that the last one is in.
MAX_SEQUENCES = 2**16
MAX_TOKENS = 2**30 - 1

_GROUP = re.compile(r"([0-9]{1,10})x([0-9]{1,10})@([0-9]{1,10})")


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of one launch, each `(query_len, context_len)`; context tokens are already in the cache.

    A sequence may have no query token, and none of its keys is then read; a batch has one at least.
    """

    sequences: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not self.sequences:
            raise BatchError("a batch needs at least one sequence")
        for query_len, context_len in self.sequences:
            if query_len < 0 or context_len < 0:
                raise BatchError(f"a sequence has no negative lengths: {query_len} query tokens at {context_len}")
            if query_len + context_len > MAX_TOKENS:
                raise BatchError(f"cannot use a sequence of {query_len} query tokens at {context_len}; accepted are up "
                                 f"to {MAX_TOKENS} tokens")
        if not self.num_tokens:
            raise BatchError("a batch needs at least one query token")

    @classmethod
    def parse(cls, text: str) -> Batch:
        """Read `COUNTxQUERY@CONTEXT,...`, such as `1x512@16384,63x1@32768`. Raises `BatchError`."""
        sequences: list[tuple[int, int]] = []
        for part in text.split(","):
            match = _GROUP.fullmatch(part.strip())
            if match is None:
                raise BatchError(f"cannot read {part.strip()!r} in batch {text!r}; "
                                 "expected COUNTxQUERY@CONTEXT,... such as 1x512@16384,63x1@32768")
            count, query_len, context_len = map(int, match.groups())
            if count < 1:
                raise BatchError(f"cannot use {part.strip()!r} in batch {text!r}: the count must be at least 1")
            if len(sequences) + count > MAX_SEQUENCES or query_len + context_len > MAX_TOKENS:
                raise BatchError(f"cannot use {part.strip()!r} in batch {text!r}: accepted are up to {MAX_SEQUENCES} "
                                 f"sequences of up to {MAX_TOKENS} tokens")
            sequences += [(query_len, context_len)] * count
        return cls(tuple(sequences))

    def __str__(self) -> str:
        runs = ((sequence, len(list(run))) for sequence, run in itertools.groupby(self.sequences))
        return ",".join(f"{count}x{query_len}@{context_len}" for (query_len, context_len), count in runs)

    @property
    def num_seqs(self) -> int:
        """Sequences in the batch."""
        return len(self.sequences)

    @property
    def num_tokens(self) -> int:
        """Query tokens over all sequences."""
        return sum(query_len for query_len, _ in self.sequences)

    @property
    def kv_lens(self) -> tuple[int, ...]:
        """Keys of each sequence: context and query tokens."""
        return tuple(query_len + context_len for query_len, context_len in self.sequences)

    def has_part(self, part: str) -> bool:
        """Whether any sequence is "short" (1 to `SHORT_QUERY` query tokens) or "long"."""
        return any(query_len and (query_len <= SHORT_QUERY) == (part == "short") for query_len, _ in self.sequences)


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """What the bucket of a batch is made of: sums over its short and its long sequences, in tokens.

    Rows are query tokens, kv keys with the query tokens, and `short_longest` the most keys of one short sequence.
    """

    short_seqs: int
    short_rows: int
    short_kv: int
    short_longest: int
    long_seqs: int
    long_rows: int
    long_kv: int

    @classmethod
    def of(cls, batch: Batch) -> BatchSummary:
        """The summary of `batch`."""
        short = [s for s in batch.sequences if 1 <= s[0] <= SHORT_QUERY]
        long = [s for s in batch.sequences if s[0] > SHORT_QUERY]
        short_kv = [query_len + context_len for query_len, context_len in short]
        return cls(
            short_seqs=len(short),
            short_rows=sum(query_len for query_len, _ in short),
            short_kv=sum(short_kv),
            short_longest=max(short_kv, default=0),
            long_seqs=len(long),
            long_rows=sum(query_len for query_len, _ in long),
            long_kv=sum(query_len + context_len for query_len, context_len in long),
        )

    @classmethod
    def of_lengths(cls, lengths: Lengths) -> BatchSummary:
        """The same of a batch's lengths, without a Python object for each sequence."""
        import numpy as np

        query, context = lengths
        num_tokens = int(query.sum())
        if np.count_nonzero(query) < query.size:
            query, context = query[query > 0], context[query > 0]
        kv = query + context
        num_keys = int(kv.sum())
        long = np.flatnonzero(query > SHORT_QUERY)
        long_rows = long_kv = 0
        # Of batches that only decode, the sums of nothing would take half the time.
        if long.size:
            long_rows, long_kv = int(query[long].sum()), int(kv[long].sum())
            kv[long] = 0
        return cls(
            short_seqs=query.size - long.size,
            short_rows=num_tokens - long_rows,
            short_kv=num_keys - long_kv,
            short_longest=int(kv.max()),
            long_seqs=long.size,
            long_rows=long_rows,
            long_kv=long_kv,
        )

    def bucket(self) -> BatchBucket:
        """The bucket that batches of this summary are tuned and looked up under."""
        skew = self.short_longest * self.short_seqs / self.short_kv if self.short_kv else 0
        sizes = (self.short_seqs, self.short_rows, self.short_kv, self.long_seqs, self.long_rows, self.long_kv, skew)
        return BatchBucket(*map(_power_of_two, sizes))


@dataclass(frozen=True, slots=True)
class BatchBucket:
    """What a tuned config is keyed by at run time: sizes of the short and long part, each a power of two or 0.

    Short are decode and verification, long is chunked prefill; `short_skew` is the longest short sequence over the
    mean. Sequences without a query token are no work and count nowhere.
    """

    short_seqs: int
    short_rows: int
    short_kv: int
    long_seqs: int
    long_rows: int
    long_kv: int
    short_skew: int

    def __post_init__(self) -> None:
        if min(self.sizes) < 0:
            raise BatchError(f"a bucket has no negative sizes: {self.sizes}")

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes in the order of the fields."""
        return (self.short_seqs, self.short_rows, self.short_kv, self.long_seqs, self.long_rows, self.long_kv,
                self.short_skew)

    @classmethod
    def of(cls, batch: Batch) -> BatchBucket:
        """The bucket of `batch`: the one rule for tuning and for lookup."""
        return BatchSummary.of(batch).bucket()

    @classmethod
    def of_lengths(cls, query_lens: ArrayLike, context_lens: ArrayLike) -> BatchBucket:
        """The bucket of a batch given as two arrays or lists of one length, as an engine holds it on the host.

        For a few hundred sequences, some ten microseconds. Raises `BatchError` as `Batch` does.
        """
        # Records load no numpy.
        from .lengths import Lengths

        return BatchSummary.of_lengths(Lengths.of(query_lens, context_lens)).bucket()

    def sample(self) -> Batch:
        """A batch of this bucket in few words: sequences of equal length, but for one where they are skewed.

        Of contexts of a few tokens, which leave no room for a skew, it is a batch of a bucket beside it.
        """
        sequences: list[tuple[int, int]] = []
        if self.short_seqs:
            query_len = max(1, self.short_rows // self.short_seqs)
            mean = self.short_kv // self.short_seqs
            longest = max(mean, min(self.short_skew * mean, self.short_kv - (self.short_seqs - 1) * query_len))
            others = (self.short_kv - longest) // max(1, self.short_seqs - 1)
            kv_lens = (max(1, kv_len) for kv_len in [longest] + [others] * (self.short_seqs - 1))
            sequences += [(min(query_len, kv_len), max(0, kv_len - query_len)) for kv_len in kv_lens]
        if self.long_seqs:
            query_len = max(SHORT_QUERY + 1, self.long_rows // self.long_seqs)
            sequences += [(query_len, max(0, self.long_kv // self.long_seqs - query_len))] * self.long_seqs
        return Batch(tuple(sequences))

    def has_part(self, part: str) -> bool:
        """Whether the "short" or the "long" part of the batches here has any sequence."""
        return bool(self.short_seqs if part == "short" else self.long_rows)

    def distance(self, other: BatchBucket) -> float:
        """How far two buckets are apart: the sum over the sizes of |log2 of their ratio|, 0 counting as a half."""
        pairs = zip(self.sizes, other.sizes, strict=True)
        return sum(abs(math.log2(max(a, 0.5) / max(b, 0.5))) for a, b in pairs)

    def key(self) -> str:
        """A text that names the bucket: its sizes in the order of the fields, joined by dashes."""
        return "-".join(map(str, self.sizes))

    @classmethod
    def parse(cls, text: str) -> BatchBucket:
        """The bucket that `key` named. Raises `BatchError` when the text names none."""
        try:
            return cls(*map(int, text.split("-")))
        except (TypeError, ValueError) as error:
            raise BatchError(f"{text!r} does not name a bucket: expected seven sizes joined by dashes") from error


@dataclass(frozen=True, slots=True)
class Shape:
    """What one config is tuned for: a layer and a bucket of batches."""

    spec: AttentionSpec
    bucket: BatchBucket

    @classmethod
    def of(cls, spec: AttentionSpec, batch: Batch) -> Shape:
        """The shape that `batch` of layer `spec` falls in."""
        return cls(spec, BatchBucket.of(batch))


def minimum_traffic(spec: AttentionSpec, batch: Batch) -> tuple[int, float]:
    """The bytes and floating-point operations that `batch` cannot do without: `(bytes, flops)`.

    Bytes: K and V of every key that any query sees once, q and the output once. Operations: two products, of
    2 * head_dim and 2 * value_dim, over every visible (query, key) pair and query head; a query i of a sequence sees
    context + i + 1 keys, or as many as the window holds. What a tree mask hides is counted as if it were visible.
    """
    window = spec.sliding_window or max(batch.kv_lens)
    keys = sum(min(q + c, q + window - 1) for q, c in batch.sequences if q)
    kv_elements = keys * spec.num_kv_heads * (spec.head_dim + spec.value_dim)
    row_bytes = spec.head_dim * spec.q_element_bytes + spec.value_dim * spec.element_bytes
    pairs = sum(_visible_pairs(q, c, window) for q, c in batch.sequences)
    flops = 2.0 * spec.num_q_heads * (spec.head_dim + spec.value_dim) * pairs
    return kv_elements * spec.kv_element_bytes + batch.num_tokens * spec.num_q_heads * row_bytes, flops


def _visible_pairs(query_len: int, context_len: int, window: int) -> int:
    # The first rows see all before them, the others a whole window.
    growing = min(query_len, max(0, window - context_len))
    return growing * context_len + growing * (growing + 1) // 2 + (query_len - growing) * window


def _power_of_two(size: float) -> int:
    """The power of two nearest to `size` on a logarithmic scale; 0 stays 0.

    These are the edges of the buckets: sizes of one are within a factor of 2, which costs little where a winner cuts
    keys anew for each batch (benchmarks/results/buckets_h200.json).
    """
    return 2 ** round(math.log2(size)) if size else 0
