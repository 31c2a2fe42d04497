"""Template `two_launch`: long sequences in one launch and short ones in another, each with its own tiles and warps."""

from __future__ import annotations

from ..limits import LAYER_CONSTRAINTS, SHARED_SOURCES, Body, fits
from ..template import Dimension, Template
from ..variant import Variant
from .fused import TMA_CONSTRAINTS, bodies


def long_body(variant: Variant) -> tuple[Body, ...]:
    """The body of the launch for long sequences."""
    return bodies(variant)[:1]


def short_body(variant: Variant) -> tuple[Body, ...]:
    """The body of the launch for short sequences."""
    return bodies(variant)[1:]


TWO_LAUNCH = Template(
    name="two_launch",
    launcher=f"{__package__}.two_launch_launch:TwoLaunchLauncher",
    dimensions=(
        Dimension("block_m", (16, 32, 64, 128), part="long", counterpart="decode_block_m", hybrid=(32, 64, 128)),
        Dimension("block_n", (16, 32, 64, 128), part="long", counterpart="decode_block_n", hybrid=(32, 64, 128)),
        Dimension("num_warps", (1, 2, 4, 8), interpreted=False, part="long", counterpart="decode_num_warps",
                  hybrid=(4, 8)),
        Dimension("decode_block_m", (16, 32, 64, 128), part="short", counterpart="block_m", hybrid=(16, 32, 64)),
        Dimension("decode_block_n", (16, 32, 64, 128), part="short", counterpart="block_n", hybrid=(32, 64, 128)),
        Dimension("decode_num_warps", (1, 2, 4, 8), interpreted=False, part="short", counterpart="num_warps",
                  hybrid=(1, 2, 4)),
        Dimension("num_stages", (1, 2, 3, 4), interpreted=False, hybrid=(2, 3)),
        Dimension("kv_load", ("pointer", "tma"), interpreted=False),
        Dimension("order", ("items", "heads")),
        # As those of `fused`, for each of the launches.
        Dimension("waves", (0, 1, 2, 4, 8), changes_code=False, hybrid=(1, 2, 4)),
    ),
    constraints=(
        *LAYER_CONSTRAINTS,
        *TMA_CONSTRAINTS,
        *fits(long_body),
        *fits(short_body, "decode_num_warps"),
    ),
    sources=(__name__, f"{__package__}.fused", *SHARED_SOURCES),
    traits=(("launches", 2),),
)
