from __future__ import annotations

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from attention_tuner.tuner.sampling.gaussian_process import GaussianProcess, log_expected_improvement

X = np.random.default_rng(0).random((40, 3))
NONE = np.empty((0, 3))


def losses() -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Losses that change along the first dimension, hardly along the second, and not along the third."""
    found = 3 * X[:, 0] + 0.3 * X[:, 1]
    return (found - found.mean()) / found.std()


def test_the_posterior_is_sure_near_measurements_and_unsure_far_from_them() -> None:
    process = GaussianProcess(np.zeros(3))
    process.fit(X, losses())
    mean, deviation = process.posterior(X, losses(), NONE, X)
    assert np.abs(mean - losses()).max() < 0.2
    assert deviation.max() < 0.3
    mean, deviation = process.posterior(X, losses(), NONE, np.full((1, 3), 1e3))
    assert mean == pytest.approx(0, abs=1e-6)
    assert deviation == pytest.approx(1, abs=1e-6)


def test_the_fit_finds_which_dimensions_matter() -> None:
    process = GaussianProcess(np.zeros(3))
    process.fit(X, losses())
    here = np.full((1, 3), 0.5)

    def change(dimension: int) -> float:
        there = here.copy()
        there[0, dimension] = 1.0
        mean, _ = process.posterior(X, losses(), NONE, np.concatenate([here, there]))
        return float(mean[1] - mean[0])

    assert change(0) > 1.0
    assert abs(change(2)) < 0.3


def test_pending_points_reduce_the_deviation_and_leave_the_mean() -> None:
    process = GaussianProcess(np.zeros(3))
    asked = np.array([[0.9, 0.9, 0.9], [0.1, 0.1, 0.1]])
    mean, deviation = process.posterior(X[:2], losses()[:2], NONE, asked)
    believed, narrowed = process.posterior(X[:2], losses()[:2], asked[:1], asked)
    assert believed == pytest.approx(mean)
    assert narrowed[0] < 0.3 * deviation[0]
    assert 0.5 * deviation[1] < narrowed[1] <= deviation[1]


def test_the_gradient_of_the_negative_log_posterior_matches_finite_differences() -> None:
    process = GaussianProcess(np.zeros(3))
    steps = np.abs(X[:, None] - X[None])
    hyper = np.array([0.5, -0.3, 0.2, -2.0])
    _, gradient = process._negative_log_posterior(hyper, steps, losses())
    for index, slope in enumerate(gradient):
        step = 1e-5 * np.eye(4)[index]
        ends = [process._negative_log_posterior(hyper + sign * step, steps, losses())[0] for sign in (1, -1)]
        assert (ends[0] - ends[1]) / 2e-5 == pytest.approx(slope, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("mean", [-1.0, 0.5, 2.0, 6.0])
def test_expected_improvement_equals_its_integral(mean: float) -> None:
    def gain(value: float) -> float:
        return (0.4 - value) * float(norm.pdf(value, mean, 0.7))

    expected, _ = quad(gain, -10, 0.4, points=[mean, 0.4, 0.0], epsabs=0)
    found = log_expected_improvement(0.4, np.array([mean]), np.array([0.7]))
    # Far out only the leading term is computed.
    assert found[0] == pytest.approx(np.log(expected), abs=1e-6 if mean < 3 else 0.1)


def test_far_out_a_smaller_mean_still_has_the_larger_improvement() -> None:
    means = np.array([4.8, 5.2, 40.0, 41.0])
    found = log_expected_improvement(0.0, means, np.ones(4))
    assert np.isfinite(found).all()
    assert (np.diff(found) < 0).all()
