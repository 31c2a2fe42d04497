"""The samplers by name, and the default one."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from ...kernel_templates.errors import InputError

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

    from .kriging import Codes

# Each with its help text. `kriging` chooses among the valid variants; the others are Optuna's, and suggest a value for
# each dimension. On the recorded tasks kriging finds the best variants most surely
# (benchmarks/results/h200_samplers).
SAMPLERS = {
    "kriging": "ranks all untried variants by a Gaussian process",
    "tpe": "Optuna's tree-structured Parzen estimator",
    "gp": "Optuna's Gaussian process",
    "random": "uniform",
}
DEFAULT_SAMPLER = "kriging"


def check_sampler(name: str) -> str:
    """Return `name` if a sampler is called so. Raises `InputError` if not."""
    if name not in SAMPLERS:
        raise InputError(f"unknown sampler {name!r}; accepted are {', '.join(SAMPLERS)}")
    return name


def make_sampler(name: str, codes: Codes, seed: int) -> BaseSampler:
    """Make the sampler called `name`; `codes` `[variants, columns]` describe the variants (`Space.codes`).

    Imports Optuna. Raises `InputError` for an unknown name.
    """
    if check_sampler(name) == "kriging":
        from .kriging import KrigingSampler

        return KrigingSampler(codes, seed)
    from optuna import exceptions, samplers

    if name == "random":
        return samplers.RandomSampler(seed=seed)
    if name == "gp":
        return samplers.GPSampler(seed=seed, warn_independent_sampling=False)
    with warnings.catch_warnings():
        # Optuna has called these options experimental since 2021.
        warnings.simplefilter("ignore", exceptions.ExperimentalWarning)
        return samplers.TPESampler(seed=seed, multivariate=True, group=True, constant_liar=True)
