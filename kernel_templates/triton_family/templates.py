"""The templates in plain Triton: `unified`, `fused`, `two_launch` and `persistent`. Imports neither torch nor triton.

`hybrid` choices leave out those that won no batch with both long and short sequences on an H200
(benchmarks/results/h200_tune and h200_measurement), because two bodies multiply the variants there.
"""

from __future__ import annotations

from ..gpu import Gpu
from ..limits import LAYER_CONSTRAINTS, Program, fits
from ..spec import AttentionSpec
from ..template import Body, Constraint, Dimension, Template, Traits
from ..variant import Variant

_LAUNCHERS = f"{__package__}.launchers"


def unified_body(variant: Variant) -> tuple[Body, ...]:
    """The one body of a `unified` variant."""
    return (Body(variant.number("block_m"), variant.number("block_n")),)


def long_body(variant: Variant) -> tuple[Body, ...]:
    """The body for long sequences, of a template with two."""
    return (Body(variant.number("block_m"), variant.number("block_n")),)


def short_body(variant: Variant) -> tuple[Body, ...]:
    """The body for short sequences, of a template with two."""
    return (Body(variant.number("decode_block_m"), variant.number("decode_block_n")),)


def bodies(variant: Variant) -> tuple[Body, ...]:
    """The bodies for long and for short sequences, which may be equal."""
    return long_body(variant) + short_body(variant)


def num_warps(variant: Variant) -> int:
    """The warps of a program, for long sequences where those for short ones have their own."""
    return variant.number("num_warps")


def decode_num_warps(variant: Variant) -> int:
    """The warps of a program of the launch for short sequences."""
    return variant.number("decode_num_warps")


def num_stages(variant: Variant) -> int:
    """The stages that loads are pipelined in."""
    return variant.number("num_stages")


def has_tma(variant: Variant) -> bool:
    """True if K and V come through TMA."""
    return variant.text("kv_load") == "tma"


def _tiles_within_pages(variant: Variant, spec: AttentionSpec, gpu: Gpu) -> bool:
    return not has_tma(variant) or all(variant.page_size % b.block_n == 0 for b in bodies(variant))


def _gpu_has_tma(variant: Variant, spec: AttentionSpec, gpu: Gpu) -> bool:
    return not has_tma(variant) or gpu.is_interpreter or gpu.capability >= (9, 0)


def _has_aligned_rows(variant: Variant, spec: AttentionSpec, gpu: Gpu) -> bool:
    rows = (spec.head_dim * spec.kv_element_bytes, spec.value_dim * spec.kv_element_bytes)
    return not has_tma(variant) or all(row % 16 == 0 for row in rows)


def _merges_what_it_cuts(variant: Variant, spec: AttentionSpec, gpu: Gpu) -> bool:
    is_plain = (variant.text("partials"), variant.text("reduction")) == ("float32", "kernel")
    return is_plain or variant.number("waves") > 0


def rounds_finely_enough(variant: Variant, spec: AttentionSpec, gpu: Gpu) -> bool:
    """True if partial results are at least as precise as the output."""
    return variant.text("partials") == "float32" or spec.dtype == "bfloat16"


# For templates that can load through TMA.
TMA_CONSTRAINTS = (
    Constraint("TMA needs a GPU of capability 9.0 or higher", _gpu_has_tma),
    Constraint("TMA needs pages that its key tiles divide", _tiles_within_pages),
    Constraint("TMA needs keys and values of a multiple of 16 bytes", _has_aligned_rows),
)
# For templates that choose how partial results are stored and merged.
MERGE_CONSTRAINTS = (
    Constraint("without waves there are no partial results", _merges_what_it_cuts),
    Constraint("partial results in bfloat16 are too coarse for another dtype", rounds_finely_enough),
)
# For templates whose one launch has both bodies.
FITS = fits(Program(bodies, num_warps, num_stages, has_tma))
MERGE_DIMENSIONS = (
    # The order of the items of long and of short sequences.
    Dimension("schedule", ("long_first", "interleaved"), changes_code=False, part="both"),
    # The dtype of partial outputs; their maxima and sums are float32.
    Dimension("partials", ("float32", "bfloat16")),
    # Partial results are merged by a kernel launched afterwards, or by the last program of each tile.
    Dimension("reduction", ("kernel", "last_program")),
)
# The cost of a key in a long tile, relative to one in a short tile.
LONG_WEIGHT = Dimension("long_weight", (1, 2, 4), changes_code=False, part="both")


def has_reduction(variant: Variant) -> bool:
    """True if a kernel of its own merges the partial results, where there are any."""
    return variant.text("reduction") == "kernel"


def departures(variant: Variant) -> int:
    """See `Traits.departures`: partial results that are rounded count more than items that are interleaved."""
    return 2 * (variant.text("partials") != "float32") + (variant.text("schedule") != "long_first")


def _unified_traits(variant: Variant) -> Traits:
    segments = variant.number("num_segments")
    return Traits(
        unified_body(variant),
        num_warps(variant),
        launches=1 + (segments > 1),
        segments=segments,
        fixed_segments=segments,
    )


def _fused_traits(variant: Variant) -> Traits:
    waves = variant.number("waves")
    return Traits(
        bodies(variant),
        num_warps(variant),
        has_tma(variant),
        launches=1 + (waves > 0 and has_reduction(variant)),
        segments=waves + 1,
        departures=departures(variant),
    )


def _two_launch_traits(variant: Variant) -> Traits:
    long, short = (long_body(variant), num_warps(variant)), (short_body(variant), decode_num_warps(variant))
    waves = variant.number("waves")
    return Traits(
        bodies(variant),
        max(num_warps(variant), decode_num_warps(variant)),
        has_tma(variant),
        # For a batch of one part, the values of the other follow it, and there is one launch.
        launches=1 + (long != short) + (waves > 0),
        segments=waves + 1,
    )


# One tile shape for all rows and a fixed number of segments for every sequence, like vLLM's Triton backend. With that
# backend's numbers it is the default that every search must beat.
UNIFIED = Template(
    name="unified",
    launcher=f"{_LAUNCHERS}:UnifiedLauncher",
    dimensions=(
        Dimension("block_m", (16, 32, 64, 128)),
        Dimension("block_n", (16, 32, 64, 128)),
        Dimension("num_segments", (1, 2, 4, 8, 16, 32, 64), changes_code=False),
        Dimension("num_warps", (1, 2, 4, 8), interpreted=False),
        Dimension("num_stages", (1, 2, 3, 4), interpreted=False),
    ),
    constraints=(*LAYER_CONSTRAINTS, *fits(Program(unified_body, num_warps, num_stages, lambda variant: False))),
    traits=_unified_traits,
)

# One launch over a work list, with tiles of different shapes for long and for short sequences. The keys of both are
# cut into ranges of about equal cost.
FUSED = Template(
    name="fused",
    launcher=f"{_LAUNCHERS}:FusedLauncher",
    dimensions=(
        Dimension("block_m", (16, 32, 64, 128), part="long", counterpart="decode_block_m"),
        Dimension("block_n", (16, 32, 64, 128), part="long", counterpart="decode_block_n", hybrid=(32, 64, 128)),
        Dimension("decode_block_m", (16, 32, 64, 128), part="short", counterpart="block_m", hybrid=(16, 32, 64)),
        Dimension("decode_block_n", (16, 32, 64, 128), part="short", counterpart="block_n", hybrid=(64, 128)),
        Dimension("num_warps", (1, 2, 4, 8), interpreted=False, hybrid=(2, 4, 8)),
        Dimension("num_stages", (1, 2, 3, 4), interpreted=False, hybrid=(2, 3)),
        Dimension("kv_load", ("pointer", "tma"), interpreted=False),
        Dimension("order", ("items", "heads")),
        # Items for each SM that keys are cut into; 0 cuts none.
        Dimension("waves", (0, 1, 2, 4, 8), changes_code=False, hybrid=(1, 2, 4)),
        LONG_WEIGHT,
        *MERGE_DIMENSIONS,
    ),
    constraints=(*LAYER_CONSTRAINTS, *TMA_CONSTRAINTS, *MERGE_CONSTRAINTS, *FITS),
    traits=_fused_traits,
)

# The work list of `fused`, taken by a fixed grid of programs. The number of items is read from GPU memory, so that one
# captured launch serves every engine step.
PERSISTENT = Template(
    name="persistent",
    launcher=f"{_LAUNCHERS}:PersistentLauncher",
    dimensions=(
        Dimension("block_m", (16, 32, 64, 128), part="long", counterpart="decode_block_m", hybrid=(64, 128)),
        Dimension("block_n", (32, 64, 128), part="long", counterpart="decode_block_n"),
        Dimension("decode_block_m", (16, 32, 64, 128), part="short", counterpart="block_m", hybrid=(16, 32, 64)),
        Dimension("decode_block_n", (32, 64, 128), part="short", counterpart="block_n", hybrid=(64, 128)),
        Dimension("num_warps", (4, 8), interpreted=False),
        Dimension("num_stages", (1, 2, 3, 4), interpreted=False, hybrid=(2, 3)),
        Dimension("kv_load", ("pointer", "tma"), interpreted=False),
        Dimension("order", ("items", "heads")),
        Dimension("programs_per_sm", (1, 2, 3, 4), changes_code=False),
        Dimension("waves", (1, 2, 4), changes_code=False),
        LONG_WEIGHT,
        *MERGE_DIMENSIONS,
    ),
    constraints=(*LAYER_CONSTRAINTS, *TMA_CONSTRAINTS, *MERGE_CONSTRAINTS, *FITS),
    traits=_fused_traits,
)

# Long sequences in one launch and short ones in another, each with its own tiles and warps.
TWO_LAUNCH = Template(
    name="two_launch",
    launcher=f"{_LAUNCHERS}:TwoLaunchLauncher",
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
        # Items for each SM and launch.
        Dimension("waves", (0, 1, 2, 4, 8), changes_code=False, hybrid=(1, 2, 4)),
    ),
    constraints=(
        *LAYER_CONSTRAINTS,
        *TMA_CONSTRAINTS,
        *fits(Program(long_body, num_warps, num_stages, has_tma)),
        *fits(Program(short_body, decode_num_warps, num_stages, has_tma)),
    ),
    traits=_two_launch_traits,
)
