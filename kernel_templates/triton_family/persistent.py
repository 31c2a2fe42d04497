"""Template `persistent`: the work list of `fused`, taken by a fixed grid of programs.

The number of items is read from the device's memory, so that one captured launch serves every engine step.
"""

from __future__ import annotations

from ..limits import LAYER_CONSTRAINTS, SHARED_SOURCES, fits
from ..template import Dimension, Template
from .fused import MERGE_CONSTRAINTS, MERGE_DIMENSIONS, TMA_CONSTRAINTS, bodies

PERSISTENT = Template(
    name="persistent",
    launcher=f"{__package__}.persistent_launch:PersistentLauncher",
    dimensions=(
        Dimension("block_m", (16, 32, 64, 128), part="long", counterpart="decode_block_m", hybrid=(64, 128)),
        Dimension("block_n", (32, 64, 128), part="long", counterpart="decode_block_n"),
        Dimension("decode_block_m", (16, 32, 64, 128), part="short", counterpart="block_m", hybrid=(16, 32, 64)),
        Dimension("decode_block_n", (32, 64, 128), part="short", counterpart="block_n", hybrid=(64, 128)),
        Dimension("num_warps", (4, 8), interpreted=False),
        Dimension("num_stages", (1, 2, 3, 4), interpreted=False, hybrid=(2, 3)),
        Dimension("kv_load", ("pointer", "tma"), interpreted=False),
        Dimension("order", ("items", "heads")),
        Dimension("programs_per_sm", (1, 2, 3, 4)),
        # As those of `fused`.
        Dimension("waves", (1, 2, 4), changes_code=False),
        Dimension("long_weight", (1, 2, 4), changes_code=False, part="both"),
        *MERGE_DIMENSIONS,
    ),
    constraints=(*LAYER_CONSTRAINTS, *TMA_CONSTRAINTS, *MERGE_CONSTRAINTS, *fits(bodies)),
    sources=(
        __name__,
        *(f"{__package__}.{name}" for name in ("balanced_launch", "fused", "persistent_attention")),
        *SHARED_SOURCES,
    ),
)
