"""A Gaussian process over places, and the improvement to expect of it: kriging with exponential kernels.

The covariance of two places is `exp(-sum_d rate_d |x_d - y_d|)`: a step in a dimension costs as much as the data say,
and nothing is smoother than that. What was measured has mean 0 and deviation 1, and noise of its own.
"""

# pyright: basic
# scipy tells no types.
from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve, solve_triangular
from scipy.optimize import minimize
from scipy.spatial.distance import cdist
from scipy.special import log_ndtr

Array = NDArray[np.float64]

# Of the logarithms of the noise and of the rates: what they are until measurements tell, the bounds of the search for
# them, and the deviation of the normal distribution that they are held to have.
NOISE = -4.0
RATE_BOUNDS, NOISE_BOUNDS = (-5.0, 4.0), (-9.0, 0.0)
DEVIATION = 3.0
STEPS = 15
# Keeps the covariance of what is measured positive definite.
JITTER = 1e-6
# An improvement as unlikely as this is told by its leading term: of two tiny numbers only noise would be left.
FAR = -5.0


class GaussianProcess:
    """The process over places; its rates and noise are those of the latest `fit`.

    Before one, and where nothing speaks against them, the logarithms of the rates are `log_rates` `[dimensions]`.
    """

    def __init__(self, log_rates: Array) -> None:
        self._begin = np.append(log_rates, NOISE)
        self._hyper = self._begin

    def fit(self, places: Array, losses: Array) -> None:
        """Find the rates and the noise that make `losses` `[n]` at `places` `[n, dimensions]` likeliest."""
        steps = np.abs(places[:, None, :] - places[None, :, :])
        bounds = [RATE_BOUNDS] * places.shape[1] + [NOISE_BOUNDS]
        # From where they were: with one more measurement they are hardly elsewhere.
        self._hyper = minimize(self._surprise, self._hyper, (steps, losses), "L-BFGS-B", jac=True, bounds=bounds,
                               options={"maxiter": STEPS}).x  # fmt: skip

    def posterior(self, places: Array, losses: Array, pending: Array, asked: Array) -> tuple[Array, Array]:
        """Mean and deviation `[m]` at the places `asked` `[m, dimensions]`, given `losses` `[n]` at `places`.

        What is `pending` `[k, dimensions]` narrows the process and leaves its mean (the "kriging believer" of
        Ginsbourger et al., 2010), so that places asked for one after another differ.
        """
        known = np.concatenate([places, pending])
        noise = np.exp(self._hyper[-1]) + JITTER
        covariance = self._covariance(known, known) + noise * np.eye(len(known))
        among = self._covariance(asked, known)
        count = len(places)
        mean = among[:, :count] @ cho_solve(cho_factor(covariance[:count, :count], lower=True), losses)
        told = solve_triangular(np.linalg.cholesky(covariance), among.T, lower=True)
        return mean, np.sqrt(np.maximum(1.0 - np.square(told).sum(axis=0), JITTER))

    def _covariance(self, places: Array, others: Array) -> Array:
        rates = np.exp(self._hyper[:-1])
        return np.exp(-cdist(places * rates, others * rates, "cityblock"))

    def _surprise(self, hyper: Array, steps: Array, losses: Array) -> tuple[float, Array]:
        """The negative logarithm of the likelihood of `losses` and of `hyper`, and its gradient."""
        rates, noise = np.exp(hyper[:-1]), np.exp(hyper[-1])
        kernel = np.exp(-steps @ rates)
        factor = cho_factor(kernel + (noise + JITTER) * np.eye(len(losses)), lower=True)
        weights = cho_solve(factor, losses)
        slope = np.outer(weights, weights) - cho_solve(factor, np.eye(len(losses)))
        strays = (hyper - self._begin) / DEVIATION
        value = 0.5 * losses @ weights + np.log(np.diag(factor[0])).sum() + 0.5 * strays @ strays
        of_rates = np.einsum("ij,ijd->d", slope * kernel, steps)
        gradient = np.append(0.5 * rates * of_rates, -0.5 * noise * np.trace(slope))
        return float(value), gradient + strays / DEVIATION


def log_expected_improvement(best: float, mean: Array, deviation: Array) -> Array:
    """The logarithm of how far below `best` a normal variable is to be expected, counted as 0 where it is above."""
    gain = (best - mean) / deviation
    near, far = np.maximum(gain, FAR), np.minimum(gain, FAR)
    improvement = np.log(_density(near) + near * np.exp(log_ndtr(near)))
    return np.log(deviation) + np.where(gain < FAR, np.log(_density(0.0)) - far**2 / 2 - 2 * np.log(-far), improvement)


def _density(value: Array | float) -> Array | float:
    return np.exp(-np.square(value) / 2) / np.sqrt(2 * np.pi)
