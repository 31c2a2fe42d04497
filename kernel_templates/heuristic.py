"""Variants to run, and to try first, for a shape that nothing is known about."""

from __future__ import annotations

from .batch import BatchBucket
from .errors import VariantError
from .gpu import Gpu
from .spec import AttentionSpec
from .template import template_of, why_invalid
from .variant import Value, Variant

# The body for long sequences: rows, keys and the warps that they need. Tall tiles are what reaches the tensor cores.
LONG_BODIES = ((128, 64, 8), (64, 64, 4), (128, 128, 8), (64, 32, 4), (16, 16, 1))
# The body for short sequences: keys, warps and programs for each multiprocessor. Few warps leave room for many
# programs, which hide each other's latency.
SHORT_BODIES = ((64, 4, 4), (32, 2, 4), (128, 4, 2), (32, 1, 8), (16, 1, 4))


def candidates(spec: AttentionSpec, bucket: BatchBucket, page_size: int, gpu: Gpu) -> list[Variant]:
    """Valid variants that have done well on some GPU, the likeliest first; none where no variant can run."""
    rows = spec.group_size * max(1, round(bucket.short_rows / max(1, bucket.short_seqs)))
    decode_block_m = 16 if rows <= 16 else 32
    found: list[Variant] = []
    for (block_m, block_n, long_warps), (decode_block_n, short_warps, waves) in zip(
        LONG_BODIES, SHORT_BODIES, strict=True
    ):
        has_long = bucket.has_part("long")
        values: dict[str, Value] = {
            "block_m": block_m,
            "block_n": block_n,
            "decode_block_m": decode_block_m,
            "decode_block_n": block_n if has_long else decode_block_n,
            "num_warps": long_warps if has_long else short_warps,
            "num_stages": 3,
            "order": "items",
            "waves": 4 if has_long else waves,
            "long_weight": 2 if has_long and bucket.has_part("short") else 1,
        }
        for kv_load in ("tma", "pointer"):
            variant = Variant.of("fused", page_size, values | {"kv_load": kv_load})
            variant = template_of(variant).settle(variant, bucket)
            if why_invalid(variant, spec, gpu) is None:
                found.append(variant)
                break
    return list(dict.fromkeys(found))


def heuristic_variant(spec: AttentionSpec, bucket: BatchBucket, page_size: int, gpu: Gpu) -> Variant:
    """The likeliest variant. Raises `VariantError` when none can run, as with a page size that is no multiple of 16."""
    found = candidates(spec, bucket, page_size, gpu)
    if not found:
        raise VariantError(f"no variant of the kernel can run on {gpu.name} with pages of {page_size}; "
                           "accepted are multiples of 16")
    return found[0]
