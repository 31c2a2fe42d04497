"""Template `fused`: one launch over a work list, with tiles of different shapes for long and for short sequences.

The keys of both are cut into ranges of about equal cost, a number of waves of them.
"""

from __future__ import annotations

from .gpu import Gpu
from .limits import SHARED_SOURCES, Body, fits_registers, fits_shared_memory
from .spec import AttentionSpec
from .template import Constraint, Dimension, Template
from .variant import Variant


def bodies(variant: Variant) -> tuple[Body, ...]:
    """The body for long sequences and the one for short sequences; the same where they are one."""
    v = variant
    return (
        Body(v.number("block_m"), v.number("block_n")),
        Body(v.number("decode_block_m"), v.number("decode_block_n")),
    )


def _tiles_within_pages(variant: Variant, spec: AttentionSpec, gpu: Gpu) -> bool:
    return variant.text("kv_load") == "pointer" or all(variant.page_size % b.block_n == 0 for b in bodies(variant))


def _has_tma(variant: Variant, spec: AttentionSpec, gpu: Gpu) -> bool:
    return variant.text("kv_load") == "pointer" or gpu.is_interpreter or gpu.capability >= (9, 0)


FUSED = Template(
    name="fused",
    launcher=f"{__package__}.fused_launch:FusedLauncher",
    dimensions=(
        Dimension("block_m", (16, 32, 64, 128), part="long", counterpart="decode_block_m"),
        Dimension("block_n", (16, 32, 64, 128), part="long", counterpart="decode_block_n"),
        Dimension("decode_block_m", (16, 32, 64, 128), part="short", counterpart="block_m"),
        Dimension("decode_block_n", (16, 32, 64, 128), part="short", counterpart="block_n"),
        Dimension("num_warps", (1, 2, 4, 8), interpreted=False),
        Dimension("num_stages", (1, 2, 3), interpreted=False),
        Dimension("kv_load", ("pointer", "tma"), interpreted=False),
        Dimension("order", ("items", "heads")),
        # Programs for each multiprocessor that the keys are cut into ranges for; 0 cuts none.
        Dimension("waves", (0, 1, 2, 4, 8), changes_code=False),
        # What a key costs in a long tile, one in a short tile costing 1.
        Dimension("long_weight", (1, 2, 4), changes_code=False, part="both"),
    ),
    constraints=(
        Constraint("TMA needs a GPU of capability 9.0 or higher", _has_tma),
        Constraint("TMA needs pages that its key tiles divide", _tiles_within_pages),
        fits_registers(bodies),
        fits_shared_memory(bodies),
    ),
    sources=(__name__, *SHARED_SOURCES),
)
