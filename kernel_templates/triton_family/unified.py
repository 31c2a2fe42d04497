"""Template `unified`: one tile shape for all rows and a fixed number of segments for every sequence.

It is what vLLM's Triton backend does; with that backend's numbers it is the default that every search must beat.
"""

from __future__ import annotations

from ..limits import LAYER_CONSTRAINTS, SHARED_SOURCES, Body, fits
from ..template import Dimension, Template
from ..variant import Variant


def bodies(variant: Variant) -> tuple[Body, ...]:
    """The kernel's one body."""
    return (Body(variant.number("block_m"), variant.number("block_n")),)


UNIFIED = Template(
    name="unified",
    launcher=f"{__package__}.unified_launch:UnifiedLauncher",
    dimensions=(
        Dimension("block_m", (16, 32, 64, 128)),
        Dimension("block_n", (16, 32, 64, 128)),
        Dimension("num_segments", (1, 2, 4, 8, 16, 32, 64), changes_code=False),
        Dimension("num_warps", (1, 2, 4, 8), interpreted=False),
        Dimension("num_stages", (1, 2, 3, 4), interpreted=False),
    ),
    constraints=(*LAYER_CONSTRAINTS, *fits(bodies)),
    sources=(__name__, *SHARED_SOURCES),
)
