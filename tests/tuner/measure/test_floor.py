from __future__ import annotations

import pytest

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.tuner.measure.floor import floor_ms
from attention_tuner.tuner.measure.jobs import Rates

SPEC = AttentionSpec(32, 8, 128)


def test_decode_is_bound_by_reading() -> None:
    # 64 sequences of 16384 keys: K and V of 8 heads of 128 numbers of 2 bytes each, and 64 rows of q and the output.
    read = 64 * 16384 * 2 * 8 * 128 * 2 + 2 * 64 * 32 * 128 * 2
    assert floor_ms(SPEC, Batch.parse("64x1@16383"), Rates(4.0, 1e9)) == pytest.approx(read / 4e12 * 1e3)


def test_prefill_is_bound_by_multiplying() -> None:
    pairs = 8192 * 8193 / 2
    flops = 4 * 32 * 128 * pairs
    assert floor_ms(SPEC, Batch.parse("1x8192@0"), Rates(4.0, 700.0)) == pytest.approx(flops / 700e12 * 1e3)
