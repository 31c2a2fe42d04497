"""Batches of sequences, their lengths as arrays, and their buckets: the key of tuning and lookup."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from .errors import BatchError
from .spec import AttentionSpec

if TYPE_CHECKING:
    # Commands that only read records start without loading numpy.
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

# Lengths and plans are computed in 64 bits, where nothing overflows.
IntArray: TypeAlias = "NDArray[np.int64]"

# A sequence with at most this many query tokens is decode or verification: memory-bound, on small tiles.
SHORT_QUERY = 8
# A tree mask applies to sequences of 2 to this many query tokens, one bit for each; longer ones are causal.
TREE_TOKENS = 64

# Far more than any engine needs, so that a mistyped count is refused instead of filling the memory.
MAX_SEQUENCES = 2**16
# Kernels count the tokens of a sequence in 32 bits, up to the end of its last tile.
MAX_TOKENS = 2**30 - 1

_GROUP = re.compile(r"([0-9]{1,10})x([0-9]{1,10})@([0-9]{1,10})")


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of one launch, of which at least one has a query token.

    Sequences without a query token are skipped.
    """

    # (query_len, context_len) of each sequence. Context tokens are already in the cache.
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
        """Query tokens of all sequences."""
        return sum(query_len for query_len, _ in self.sequences)

    @property
    def kv_lens(self) -> tuple[int, ...]:
        """Keys of each sequence: context and query tokens."""
        return tuple(query_len + context_len for query_len, context_len in self.sequences)

    def has_part(self, part: str) -> bool:
        """True if any sequence is "short" (1 to `SHORT_QUERY` query tokens) or "long", as `part` says."""
        return any(query_len and (query_len <= SHORT_QUERY) == (part == "short") for query_len, _ in self.sequences)


class Lengths(NamedTuple):
    """Lengths of a batch as arrays, as an engine holds them."""

    # Query tokens of each sequence [num_seqs].
    query: IntArray
    # Tokens of each sequence already in the cache [num_seqs].
    context: IntArray
    # Keys of each sequence [num_seqs]: context and query tokens.
    kv: IntArray
    # Query tokens of all sequences.
    num_tokens: int
    # Keys of the longest sequence.
    longest_kv: int

    @classmethod
    def of(cls, query_lens: ArrayLike, context_lens: ArrayLike) -> Lengths:
        """Copy two arrays of integers on the host [num_seqs]. Raises `BatchError` as `Batch` does."""
        import numpy as np

        query, context = _integers(query_lens, "query_lens"), _integers(context_lens, "context_lens")
        if not len(query) or len(query) != len(context):
            raise BatchError("a batch needs a query length and a context length for each of one sequence or more, not "
                             f"{len(query)} and {len(context)} lengths")
        kv, num_tokens = query + context, int(query.sum())
        # The bits of MAX_TOKENS are all ones. A higher bit means a negative length, an overflow or a length too large.
        if (query | context | kv).view(np.uint64).max() > MAX_TOKENS or not num_tokens:
            # Batch has the same rules and raises an error that names the sequence.
            Batch(tuple(zip(query.tolist(), context.tolist(), strict=True)))
        return cls(query, context, kv, num_tokens, int(kv.max()))

    @classmethod
    def of_batch(cls, batch: Batch | Lengths) -> Lengths:
        """Lengths of a `Batch`; `Lengths` are returned unchanged."""
        if isinstance(batch, Lengths):
            return batch
        import numpy as np

        # Takes half the time of np.array.
        flat = np.fromiter(itertools.chain.from_iterable(batch.sequences), np.int64, 2 * len(batch.sequences))
        query, context = flat[::2].copy(), flat[1::2].copy()
        kv = query + context
        return cls(query, context, kv, int(query.sum()), int(kv.max()))

    @property
    def num_seqs(self) -> int:
        """Sequences in the batch."""
        return len(self.query)


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """Sums over the short and over the long sequences of a batch, from which its bucket is made.

    Sequences without a query token do not count.
    """

    # Short sequences: decode and verification.
    short_seqs: int
    # Query tokens of all short sequences.
    short_rows: int
    # Keys of all short sequences, query tokens included.
    short_kv: int
    # Keys of the longest short sequence.
    short_longest: int
    # Long sequences: chunked prefill.
    long_seqs: int
    # Query tokens of all long sequences.
    long_rows: int
    # Keys of all long sequences, query tokens included.
    long_kv: int

    @classmethod
    def of(cls, batch: Batch | Lengths) -> BatchSummary:
        """Sum up `batch`. With `Lengths`, no Python object is made per sequence."""
        import numpy as np

        query, _, kv, num_tokens, _ = Lengths.of_batch(batch)
        if np.count_nonzero(query) < query.size:
            query, kv = query[query > 0], kv[query > 0]
        num_keys = int(kv.sum())
        long = np.flatnonzero(query > SHORT_QUERY)
        long_rows = long_kv = 0
        # Most batches only decode, and empty sums would double the time.
        if long.size:
            long_rows, long_kv = int(query[long].sum()), int(kv[long].sum())
            kv = kv.copy()
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
        """Bucket of batches with this summary, for tuning and lookup."""
        skew = self.short_longest * self.short_seqs / self.short_kv if self.short_kv else 0
        sizes = (self.short_seqs, self.short_rows, self.short_kv, self.long_seqs, self.long_rows, self.long_kv, skew)
        return BatchBucket(*map(_power_of_two, sizes))


@dataclass(frozen=True, slots=True)
class BatchBucket:
    """Sizes of `BatchSummary`, each rounded to a power of two or 0: the run-time key of a config."""

    # Short sequences: decode and verification.
    short_seqs: int
    # Query tokens of all short sequences.
    short_rows: int
    # Keys of all short sequences.
    short_kv: int
    # Long sequences: chunked prefill.
    long_seqs: int
    # Query tokens of all long sequences.
    long_rows: int
    # Keys of all long sequences.
    long_kv: int
    # Keys of the longest short sequence, divided by the mean.
    short_skew: int

    def __post_init__(self) -> None:
        if min(self.sizes) < 0:
            raise BatchError(f"a bucket has no negative sizes: {self.sizes}")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes in the order of the fields."""
        return (self.short_seqs, self.short_rows, self.short_kv, self.long_seqs, self.long_rows, self.long_kv,
                self.short_skew)

    @classmethod
    def of(cls, batch: Batch | Lengths) -> BatchBucket:
        """Bucket of `batch`. Tuning and lookup both use this rule."""
        return BatchSummary.of(batch).bucket()

    @classmethod
    def of_lengths(cls, query_lens: ArrayLike, context_lens: ArrayLike) -> BatchBucket:
        """Bucket of a batch given as two arrays or lists on the host [num_seqs].

        Takes about ten microseconds for a few hundred sequences. Raises `BatchError` as `Batch` does.
        """
        return cls.of(Lengths.of(query_lens, context_lens))

    def sample(self) -> Batch:
        """Make a batch of this bucket: sequences of equal length, plus one longer one if the bucket is skewed.

        If contexts have only a few tokens, the skew does not fit, and the batch falls into a nearby bucket.
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
        """True if batches of this bucket have sequences of `part`, "short" or "long"."""
        return bool(self.short_seqs if part == "short" else self.long_rows)

    def distance(self, other: BatchBucket) -> float:
        """Distance of two buckets: the sum of |log2(ratio)| over the sizes, where 0 counts as 0.5."""
        pairs = zip(self.sizes, other.sizes, strict=True)
        return sum(abs(math.log2(max(a, 0.5) / max(b, 0.5))) for a, b in pairs)

    def key(self) -> str:
        """Text of the bucket: its sizes in the order of the fields, joined by dashes."""
        return "-".join(map(str, self.sizes))

    @classmethod
    def parse(cls, text: str) -> BatchBucket:
        """Bucket with this `key`. Raises `BatchError` if the text is no key."""
        try:
            return cls(*map(int, text.split("-")))
        except (TypeError, ValueError) as error:
            raise BatchError(f"{text!r} does not name a bucket: expected seven sizes joined by dashes") from error


@dataclass(frozen=True, slots=True)
class Shape:
    """Layer and bucket that a config is tuned for."""

    # The attention layer.
    spec: AttentionSpec
    # The bucket of the batches.
    bucket: BatchBucket

    @classmethod
    def of(cls, spec: AttentionSpec, batch: Batch) -> Shape:
        """Shape that `batch` of layer `spec` falls in."""
        return cls(spec, BatchBucket.of(batch))


def minimum_traffic(spec: AttentionSpec, batch: Batch) -> tuple[int, float]:
    """Fewest bytes and floating-point operations that `batch` takes: `(bytes, flops)`.

    Bytes: K and V of every visible key once, q once and the output once. Operations: 2 * head_dim and 2 * value_dim for
    every visible pair of query and key and every query head. Query i of a sequence sees context + i + 1 keys, limited
    by the window. Keys that a tree mask hides count as visible.
    """
    window = spec.sliding_window or max(batch.kv_lens)
    keys = sum(min(q + c, q + window - 1) for q, c in batch.sequences if q)
    kv_elements = keys * spec.num_kv_heads * (spec.head_dim + spec.value_dim)
    row_bytes = spec.head_dim * spec.q_element_bytes + spec.value_dim * spec.element_bytes
    pairs = sum(_visible_pairs(q, c, window) for q, c in batch.sequences)
    flops = 2.0 * spec.num_q_heads * (spec.head_dim + spec.value_dim) * pairs
    return kv_elements * spec.kv_element_bytes + batch.num_tokens * spec.num_q_heads * row_bytes, flops


def _visible_pairs(query_len: int, context_len: int, window: int) -> int:
    """Pairs of a query and a visible key. The first rows see all earlier keys, the others a whole window."""
    growing = min(query_len, max(0, window - context_len))
    return growing * context_len + growing * (growing + 1) // 2 + (query_len - growing) * window


def _integers(lengths: ArrayLike, name: str) -> IntArray:
    """Copy `lengths` [num_seqs] into 64 bits, contiguous."""
    import numpy as np

    array: NDArray[Any] = np.asarray(lengths)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise BatchError(f"{name} must be integers [num_seqs], not {array.dtype} {list(array.shape)}")
    # An engine refills its arrays while the plan made from them is still in use.
    return np.array(array, np.int64, order="C")


def _power_of_two(size: float) -> int:
    """Power of two nearest to `size` on a logarithmic scale; 0 stays 0.

    Sizes in one bucket differ by at most a factor of 2. This costs little if the winner splits KV anew for each batch
    (benchmarks/results/buckets_h200.json).
    """
    return 2 ** round(math.log2(size)) if size else 0
