from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_tuner.kernel_templates.batch import (
    MAX_TOKENS,
    SHORT_QUERY,
    Batch,
    BatchBucket,
    BatchSummary,
    Lengths,
    Shape,
    minimum_traffic,
)
from attention_tuner.kernel_templates.errors import BatchError
from attention_tuner.kernel_templates.spec import AttentionSpec

SEQUENCES = st.lists(st.tuples(st.integers(0, 4096), st.integers(0, 10**6)), min_size=1, max_size=40).filter(
    lambda sequences: any(query_len for query_len, _ in sequences)
)
SHORT_SEQUENCES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 30)), min_size=1, max_size=4).filter(
    lambda sequences: any(query_len for query_len, _ in sequences)
)


@given(SEQUENCES)
def test_parse_reads_what_str_wrote(sequences: list[tuple[int, int]]):
    batch = Batch(tuple(sequences))
    assert Batch.parse(str(batch)) == batch


@pytest.mark.parametrize("text", ["", "1x1", "1x0@5", "0x1@5", "1x1@-3", "1x1@5,", "axb@c", "1.5x1@5"])
def test_a_malformed_batch_is_refused(text: str):
    with pytest.raises(BatchError):
        Batch.parse(text)


def test_a_batch_needs_a_sequence_and_a_query_token():
    with pytest.raises(BatchError, match="at least one sequence"):
        Batch(())
    with pytest.raises(BatchError, match="at least one query token"):
        Batch(((0, 5), (0, 0)))


def test_a_sequence_has_no_more_tokens_than_kernels_can_count():
    Batch(((1, 2**30 - 2),))
    with pytest.raises(BatchError, match="1 query tokens at 1073741823; accepted are up to 1073741823 tokens"):
        Batch(((1, 2**30 - 1),))


@pytest.mark.parametrize("sequence", [(-1, 5), (1, -5)])
def test_no_length_is_negative(sequence: tuple[int, int]):
    with pytest.raises(BatchError, match="negative"):
        Batch(((2, 3), sequence))


def test_a_sequence_without_query_tokens_is_no_work():
    batch, without = Batch.parse("2x0@9000,1x12@5,1x0@0,3x1@40"), Batch.parse("1x12@5,3x1@40")
    assert batch.num_seqs == 7
    assert batch.kv_lens == (9000, 9000, 17, 0, 41, 41, 41)
    assert BatchBucket.of(batch) == BatchBucket.of(without)
    for spec in (AttentionSpec(4, 2, 64), AttentionSpec(4, 2, 64, sliding_window=7)):
        assert minimum_traffic(spec, batch) == minimum_traffic(spec, without)
    assert not Batch.parse("5x0@100,1x9@4").has_part("short")


def test_a_hybrid_batch_has_the_sizes_of_its_parts():
    batch = Batch.parse("1x512@16384,63x1@32768")
    assert (batch.num_seqs, batch.num_tokens) == (64, 575)
    assert batch.kv_lens[:2] == (16896, 32769)
    bucket = BatchBucket.of(batch)
    assert bucket == BatchBucket(64, 64, 2**21, 1, 512, 2**14, 1)
    assert bucket.has_part("long")
    assert bucket.has_part("short")


def test_verification_differs_from_decode_and_counts_as_short():
    verify, decode = (BatchBucket.of(Batch.parse(text)) for text in ("32x6@20000", "32x1@20000"))
    assert verify != decode
    assert not verify.has_part("long")


def test_many_short_prompts_differ_from_one_long_one():
    assert BatchBucket.of(Batch.parse("16x512@0")) != BatchBucket.of(Batch.parse("1x8192@0"))


def test_one_long_sequence_among_short_ones_is_skew():
    assert BatchBucket.of(Batch.parse("15x1@1000,1x1@60000")).short_skew > 8


@given(SEQUENCES)
def test_a_bucket_is_read_back_and_is_at_distance_0_of_itself(sequences: list[tuple[int, int]]):
    bucket = BatchBucket.of(Batch(tuple(sequences)))
    assert BatchBucket.parse(bucket.key()) == bucket
    assert bucket.distance(bucket) == 0


@given(SEQUENCES, SEQUENCES)
def test_distance_is_symmetric(a: list[tuple[int, int]], b: list[tuple[int, int]]):
    x, y = (BatchBucket.of(Batch(tuple(sequences))) for sequences in (a, b))
    assert x.distance(y) == y.distance(x) >= 0
    assert (x.distance(y) == 0) == (x == y)


@pytest.mark.parametrize("text", ["", "1-2-3", "a-b-c-d-e-f-g", "1-2-3-4-5-6-7-8"])
def test_text_that_names_no_bucket_is_refused(text: str):
    with pytest.raises(BatchError):
        BatchBucket.parse(text)


@given(
    SHORT_SEQUENCES,
    st.none() | st.integers(1, 50),
    st.sampled_from([None, 40]),
    st.sampled_from([("auto", "auto"), ("auto", "float8_e5m2"), ("float8_e4m3fn", "float8_e5m2")]),
)
def test_minimum_traffic_counts_visible_pairs_and_keys(
    sequences: list[tuple[int, int]], window: int | None, v_head_dim: int | None, dtypes: tuple[str, str]
):
    q_dtype, kv_dtype = dtypes
    spec = AttentionSpec(4, 2, 64, kv_dtype=kv_dtype, sliding_window=window, v_head_dim=v_head_dim, q_dtype=q_dtype)
    seen = [
        (sequence, position, key)
        for sequence, (query_len, context_len) in enumerate(sequences)
        for position in range(context_len, context_len + query_len)
        for key in range(position + 1)
        if window is None or position - window < key
    ]
    num_keys = len({(sequence, key) for sequence, _, key in seen})
    num_tokens = sum(query_len for query_len, _ in sequences)
    num_bytes, flops = minimum_traffic(spec, Batch(tuple(sequences)))
    dims = 64 + (v_head_dim or 64)
    assert flops == 2 * 4 * dims * len(seen)
    q_and_out = num_tokens * 4 * (64 * (2 if q_dtype == "auto" else 1) + (v_head_dim or 64) * 2)
    assert num_bytes == spec.kv_element_bytes * num_keys * 2 * dims + q_and_out


def test_a_shape_joins_layer_and_bucket():
    spec, batch = AttentionSpec(4, 2, 64), Batch.parse("2x1@48")
    assert Shape.of(spec, batch) == Shape(spec, BatchBucket.of(batch))


def summed_up(sequences: list[tuple[int, int]]) -> BatchSummary:
    """Sums over the short and the long sequences, one after the other."""
    short = [(query, query + context) for query, context in sequences if 1 <= query <= SHORT_QUERY]
    long = [(query, query + context) for query, context in sequences if query > SHORT_QUERY]
    longest = max((kv for _, kv in short), default=0)
    sums = [(len(part), sum(query for query, _ in part), sum(kv for _, kv in part)) for part in (short, long)]
    return BatchSummary(*sums[0], longest, *sums[1])


@given(SEQUENCES, st.sampled_from((np.int32, np.int64)))
def test_batches_and_lengths_have_one_summary_and_one_bucket(sequences: list[tuple[int, int]], dtype: type):
    batch, expected = Batch(tuple(sequences)), summed_up(sequences)
    query_lens, context_lens = (list(column) for column in zip(*sequences, strict=True))
    assert BatchSummary.of(batch) == BatchSummary.of(Lengths.of(query_lens, context_lens)) == expected
    for columns in ((query_lens, context_lens), (np.array(query_lens, dtype), np.array(context_lens, dtype))):
        assert BatchBucket.of_lengths(*columns) == BatchBucket.of(batch) == expected.bucket()


def test_a_summary_changes_no_lengths_and_sums_in_more_than_32_bits():
    contexts = [MAX_TOKENS - 9, MAX_TOKENS - 1, MAX_TOKENS - 1, 7]
    lengths = Lengths.of(np.array([9, 1, 1, 0], np.int32), np.array(contexts, np.int32))
    before = values(lengths)
    assert BatchSummary.of(lengths) == BatchSummary(2, 2, 2 * MAX_TOKENS, MAX_TOKENS, 1, 9, MAX_TOKENS)
    assert values(lengths) == before


def values(lengths: Lengths) -> list[object]:
    return [*(column.tolist() for column in lengths[:3]), *lengths[3:]]


EDGES = st.sampled_from((-(2**63), -(2**31), -1, 0, 1, 2**29, MAX_TOKENS - 1, MAX_TOKENS, MAX_TOKENS + 1, 2**31, 2**62))


@given(st.lists(st.tuples(EDGES, EDGES), min_size=1, max_size=3))
def test_lengths_are_refused_where_the_batch_of_them_is(sequences: list[tuple[int, int]]):
    queries, contexts = zip(*sequences, strict=True)
    of_batch = answer(lambda: Lengths.of_batch(Batch((*sequences, (1, 0)))))
    assert answer(lambda: Lengths.of(np.array((*queries, 1)), np.array((*contexts, 0)))) == of_batch


def answer(make: Callable[[], Lengths]) -> str | list[object]:
    """The lengths and how they lie in memory, or the error's message."""
    try:
        lengths = make()
    except BatchError as error:
        return str(error)
    return [*values(lengths), *((column.dtype, column.flags.c_contiguous) for column in lengths[:3])]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
def test_lengths_are_copied_from_integers_of_any_width_and_stride(dtype: type):
    both = np.array([[3, 4], [1, 7]], dtype)
    lengths = Lengths.of(*both.T)
    both[:] = 9
    assert values(lengths) == [[3, 1], [4, 7], [7, 8], 4, 8]


@pytest.mark.parametrize(("query", "context", "message"), [
    ([], [], "query_lens must be integers"),
    (np.array([], int), np.array([], int), "one sequence or more, not 0 and 0 lengths"),
    ([1, 1], [5], "one sequence or more, not 2 and 1 lengths"),
    ([1.0], [5], r"query_lens must be integers \[num_seqs\], not float64 \[1\]"),
    ([1], [[5]], r"context_lens must be integers \[num_seqs\], not int64 \[1, 1\]"),
    (3, [5], r"query_lens must be integers \[num_seqs\], not int64 \[\]"),
    (["1"], [3], "query_lens must be integers"),
    ([0, 0], [4, 7], "a batch needs at least one query token"),
    ([1], [MAX_TOKENS], "cannot use a sequence of 1 query tokens at 1073741823"),
])  # fmt: skip
def test_lengths_that_are_no_batch_are_refused_in_a_sentence(query: object, context: object, message: str):
    with pytest.raises(BatchError, match=message):
        BatchBucket.of_lengths(query, context)  # pyright: ignore


SERVED = st.lists(st.tuples(st.integers(1, 4096), st.integers(16, 10**6)), min_size=1, max_size=40)


@given(SERVED)
def test_a_sample_is_of_its_bucket(sequences: list[tuple[int, int]]):
    bucket = BatchBucket.of(Batch(tuple(sequences)))
    sample = bucket.sample()
    assert BatchBucket.of(sample) == bucket
    assert str(sample).count(",") < 3


@given(SHORT_SEQUENCES)
def test_a_sample_has_the_parts_of_its_bucket(sequences: list[tuple[int, int]]):
    bucket = BatchBucket.of(Batch(tuple(sequences)))
    assert [bucket.sample().has_part(part) for part in ("short", "long")] == [
        bucket.has_part(part) for part in ("short", "long")]
