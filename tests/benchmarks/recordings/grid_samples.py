"""A small grid for the tests of recording: two templates, three tasks, two page sizes."""

from __future__ import annotations

from grids import Grid, GridPart

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.spec import AttentionSpec

DECODE, HYBRID = Batch.parse("2x1@48"), Batch.parse("1x16@32,2x1@40")
UNIFIED = {"block_m": (16,), "block_n": (16, 32), "num_segments": (1, 2), "num_warps": (2, 4), "num_stages": (2,)}
FUSED = {
    "block_m": (64,), "block_n": (32, 64), "decode_block_m": (16,), "decode_block_n": (64,), "num_warps": (4,),
    "num_stages": (2,), "kv_load": ("pointer",), "order": ("items",), "waves": (1, 2), "long_weight": (1,),
    "schedule": ("long_first",), "partials": ("float32",), "reduction": ("kernel",),
}  # fmt: skip
SMALL = Grid("small", AttentionSpec(8, 2, 64), (
    GridPart(16, (DECODE, HYBRID), {"unified": UNIFIED, "fused": FUSED}),
    GridPart(32, (DECODE,), {"unified": UNIFIED}),
))  # fmt: skip
