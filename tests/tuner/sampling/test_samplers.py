from __future__ import annotations

import numpy as np
import optuna
import pytest

from attention_tuner.kernel_templates.errors import InputError
from attention_tuner.tuner.sampling.kriging import KrigingSampler
from attention_tuner.tuner.sampling.samplers import DEFAULT_SAMPLER, SAMPLERS, check_sampler, make_sampler

CODES = np.zeros((3, 2), np.int8)


def test_an_unknown_sampler_is_refused() -> None:
    assert check_sampler("tpe") == "tpe"
    with pytest.raises(InputError, match="unknown sampler 'cma'; accepted are kriging, tpe, gp, random"):
        make_sampler("cma", CODES, 0)


def test_every_sampler_is_made_by_its_name() -> None:
    made = {name: type(make_sampler(name, CODES, 0)) for name in SAMPLERS}
    assert made == {"kriging": KrigingSampler, "tpe": optuna.samplers.TPESampler, "gp": optuna.samplers.GPSampler,
                    "random": optuna.samplers.RandomSampler}
    assert DEFAULT_SAMPLER in made
