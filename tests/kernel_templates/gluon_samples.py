"""Variants of `gluon_hopper` for tests."""

from __future__ import annotations

from attention_tuner.kernel_templates.gpu import TARGETS
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.variant import Value, Variant

HOPPER = TARGETS["sm_90"]
SPEC = AttentionSpec(32, 8, 128)
VALUES: dict[str, Value] = {
    "block_n": 128, "num_stages": 2, "registers": 240, "order": "heads", "dispatch": "grid", "waves": 2,
    "long_weight": 1, "schedule": "long_first", "partials": "float32", "reduction": "kernel",
}  # fmt: skip


def variant_of(page_size: int = 16, **changes: Value) -> Variant:
    return Variant.of("gluon_hopper", page_size, VALUES | changes)
