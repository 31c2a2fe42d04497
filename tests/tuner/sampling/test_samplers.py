from __future__ import annotations

import importlib.util

import pytest

from attention_tuner.kernel_templates.errors import InputError
from attention_tuner.tuner.sampling.samplers import DEFAULT_SAMPLER, POOL, SAMPLERS, check_sampler


def test_a_sampler_is_one_of_those_that_the_search_has() -> None:
    assert check_sampler("tpe") == "tpe"
    with pytest.raises(InputError, match="unknown sampler 'oracle'; accepted are kriging, forest"):
        check_sampler("oracle")
    assert {DEFAULT_SAMPLER, *POOL} <= set(SAMPLERS)


def test_what_a_sampler_needs_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"needs scikit-learn, which `pip install attention-tuner\[forest\]`"):
        check_sampler("forest")
    assert check_sampler(DEFAULT_SAMPLER) == DEFAULT_SAMPLER
