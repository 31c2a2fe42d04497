"""A Gaussian process with an exponential kernel, and its expected improvement.

The covariance of two points is `exp(-sum_d rate_d |x_d - y_d|)`: the data decide how much a step in each dimension
matters, and no smoothness is assumed. Losses have mean 0 and deviation 1, and noise of their own.
"""

# pyright: basic
# scipy has no type stubs.
from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve, solve_triangular
from scipy.optimize import minimize
from scipy.spatial.distance import cdist
from scipy.special import log_ndtr

Array = NDArray[np.float64]

# Logarithm of the noise before any fit.
LOG_NOISE = -4.0
# Bounds of the logarithms of the rates and of the noise.
RATE_BOUNDS, NOISE_BOUNDS = (-5.0, 4.0), (-9.0, 0.0)
# Standard deviation of the normal prior on the logarithms of the rates and the noise.
PRIOR_DEVIATION = 3.0
MAX_ITERATIONS = 15
# Keeps the covariance matrix positive definite.
JITTER = 1e-6
# Gain in deviations below which the improvement is given by its leading term: the exact formula would subtract two
# nearly equal tiny numbers.
FAR = -5.0


class GaussianProcess:
    """A Gaussian process whose rates and noise are those of the latest `fit`.

    The logarithms of the rates begin at `log_rates` `[dimensions]`, which are also the mean of their prior.
    """

    def __init__(self, log_rates: Array) -> None:
        self._prior = np.append(log_rates, LOG_NOISE)
        self._hyper = self._prior

    def fit(self, x: Array, losses: Array) -> None:
        """Find the most likely rates and noise, given `losses` `[n]` at `x` `[n, dimensions]`."""
        steps = np.abs(x[:, None, :] - x[None, :, :])
        bounds = [RATE_BOUNDS] * x.shape[1] + [NOISE_BOUNDS]
        # Starting from the previous optimum, one more measurement takes few iterations.
        self._hyper = minimize(self._negative_log_posterior, self._hyper, (steps, losses), "L-BFGS-B", jac=True,
                               bounds=bounds, options={"maxiter": MAX_ITERATIONS}).x  # fmt: skip

    def posterior(self, x: Array, losses: Array, pending: Array, asked: Array) -> tuple[Array, Array]:
        """Mean and deviation `[m]` at `asked` `[m, dimensions]`, given `losses` `[n]` at `x` `[n, dimensions]`.

        Points in `pending` `[k, dimensions]` reduce the deviation and leave the mean (the "kriging believer" of
        Ginsbourger et al., 2010), so that candidates chosen one after another differ.
        """
        known = np.concatenate([x, pending])
        noise = np.exp(self._hyper[-1]) + JITTER
        covariance = self._covariance(known, known) + noise * np.eye(len(known))
        cross = self._covariance(asked, known)
        count = len(x)
        mean = cross[:, :count] @ cho_solve(cho_factor(covariance[:count, :count], lower=True), losses)
        solved = solve_triangular(np.linalg.cholesky(covariance), cross.T, lower=True)
        return mean, np.sqrt(np.maximum(1.0 - np.square(solved).sum(axis=0), JITTER))

    def _covariance(self, x: Array, y: Array) -> Array:
        rates = np.exp(self._hyper[:-1])
        return np.exp(-cdist(x * rates, y * rates, "cityblock"))

    def _negative_log_posterior(self, hyper: Array, steps: Array, losses: Array) -> tuple[float, Array]:
        """The negative log posterior of `hyper`, up to a constant, and its gradient."""
        rates, noise = np.exp(hyper[:-1]), np.exp(hyper[-1])
        kernel = np.exp(-steps @ rates)
        factor = cho_factor(kernel + (noise + JITTER) * np.eye(len(losses)), lower=True)
        weights = cho_solve(factor, losses)
        slope = np.outer(weights, weights) - cho_solve(factor, np.eye(len(losses)))
        strays = (hyper - self._prior) / PRIOR_DEVIATION
        value = 0.5 * losses @ weights + np.log(np.diag(factor[0])).sum() + 0.5 * strays @ strays
        by_rate = np.einsum("ij,ijd->d", slope * kernel, steps)
        gradient = np.append(0.5 * rates * by_rate, -0.5 * noise * np.trace(slope))
        return float(value), gradient + strays / PRIOR_DEVIATION


def log_expected_improvement(best: float, mean: Array, deviation: Array) -> Array:
    """The logarithm of the expected amount by which a normal variable is below `best` (0 where it is above)."""
    gain = (best - mean) / deviation
    near, far = np.maximum(gain, FAR), np.minimum(gain, FAR)
    improvement = np.log(_density(near) + near * np.exp(log_ndtr(near)))
    return np.log(deviation) + np.where(gain < FAR, np.log(_density(0.0)) - far**2 / 2 - 2 * np.log(-far), improvement)


def _density(value: Array | float) -> Array | float:
    return np.exp(-np.square(value) / 2) / np.sqrt(2 * np.pi)
