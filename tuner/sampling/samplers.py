"""The samplers by name, and the one that a search has unless another is asked for."""

from __future__ import annotations

import importlib.util
import random
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...kernel_templates.errors import InputError

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

    from .encoding import Encoding
    from .points import Point, Space

# What each is, for the help of a command. Those of `POOL` choose among the valid variants; the others are Optuna's, and
# suggest a value for each dimension. On the recorded tasks kriging is the surest (benchmarks/results/h200_samplers).
SAMPLERS = {
    "kriging": "ranks all that are left by a Gaussian process",
    "forest": "ranks all that are left by a classifier",
    "tpe": "tree-structured Parzen estimator",
    "gp": "Gaussian process",
    "random": "any",
    "qmc": "quasi-random",
    "local": "descents to better neighbours",
    "brute": "in their order",
}
DEFAULT_SAMPLER = "kriging"
POOL = ("kriging", "forest", "local", "brute")
# These sample only parameters that every trial has, so that each trial is given those of all templates.
_UNCONDITIONAL = ("gp", "qmc")


def check_sampler(name: str) -> str:
    """`name` when there is a sampler of that name, and what it needs is installed. Raises `InputError`."""
    if name not in SAMPLERS:
        raise InputError(f"unknown sampler {name!r}; accepted are {', '.join(SAMPLERS)}")
    if name == "forest" and importlib.util.find_spec("sklearn") is None:
        raise InputError("sampler 'forest' needs scikit-learn, which `pip install attention-tuner[forest]` brings")
    return name


def make_sampler(name: str, space: Space, points: Sequence[Point], seed: int) -> tuple[BaseSampler, Encoding]:
    """The sampler called `name` over the `points` of `space`, and how its trials name them.

    Imports Optuna, and what else the sampler needs. Raises `InputError` for an unknown name.
    """
    from .encoding import ByDimension, ByNumber

    if check_sampler(name) in POOL:
        return _of_pool(name, space, points, seed), ByNumber(points)
    return _of_optuna(name, seed), ByDimension(space, name not in _UNCONDITIONAL, random.Random(seed))


def _of_pool(name: str, space: Space, points: Sequence[Point], seed: int) -> BaseSampler:
    from .pool_sampler import BruteSampler, LocalSampler

    codes = space.codes(points)
    if name == "local":
        return LocalSampler(codes, seed)
    if name == "brute":
        return BruteSampler(codes, seed)
    if name == "kriging":
        from .kriging_sampler import KrigingSampler

        return KrigingSampler(codes, seed)
    from .forest_sampler import ForestSampler

    return ForestSampler(codes, seed)


def _of_optuna(name: str, seed: int) -> BaseSampler:
    from optuna import exceptions, samplers

    with warnings.catch_warnings():
        # Grouped parameters and the QMC sampler have been called experimental since 2021 and 2022.
        warnings.simplefilter("ignore", exceptions.ExperimentalWarning)
        if name == "random":
            return samplers.RandomSampler(seed=seed)
        if name == "gp":
            return samplers.GPSampler(seed=seed, warn_independent_sampling=False)
        if name == "qmc":
            return samplers.QMCSampler(seed=seed, scramble=True, warn_independent_sampling=False)
        return samplers.TPESampler(seed=seed, multivariate=True, group=True, constant_liar=True)
