from __future__ import annotations

import pytest

from attention_tuner.db.answer import SOURCES, Chain
from attention_tuner.kernel_templates.errors import InputError


def test_a_chain_accepts_its_worst_source_and_all_better_ones():
    assert all(map(Chain().accepts, SOURCES))
    assert [source for source in SOURCES if Chain("bucket").accepts(source)] == ["exact", "bucket"]


def test_a_chain_is_told_in_its_order():
    assert str(Chain()) == "exact, bucket, neighbour, heuristic"
    assert str(Chain(like=("NVIDIA H200",))) == "exact, bucket, neighbour, what was tuned on NVIDIA H200, heuristic"
    assert str(Chain("neighbour", ("A", "B"))) == "exact, bucket, neighbour, what was tuned on A, what was tuned on B"
    assert str(Chain("bucket", ("A",))) == "exact, bucket"


def test_an_unknown_source_is_refused():
    with pytest.raises(InputError, match="no source 'best'; expected one of exact, bucket, neighbour, heuristic"):
        Chain("best")  # pyright: ignore
