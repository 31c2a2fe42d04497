"""Template `gluon_hopper`: the work list of `fused` in a warp-specialised kernel for Hopper.

Long sequences take tiles of 128 rows, short ones of 64; both read tiles of `block_n` keys through TMA.
"""

from __future__ import annotations

from ..gpu import Gpu
from ..spec import AttentionSpec
from ..template import Body, Constraint, Dimension, Template, Traits
from ..triton_family.templates import (
    LONG_WEIGHT,
    MERGE_DIMENSIONS,
    departures,
    has_reduction,
    rounds_finely_enough,
)
from ..variant import Variant

LONG_ROWS = 128
SHORT_ROWS = 64
# Two warpgroups compute, and one warp loads.
NUM_WARPS = 9
HEAD_DIMS = (64, 128, 256)
# For barriers, and for layout changes that the compiler adds.
SPARE_BYTES = 1024


def shared_memory_bytes(variant: Variant, spec: AttentionSpec) -> int:
    """The most shared memory in bytes of a program: a tile of q, and rings of tiles of K and of V."""
    rows = LONG_ROWS + 2 * variant.number("num_stages") * variant.number("block_n")
    return rows * spec.head_dim * spec.element_bytes + SPARE_BYTES


def _fits(variant: Variant, spec: AttentionSpec, gpu: Gpu) -> bool:
    return shared_memory_bytes(variant, spec) <= gpu.shared_memory_bytes


def _is_plain(variant: Variant, spec: AttentionSpec, gpu: Gpu) -> bool:
    has_feature = (spec.sliding_window is not None or spec.logits_soft_cap is not None or spec.has_sinks
                   or spec.has_alibi or spec.has_tree_mask or spec.has_fp8_cache)  # fmt: skip
    return not has_feature and spec.dtype != "float32" and spec.value_dim == spec.head_dim in HEAD_DIMS


def bodies(variant: Variant) -> tuple[Body, ...]:
    """The bodies for long and for short sequences."""
    block_n = variant.number("block_n")
    return Body(LONG_ROWS, block_n), Body(SHORT_ROWS, block_n)


def _traits(variant: Variant) -> Traits:
    return Traits(
        bodies(variant),
        NUM_WARPS,
        has_tma=True,
        # The two warpgroups have a partial result each for an item of a short sequence, with or without waves.
        launches=1 + has_reduction(variant),
        segments=variant.number("waves") + 1,
        departures=departures(variant),
    )


GLUON_HOPPER = Template(
    name="gluon_hopper",
    launcher=f"{__package__}.launcher:GluonHopperLauncher",
    dimensions=(
        Dimension("block_n", (64, 128)),
        Dimension("num_stages", (2, 3, 4, 6)),
        # Registers of each computing thread; threads of the loading warp get the rest.
        Dimension("registers", (232, 240)),
        Dimension("order", ("items", "heads")),
        # "grid": a program for each unit of work. Else a program for each SM, which computes unit after unit: those
        # that it is dealt beforehand ("persistent"), or the next free one ("dynamic").
        Dimension("dispatch", ("grid", "persistent", "dynamic"), same_code=("grid", "persistent")),
        # Items for each SM that keys are cut into; 0 cuts none.
        Dimension("waves", (0, 1, 2, 4, 8), changes_code=False),
        LONG_WEIGHT,
        *MERGE_DIMENSIONS,
    ),
    constraints=(
        Constraint("it needs a GPU of capability 9.0", lambda variant, spec, gpu: gpu.capability == (9, 0)),
        Constraint(
            "it has no sliding window, soft cap, sinks, ALiBi, tree mask, fp8 cache, float32, nor heads of other sizes "
            f"than {', '.join(map(str, HEAD_DIMS))} for K and V alike",
            _is_plain,
        ),
        Constraint("its stages exceed the GPU's shared memory", _fits),
        Constraint("partial results in bfloat16 are too coarse for another dtype", rounds_finely_enough),
    ),
    writes_lse=False,
    is_portable=False,
    traits=_traits,
)
