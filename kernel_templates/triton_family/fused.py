"""Template `fused`: one launch over a work list, with tiles of different shapes for long and for short sequences.

The keys of both are cut into ranges of about equal cost, a number of waves of them.
"""

from __future__ import annotations

from ..gpu import Gpu
from ..limits import LAYER_CONSTRAINTS, SHARED_SOURCES, Body, fits
from ..spec import AttentionSpec
from ..template import Constraint, Dimension, Template
from ..variant import Variant


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


def _has_aligned_rows(variant: Variant, spec: AttentionSpec, gpu: Gpu) -> bool:
    rows = (spec.head_dim * spec.kv_element_bytes, spec.value_dim * spec.kv_element_bytes)
    return variant.text("kv_load") == "pointer" or all(row % 16 == 0 for row in rows)


def _merges_what_it_cuts(variant: Variant, spec: AttentionSpec, gpu: Gpu) -> bool:
    is_plain = (variant.text("partials"), variant.text("reduction")) == ("float32", "kernel")
    return is_plain or variant.number("waves") > 0


def rounds_finely_enough(variant: Variant, spec: AttentionSpec, gpu: Gpu) -> bool:
    """Whether partial results are as fine as the output."""
    return variant.text("partials") == "float32" or spec.dtype == "bfloat16"


# Of all templates that may read through TMA.
TMA_CONSTRAINTS = (
    Constraint("TMA needs a GPU of capability 9.0 or higher", _has_tma),
    Constraint("TMA needs pages that its key tiles divide", _tiles_within_pages),
    Constraint("TMA needs keys and values of a multiple of 16 bytes", _has_aligned_rows),
)
# Of those that choose how partial results are stored and merged.
MERGE_CONSTRAINTS = (
    Constraint("without waves there are no partial results", _merges_what_it_cuts),
    Constraint("partial results in bfloat16 are too coarse for another dtype", rounds_finely_enough),
)
MERGE_DIMENSIONS = (
    # How the items of long and of short sequences follow one another.
    Dimension("schedule", ("long_first", "interleaved"), changes_code=False, part="both"),
    # In which dtype partial outputs are stored; their maxima and sums are float32.
    Dimension("partials", ("float32", "bfloat16")),
    # What merges partial results: a kernel launched after, or the last program of each tile.
    Dimension("reduction", ("kernel", "last_program")),
)

# Two bodies multiply the variants for batches of both kinds of sequences. There, `hybrid` leaves out what won none of
# them on an H200 (benchmarks/results/h200_tune and h200_measurement).
FUSED = Template(
    name="fused",
    launcher=f"{__package__}.fused_launch:FusedLauncher",
    dimensions=(
        Dimension("block_m", (16, 32, 64, 128), part="long", counterpart="decode_block_m"),
        Dimension("block_n", (16, 32, 64, 128), part="long", counterpart="decode_block_n", hybrid=(32, 64, 128)),
        Dimension("decode_block_m", (16, 32, 64, 128), part="short", counterpart="block_m", hybrid=(16, 32, 64)),
        Dimension("decode_block_n", (16, 32, 64, 128), part="short", counterpart="block_n", hybrid=(64, 128)),
        Dimension("num_warps", (1, 2, 4, 8), interpreted=False, hybrid=(2, 4, 8)),
        Dimension("num_stages", (1, 2, 3, 4), interpreted=False, hybrid=(2, 3)),
        Dimension("kv_load", ("pointer", "tma"), interpreted=False),
        Dimension("order", ("items", "heads")),
        # Programs for each multiprocessor that the keys are cut into ranges for; 0 cuts none.
        Dimension("waves", (0, 1, 2, 4, 8), changes_code=False, hybrid=(1, 2, 4)),
        # What a key costs in a long tile, one in a short tile costing 1.
        Dimension("long_weight", (1, 2, 4), changes_code=False, part="both"),
        *MERGE_DIMENSIONS,
    ),
    constraints=(*LAYER_CONSTRAINTS, *TMA_CONSTRAINTS, *MERGE_CONSTRAINTS, *fits(bodies)),
    sources=(__name__, f"{__package__}.balanced_launch", *SHARED_SOURCES),
)
