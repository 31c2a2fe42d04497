"""The variant to run for a shape that nothing is known about."""

from __future__ import annotations

from .batch import BatchBucket
from .errors import VariantError
from .gpu import Gpu
from .spec import AttentionSpec
from .template import template_of, why_invalid
from .variant import Variant


def heuristic_variant(spec: AttentionSpec, bucket: BatchBucket, page_size: int, gpu: Gpu) -> Variant:
    """The largest tiles that run on `gpu`: wide ones for long sequences, as tall as needed for short ones.

    Raises `VariantError` when no variant can run, as with a page size that is no multiple of 16.
    """
    rows = spec.group_size * max(1, round(bucket.short_rows / max(1, bucket.short_seqs)))
    decode_block_m = 16 if rows <= 16 else 32
    values = {"decode_block_m": decode_block_m, "decode_block_n": 64, "num_stages": 3, "order": "items",
              "long_weight": 2, "waves": 4}  # fmt: skip
    reason = None
    for block_m, block_n, num_warps in ((128, 64, 8), (64, 64, 4), (64, 32, 4), (16, 16, 1)):
        if not bucket.has_part("long"):
            num_warps = min(num_warps, 4)
        for kv_load in ("tma", "pointer"):
            tiles = {"block_m": block_m, "block_n": block_n, "num_warps": num_warps, "kv_load": kv_load}
            variant = Variant.of("fused", page_size, values | tiles)
            variant = template_of(variant).settle(variant, bucket)
            reason = why_invalid(variant, spec, gpu)
            if reason is None:
                return variant
        values |= {"decode_block_n": 32 if values["decode_block_n"] == 64 else 16, "num_stages": 2}
    raise VariantError(f"no variant of the kernel can run on {gpu.name} with pages of {page_size}: {reason}")
