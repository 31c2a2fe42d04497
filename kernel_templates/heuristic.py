"""Variants for a shape without measurements: the default that a search must beat, and the candidates to try first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from .batch import SHORT_QUERY, Batch, BatchBucket
from .errors import VariantError
from .gpu import Gpu
from .limits import next_power_of_two, registers_of
from .registry import template_of, why_invalid
from .spec import AttentionSpec
from .variant import Value, Variant

# Numbers of vLLM 0.33's Triton backend (vllm/v1/attention/ops/triton_unified_attention.py, and the backend's choice
# between its two kernels). Its decode kernel splits KV when a launch has too few programs.
BLOCK_M = 16
MOST_BLOCK_M = 128
BLOCK_N = 32
SPLIT_BLOCK_N = 16
SPLIT_SEGMENTS = 16
SPLIT_PROGRAMS = 128
# The most elements of a tile of queries or keys. Three stages of such tiles fit the 99 KB of shared memory of the
# smallest GPUs; tiles with the backend's own numbers do not.
MOST_TILE = 32 * 256

_Table = tuple[tuple[Value, ...], ...]
# Tables for hybrid, for long and for short batches.
_Tables = tuple[_Table, _Table, _Table]
_NAMES = ("block_m", "block_n", "decode_block_m", "decode_block_n", "num_warps", "num_stages", "waves", "long_weight",
          "order", "schedule")  # fmt: skip

# Rows that did well on an H200, the likeliest first. Long sequences need tall tiles to use the tensor cores well. Short
# sequences need wide key tiles to keep enough loads in flight. The last rows fit small GPUs.
# Hybrid batches: block_m, block_n, decode_block_n (0 for one body), warps, stages, waves, weight of a key in a long
# tile, grid order, schedule.
_ONE_HEAD = (64, 32, 64, 4, 3, 4, 2, "heads", "interleaved")
_HYBRID = (
    (64, 64, 0, 4, 3, 2, 2, "heads", "interleaved"),
    (64, 64, 64, 4, 3, 2, 2, "items", "long_first"),
    _ONE_HEAD,
    (64, 64, 128, 4, 2, 4, 2, "heads", "long_first"),
    (128, 64, 128, 4, 2, 2, 4, "items", "interleaved"),
    (64, 128, 128, 4, 3, 2, 2, "items", "long_first"),
    (64, 64, 64, 4, 3, 2, 2, "heads", "interleaved"),
    (128, 64, 64, 4, 2, 4, 4, "items", "long_first"),
    (16, 16, 16, 4, 2, 4, 1, "items", "long_first"),
)
# Batches of one part: block_n, warps, stages, waves, grid order. Long batches have block_m in front.
_FINE_SEGMENTS = (128, 128, 8, 3, 4, "items")
_LONG = ((128, 128, 8, 3, 1, "items"), (64, 64, 4, 3, 8, "items"), (128, 64, 4, 2, 4, "heads"),
         (128, 64, 8, 4, 4, "items"), (64, 32, 4, 3, 4, "items"), (16, 16, 4, 2, 4, "items"))  # fmt: skip
_FOR_FEW_KEYS, _FOR_MANY_SEGMENTS = (64, 2, 2, 4, "heads"), (128, 4, 2, 2, "heads")
_SHORT = ((128, 4, 2, 4, "heads"), _FOR_FEW_KEYS, (32, 4, 3, 8, "heads"), _FOR_MANY_SEGMENTS, (64, 2, 2, 0, "heads"),
          (64, 4, 3, 4, "heads"), (128, 4, 4, 4, "heads"), (32, 2, 4, 8, "items"),
          (16, 4, 2, 4, "items"))  # fmt: skip
# Float32, all batches: block_m, block_n, warps, stages. Without tensor cores, registers are the limit.
_FLOAT32 = ((32, 32, 8, 2), (16, 32, 4, 2), (16, 16, 4, 2), (16, 16, 8, 2), (16, 16, 8, 1))
# `persistent`: the columns above, then the programs per SM, as many as fit together.
_PERSISTENT_HYBRID = ((64, 64, 64, 4, 3, 2, 2, "heads", "interleaved", 2),
                      (64, 64, 128, 4, 2, 2, 2, "items", "long_first", 2))  # fmt: skip
_PERSISTENT_LONG = ((64, 64, 4, 3, 1, "heads", 2), (128, 64, 8, 3, 1, "heads", 1))
_PERSISTENT_SHORT = ((64, 4, 3, 2, "heads", 2), (128, 4, 2, 2, "heads", 3))
# `two_launch`, hybrid batches only: block_m, block_n, decode_block_n, warps of the launch for long sequences, warps of
# the launch for short sequences, stages, waves, grid order. For batches of one part it equals `fused`.
_TWO_LAUNCH = ((64, 64, 128, 4, 4, 3, 2, "heads"), (64, 64, 64, 4, 2, 3, 1, "items"))
# Sequences of at most this many keys are not split if they fill the GPU: merging partial results would cost more.
_FEW_KEYS = 2048
# With this many tiles per SM, a variant that never splits KV may answer for a whole bucket. With fewer, the last wave
# keeps few SMs busy. Bucket sizes are powers of two, so the effective limit is 16.
_MANY_TILES = 12
# If one wave cuts each short sequence into this many segments of so many keys, merging decides the time.
_MANY_SEGMENTS = 32
_KEYS_OF_SEGMENT = 512
# Rows of a tile of long sequences over all query heads, for estimates. Most variants have this many.
_TALL = 128
MOST_WARPS = 8
# Columns of the accumulator per warp. With twice as many, heads of 512 compile to code with kilobytes of stack.
MOST_COLUMNS = 128
# This many variants of `fused` are tried before those of the other templates.
_LIKELIEST = 4
# Keys of a work item in a hybrid batch that make its fixed cost small. The fixed cost equals that of 800 keys.
_KEYS_OF_ITEM = 3000
# `gluon_hopper`: block_n, stages, waves, weight of a key in a long tile, grid order, schedule, dispatch, and the
# reduction if it is not a kernel. `_hopper_rows` puts one row first. Narrow tiles are for large heads.
_HOPPER_WAVES = (128, 3, 4, 1, "items", "long_first", "grid")
_HOPPER_FEW_KEYS = (128, 2, 1, 1, "items", "long_first", "persistent")
# An SM loads for short sequences while it multiplies for long ones, so items of both run side by side.
_HOPPER_ONE_HEAD = (128, 3, 2, 2, "heads", "interleaved", "dynamic")
_HOPPER_ONE_HEAD_WAVES = (128, 3, 2, 2, "heads", "interleaved", "grid")
_HOPPER_HYBRID = (
    _HOPPER_WAVES,
    _HOPPER_FEW_KEYS,
    _HOPPER_ONE_HEAD,
    _HOPPER_ONE_HEAD_WAVES,
    (128, 3, 1, 1, "items", "long_first", "persistent", "last_program"),
    (128, 3, 4, 1, "items", "long_first", "dynamic"),
    (64, 6, 4, 1, "items", "long_first", "grid"),
)
_HOPPER_SPLIT = (128, 2, 1, 1, "items", "long_first", "grid")
_HOPPER_UNSPLIT = (128, 3, 0, 1, "heads", "long_first", "persistent")
_HOPPER_LONG = (
    _HOPPER_SPLIT,
    (128, 2, 1, 1, "items", "long_first", "grid", "last_program"),
    _HOPPER_UNSPLIT,
    (128, 2, 0, 1, "heads", "long_first", "grid"),
    (128, 2, 0, 1, "heads", "long_first", "dynamic"),
    (128, 2, 0, 1, "items", "long_first", "grid"),
    (64, 2, 1, 1, "items", "long_first", "grid"),
)
_HOPPER_SHORT = (
    # With few keys a tile has few partial results, which its last program merges.
    (64, 3, 1, 1, "heads", "long_first", "grid", "last_program"),
    (128, 2, 1, 1, "heads", "long_first", "grid"),
    (64, 4, 1, 1, "heads", "long_first", "grid"),
    (64, 3, 0, 1, "heads", "long_first", "persistent"),
    (128, 2, 2, 1, "heads", "long_first", "persistent"),
    (64, 6, 0, 1, "heads", "long_first", "grid", "last_program"),
    (64, 4, 2, 1, "heads", "long_first", "dynamic"),
    (128, 2, 2, 1, "heads", "long_first", "persistent", "last_program"),
)


def default_variant(spec: AttentionSpec, batch: Batch, page_size: int) -> Variant:
    """The default: the variant with the numbers of vLLM's Triton backend for this layer and batch."""
    # In the backend a tile holds whole groups. Here a group larger than the largest tile is split.
    width = next_power_of_two(max(spec.head_dim, spec.value_dim))
    block_m = min(max(BLOCK_M, next_power_of_two(spec.group_size)), MOST_BLOCK_M, MOST_TILE // width)
    is_float32 = spec.dtype == "float32"
    if is_float32:
        block_m = BLOCK_M
    longest = max(query_len for query_len, _ in batch.sequences)
    tokens_per_block = max(1, block_m // spec.group_size)
    query_blocks = -(-longest // tokens_per_block)
    split = longest <= SHORT_QUERY and batch.num_seqs * query_blocks <= SPLIT_PROGRAMS / spec.num_kv_heads
    values = {
        "block_m": block_m,
        "block_n": min(SPLIT_BLOCK_N if split or is_float32 else BLOCK_N, MOST_TILE // width),
        "num_segments": SPLIT_SEGMENTS if split else 1,
        "num_warps": 8 if is_float32 and width > 128 else 4,
        "num_stages": 1 if is_float32 and width > 256 else 3,
    }
    return Variant.of("unified", page_size, values)


def candidates(spec: AttentionSpec, bucket: BatchBucket, page_size: int, gpu: Gpu) -> list[Variant]:
    """Valid variants that are likely to do well, the likeliest first; empty if no variant can run."""
    return list(dict.fromkeys(_likely(spec, bucket, page_size, gpu)))


def _likely(spec: AttentionSpec, bucket: BatchBucket, page_size: int, gpu: Gpu) -> Iterator[Variant]:
    """The candidates in order, with duplicates."""
    fused = list(_fused(spec, bucket, page_size, _fused_tables(spec, bucket, gpu)))
    others = (*_persistent(spec, bucket, page_size), *_two_launch(spec, bucket, page_size))
    first = (*_special_cases(spec, bucket, page_size, gpu), *_hopper(spec, bucket, page_size, gpu))
    for group in (*first, *fused[:_LIKELIEST], *others, *fused[_LIKELIEST:]):
        settled = (template_of(variant).settle(variant, bucket) for variant in group)
        valid = (variant for variant in settled if why_invalid(variant, spec, gpu) is None)
        yield from itertools.islice(valid, 1)


def _special_cases(spec: AttentionSpec, bucket: BatchBucket, page_size: int, gpu: Gpu) -> Iterator[tuple[Variant, ...]]:
    """Groups to try first: for batches with few keys, and for short sequences with many segments."""
    is_float32 = spec.dtype == "float32"
    if bucket.has_part("long"):
        has_few = bucket.has_part("short") and not _fill_items(spec, bucket, gpu, _HOPPER_WAVES)
        # Not with one KV head, where an SM has too few programs. TMA only: with pages smaller than a tile, plain Triton
        # must use pointers, and the Hopper kernel is faster.
        if has_few and spec.num_kv_heads > 1 and not is_float32:
            for through_tma, *_ in _fused(spec, bucket, page_size, (_HYBRID[:1], (), ())):
                yield (through_tma,)
        return
    tiles = _num_tiles(spec, bucket)
    if _is_filled_by_few_keys(spec, bucket, gpu):
        if tiles >= _MANY_TILES * gpu.num_sms and not is_float32:
            yield from _fused(spec, bucket, page_size, ((), (), (_FOR_FEW_KEYS,)))
        # One program per sequence and KV head, with the numbers of vLLM's kernel.
        block_m = _short_block_m(spec, bucket)
        values = {"block_m": block_m, "block_n": 32, "num_segments": 1, "num_warps": 4, "num_stages": 3}
        yield (Variant.of("unified", page_size, values),)
    elif _has_many_segments(spec, bucket, gpu) and not is_float32:
        yield from _fused(spec, bucket, page_size, ((), (), (_FOR_MANY_SEGMENTS,)))


def _has_many_segments(spec: AttentionSpec, bucket: BatchBucket, gpu: Gpu) -> bool:
    """True if short sequences are few and long enough that each gets `_MANY_SEGMENTS` or more."""
    has_keys = bucket.short_kv >= _MANY_SEGMENTS * _KEYS_OF_SEGMENT * bucket.short_seqs
    return has_keys and _MANY_SEGMENTS * _num_tiles(spec, bucket) <= gpu.num_sms


def _num_tiles(spec: AttentionSpec, bucket: BatchBucket) -> int:
    """Estimated number of tiles of a batch of one part, over all KV heads."""
    if bucket.has_part("long"):
        return bucket.long_rows * spec.num_q_heads // _TALL
    return bucket.short_seqs * spec.num_kv_heads


def _is_filled_by_few_keys(spec: AttentionSpec, bucket: BatchBucket, gpu: Gpu) -> bool:
    """True if short sequences with few keys each fill the GPU."""
    is_filled = _num_tiles(spec, bucket) >= gpu.num_sms
    # The longest sequence decides, not the mean, because without splits nothing balances the lengths.
    return is_filled and bucket.short_kv * bucket.short_skew <= _FEW_KEYS * bucket.short_seqs


def may_depend_on_waves(variant: Variant, spec: AttentionSpec, bucket: BatchBucket, gpu: Gpu) -> bool:
    """True if the win of `variant` may depend on the tile count filling whole waves.

    Other batches of `bucket` have up to twice or half as many tiles, and their last wave may keep few SMs busy. Only a
    variant that never splits KV loses by this. It does not lose if there are many waves, if tiles differ in length
    anyway (chunks with little context), or if sequences are so short that splitting costs more. For hybrid batches
    this is unknown, and the answer is False.
    """
    if not template_of(variant).never_splits_kv(variant):
        return False
    if bucket.has_part("long"):
        may_depend = not bucket.has_part("short") and bucket.long_kv > bucket.long_rows
    else:
        may_depend = not _is_filled_by_few_keys(spec, bucket, gpu)
    return may_depend and _num_tiles(spec, bucket) < _MANY_TILES * gpu.num_sms


def _hopper(spec: AttentionSpec, bucket: BatchBucket, page_size: int, gpu: Gpu) -> Iterator[tuple[Variant, ...]]:
    """Groups of variants of `gluon_hopper`; the first valid variant of each group is a candidate."""
    names = ("block_n", "num_stages", "waves", "long_weight", "order", "schedule", "dispatch", "reduction")
    rest = {"registers": 240, "partials": "float32", "reduction": "kernel"}
    for row in _hopper_rows(spec, bucket, gpu):
        variant = Variant.of("gluon_hopper", page_size, {**rest, **dict(zip(names, row, strict=False))})
        # Tiles of large heads leave room for two stages only.
        yield variant, variant.replace(num_stages=2)


def _hopper_rows(spec: AttentionSpec, bucket: BatchBucket, gpu: Gpu) -> _Table:
    """The table for `bucket`, with the best row on an H200 in front (leave_one_out_h200.json)."""
    if not bucket.has_part("long"):
        return _HOPPER_SHORT
    if not bucket.has_part("short"):
        # Without context, the longest tiles run first and balance the SMs if there are two waves or more.
        is_prompt = bucket.long_kv == bucket.long_rows and round(_num_tiles(spec, bucket) / gpu.num_sms) >= 2
        return (_HOPPER_UNSPLIT if is_prompt else _HOPPER_SPLIT, *_HOPPER_LONG)
    few, many = _HOPPER_FEW_KEYS, _HOPPER_WAVES
    if spec.num_kv_heads == 1:
        few, many = _HOPPER_ONE_HEAD, _HOPPER_ONE_HEAD_WAVES
    return (many if _fill_items(spec, bucket, gpu, many) else few, *_HOPPER_HYBRID)


def _fill_items(spec: AttentionSpec, bucket: BatchBucket, gpu: Gpu, row: tuple[Value, ...]) -> bool:
    """True if short sequences have enough keys for the waves of `row`, a row of `_HOPPER_HYBRID`."""
    _, _, waves, *_ = row
    return bucket.short_kv * spec.num_kv_heads >= int(waves) * _KEYS_OF_ITEM * gpu.num_sms


def _fused_tables(spec: AttentionSpec, bucket: BatchBucket, gpu: Gpu) -> _Tables:
    """The tables of `fused`, each with its best row on an H200 in front."""
    hybrid = (_ONE_HEAD, *_HYBRID) if spec.num_kv_heads == 1 else _HYBRID
    # With tiles for fewer than half of the SMs, each SM gets more than one segment.
    is_few = _num_tiles(spec, bucket) < gpu.num_sms / 2
    long = (_FINE_SEGMENTS, *_LONG) if is_few else _LONG
    return tuple(dict.fromkeys(hybrid)), tuple(dict.fromkeys(long)), _SHORT


def _fused(
    spec: AttentionSpec, bucket: BatchBucket, page_size: int, tables: _Tables = (_HYBRID, _LONG, _SHORT)
) -> Iterator[tuple[Variant, ...]]:
    """Groups of variants of `fused`, as in `_hopper`; for float32, from `_FLOAT32` only."""
    rows = _rows(spec, bucket, tables)
    if spec.dtype == "float32":
        rows = ((m, n, m, n, warps, stages, 4, 1, "heads", "long_first") for m, n, warps, stages in _FLOAT32)
    for row in rows:
        values = dict(zip(_NAMES, row, strict=True))
        yield _load_variants(spec, "fused", page_size, {**values, "partials": "float32", "reduction": "kernel"})


def _persistent(spec: AttentionSpec, bucket: BatchBucket, page_size: int) -> Iterator[tuple[Variant, ...]]:
    """Groups of variants of `persistent`, as in `_hopper`."""
    for row in _rows(spec, bucket, (_PERSISTENT_HYBRID, _PERSISTENT_LONG, _PERSISTENT_SHORT)):
        values = dict(zip((*_NAMES, "programs_per_sm"), row, strict=True))
        yield _load_variants(spec, "persistent", page_size, {**values, "partials": "float32", "reduction": "kernel"})


def _two_launch(spec: AttentionSpec, bucket: BatchBucket, page_size: int) -> Iterator[tuple[Variant, ...]]:
    """Groups of variants of `two_launch`, as in `_hopper`; none for batches of one part."""
    names = ("block_m", "block_n", "decode_block_n", "num_warps", "decode_num_warps", "num_stages", "waves", "order")
    for row in _TWO_LAUNCH if bucket.has_part("long") and bucket.has_part("short") else ():
        values = dict(zip(names, row, strict=True))
        yield _load_variants(spec, "two_launch", page_size, {**values, "decode_block_m": _short_block_m(spec, bucket)})


def _load_variants(spec: AttentionSpec, template: str, page_size: int, values: dict[str, Value]) -> tuple[Variant, ...]:
    """A group: the variant with TMA loads, then pointer loads, then both with two stages (for large heads)."""
    changes = (
        {"kv_load": kv_load, "num_stages": num_stages}
        for num_stages in dict.fromkeys((values["num_stages"], 2))
        for kv_load in ("tma", "pointer")
    )
    return tuple(_with_enough_warps(Variant.of(template, page_size, {**values, **each}), spec) for each in changes)


def _with_enough_warps(variant: Variant, spec: AttentionSpec) -> Variant:
    """`variant` with enough warps for the accumulators of large heads, up to `MOST_WARPS`."""
    columns = next_power_of_two(spec.value_dim)
    for part in ("", "decode_"):
        name = f"{part}num_warps" if f"{part}num_warps" in variant.as_dict() else "num_warps"
        warps = max(variant.number(name), columns // MOST_COLUMNS)
        while warps < MOST_WARPS and variant.number(f"{part}block_m") * columns > registers_of(warps):
            warps *= 2
        variant = variant.replace(**{name: warps})
    return variant


def _short_block_m(spec: AttentionSpec, bucket: BatchBucket) -> int:
    rows = spec.group_size * max(1, round(bucket.short_rows / max(1, bucket.short_seqs)))
    return 16 if rows <= 16 else 32


def _rows(spec: AttentionSpec, bucket: BatchBucket, tables: _Tables) -> Iterator[tuple[Value, ...]]:
    """The rows of the table for the parts of `bucket`, with values for all of `_NAMES`."""
    hybrid, long, short = tables
    short_m = _short_block_m(spec, bucket)
    if bucket.has_part("long") and bucket.has_part("short"):
        return ((m, n, *((short_m, short_n) if short_n else (m, n)), *rest) for m, n, short_n, *rest in hybrid)
    if bucket.has_part("long"):
        return ((m, n, m, n, warps, stages, waves, 1, order, "long_first", *more)
                for m, n, warps, stages, waves, order, *more in long)  # fmt: skip
    return ((short_m, n, short_m, n, warps, stages, waves, 1, order, "long_first", *more)
            for n, warps, stages, waves, order, *more in short)  # fmt: skip


def heuristic_variant(spec: AttentionSpec, bucket: BatchBucket, page_size: int, gpu: Gpu) -> Variant:
    """The likeliest variant.

    Raises `VariantError` if none can run, for example for a page size that is no multiple of 16 or a cache dtype that
    the GPU lacks.
    """
    for variant in _likely(spec, bucket, page_size, gpu):
        return variant
    *_, (*_, smallest) = _fused(spec, bucket, page_size)
    raise VariantError(f"no variant of the kernel can run layer {spec.key()} on {gpu.name} with pages of "
                       f"{page_size}: {why_invalid(smallest, spec, gpu)}")
