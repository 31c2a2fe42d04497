from __future__ import annotations

import pytest

from attention_tuner.kernel_templates.errors import InputError
from attention_tuner.tuner.samplers import DEFAULT_SAMPLER, POOL, SAMPLERS, check_sampler


def test_a_sampler_is_one_of_those_that_the_search_has() -> None:
    assert check_sampler("tpe") == "tpe"
    with pytest.raises(InputError, match="unknown sampler 'oracle'; accepted are kriging, forest"):
        check_sampler("oracle")
    assert {DEFAULT_SAMPLER, *POOL} <= set(SAMPLERS)
