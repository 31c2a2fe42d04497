from __future__ import annotations

import math
from typing import Any

import pytest

from attention_tuner.db.answer import SOURCES, Chain
from attention_tuner.kernel_templates.errors import InputError


def test_a_chain_accepts_its_worst_source_and_all_better_ones():
    assert all(map(Chain().accepts, SOURCES))
    assert [source for source in SOURCES if Chain("bucket").accepts(source)] == ["exact", "bucket"]


def test_an_unknown_source_is_refused():
    with pytest.raises(InputError, match="no source 'best'; expected one of exact, bucket, neighbour, heuristic"):
        Chain("best")  # pyright: ignore


@pytest.mark.parametrize("like", ["NVIDIA H200", None, 3, ("",), (200,), {"NVIDIA H200": 1}])
def test_like_must_be_a_list_of_names(like: Any):
    with pytest.raises(InputError, match="expected the names of GPUs"):
        Chain(like=like)


@pytest.mark.parametrize("reach", [math.nan, -1.0, "3", None, True])
def test_reach_must_be_a_distance(reach: Any):
    with pytest.raises(InputError, match="`reach` cannot be"):
        Chain(reach=reach)
