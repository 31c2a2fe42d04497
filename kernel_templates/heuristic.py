"""Variants to run, and to try first, for a shape that nothing is known about."""

from __future__ import annotations

from collections.abc import Iterator

from .batch import BatchBucket
from .errors import VariantError
from .gpu import Gpu
from .spec import AttentionSpec
from .template import template_of, why_invalid
from .variant import Value, Variant

# Bodies that did well on an H200, the likeliest first. Tall tiles for long sequences are what reaches the tensor cores;
# of short sequences, wide key tiles keep enough loads in flight. The last ones fit small GPUs.
# For hybrid batches: block_m, block_n, decode_block_n, warps, waves, the weight of a key in a long tile, grid order,
# schedule.
_HYBRID = (
    (64, 64, 128, 4, 4, 2, "heads", "long_first"),
    (64, 64, 128, 4, 4, 2, "heads", "interleaved"),
    (128, 64, 128, 4, 2, 4, "items", "long_first"),
    (128, 64, 128, 4, 2, 4, "items", "interleaved"),
    (64, 128, 128, 4, 4, 2, "heads", "long_first"),
    (128, 64, 64, 4, 4, 4, "items", "long_first"),
    (64, 32, 64, 4, 4, 2, "heads", "interleaved"),
    (16, 16, 16, 4, 4, 1, "items", "long_first"),
)
# For batches of one kind: block_n, warps, waves, grid order; long ones with a tile's rows before.
_LONG = ((64, 64, 4, 8, "items"), (128, 64, 8, 4, "items"), (128, 64, 4, 4, "heads"), (128, 128, 8, 4, "items"),
         (64, 32, 4, 4, "items"), (16, 16, 4, 4, "items"))  # fmt: skip
_SHORT = ((128, 4, 4, "heads"), (64, 4, 4, "heads"), (64, 2, 4, "heads"), (32, 2, 8, "items"), (16, 4, 4, "items"))
# In float32, for batches of any kind: rows, keys, warps. Without tensor cores, what the registers hold decides.
_FLOAT32 = ((32, 32, 8), (16, 32, 4), (16, 16, 4), (16, 16, 8))
# Of `gluon_hopper`, for batches of both kinds and of one: block_n, stages, waves, the weight of a key in a long tile,
# grid order, schedule, dispatch. Narrow tiles are for large heads.
_HOPPER_HYBRID = (
    (128, 3, 4, 1, "items", "long_first", "grid"),
    (128, 3, 2, 2, "heads", "interleaved", "grid"),
    (128, 2, 1, 1, "items", "long_first", "persistent"),
    (128, 3, 4, 1, "items", "long_first", "dynamic"),
    (128, 2, 2, 1, "items", "long_first", "dynamic"),
    (64, 6, 4, 1, "items", "long_first", "grid"),
    (64, 2, 4, 1, "items", "long_first", "grid"),
)
_HOPPER_LONG = (
    (128, 2, 1, 1, "items", "long_first", "grid"),
    (128, 2, 0, 1, "heads", "long_first", "grid"),
    (128, 3, 0, 1, "heads", "long_first", "persistent"),
    (128, 2, 0, 1, "heads", "long_first", "dynamic"),
    (128, 2, 0, 1, "items", "long_first", "dynamic"),
    (128, 2, 0, 1, "items", "long_first", "grid"),
    (64, 2, 1, 1, "items", "long_first", "grid"),
)
_HOPPER_SHORT = (
    (128, 2, 1, 1, "heads", "long_first", "grid"),
    (64, 4, 1, 1, "heads", "long_first", "grid"),
    (128, 2, 2, 1, "heads", "long_first", "persistent"),
    (64, 4, 2, 1, "heads", "long_first", "dynamic"),
    (64, 4, 2, 1, "heads", "long_first", "persistent"),
    (64, 2, 1, 1, "heads", "long_first", "grid"),
)


def candidates(spec: AttentionSpec, bucket: BatchBucket, page_size: int, gpu: Gpu) -> list[Variant]:
    """Valid variants that are likely to do well, the likeliest first; none where no variant can run."""
    found: dict[Variant, None] = {}
    for group in (*_hopper(bucket, page_size), *_fused(spec, bucket, page_size)):
        settled = (template_of(variant).settle(variant, bucket) for variant in group)
        valid = next((variant for variant in settled if why_invalid(variant, spec, gpu) is None), None)
        if valid is not None:
            found[valid] = None
    return list(found)


def _hopper(bucket: BatchBucket, page_size: int) -> Iterator[tuple[Variant, ...]]:
    names = ("block_n", "num_stages", "waves", "long_weight", "order", "schedule", "dispatch")
    has_long, has_short = bucket.has_part("long"), bucket.has_part("short")
    for row in _HOPPER_HYBRID if has_long and has_short else _HOPPER_LONG if has_long else _HOPPER_SHORT:
        values = dict(zip(names, row, strict=True))
        yield (Variant.of("gluon_hopper", page_size, {**values, "registers": 240, "partials": "float32"}),)


def _fused(spec: AttentionSpec, bucket: BatchBucket, page_size: int) -> Iterator[tuple[Variant, ...]]:
    """Pairs of variants, of which the first that is valid will do."""
    for values in _values(spec, bucket):
        rest = {**values, "num_stages": 3, "partials": "float32", "reduction": "kernel"}
        yield tuple(Variant.of("fused", page_size, {**rest, "kv_load": kv_load}) for kv_load in ("tma", "pointer"))


def _values(spec: AttentionSpec, bucket: BatchBucket) -> Iterator[dict[str, Value]]:
    rows = spec.group_size * max(1, round(bucket.short_rows / max(1, bucket.short_seqs)))
    short_m = 16 if rows <= 16 else 32
    names = ("block_m", "block_n", "decode_block_m", "decode_block_n", "num_warps", "waves", "long_weight", "order",
             "schedule")  # fmt: skip
    if spec.dtype == "float32":
        rows_of = ((m, n, m, n, warps, 4, 1, "heads", "long_first") for m, n, warps in _FLOAT32)
    elif bucket.has_part("long") and bucket.has_part("short"):
        rows_of = ((m, n, short_m, short_n, *rest) for m, n, short_n, *rest in _HYBRID)
    elif bucket.has_part("long"):
        rows_of = ((m, n, m, n, warps, waves, 1, order, "long_first") for m, n, warps, waves, order in _LONG)
    else:
        rows_of = ((short_m, n, short_m, n, warps, waves, 1, order, "long_first") for n, warps, waves, order in _SHORT)
    return (dict(zip(names, row, strict=True)) for row in rows_of)


def heuristic_variant(spec: AttentionSpec, bucket: BatchBucket, page_size: int, gpu: Gpu) -> Variant:
    """The likeliest variant.

    Raises `VariantError` when none can run, as with a page size that is no multiple of 16, or a cache in a dtype that
    the GPU does not have.
    """
    found = candidates(spec, bucket, page_size, gpu)
    if not found:
        *_, (*_, smallest) = _fused(spec, bucket, page_size)
        raise VariantError(f"no variant of the kernel can run layer {spec.key()} on {gpu.name} with pages of "
                           f"{page_size}: {why_invalid(smallest, spec, gpu)}")
    return found[0]
