"""The Gaussian mechanism's closed form: published values, the integral it stands for, its inverse."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from fedgist.dp import gaussian


@pytest.mark.parametrize(("epsilon", "noise"), [(1, 3.7306), (4, 1.0812), (8, 0.6002)])
def test_published_noise(epsilon: float, noise: float) -> None:
    """σ/Δ of the analytic Gaussian mechanism at δ = 1e-5; the classic formula would need 4.84 for ε = 1."""
    assert 1 / gaussian.mu(epsilon, 1e-5) == pytest.approx(noise, abs=5e-5)
    assert gaussian.epsilon(1 / noise, 1e-5) == pytest.approx(epsilon, rel=2e-4)


@pytest.mark.parametrize(("epsilon", "mu"), [(0.0, 0.3), (0.5, 0.3), (3.0, 1.5), (40.0, 6.0)])
def test_delta_is_the_integral_of_what_exceeds(epsilon: float, mu: float) -> None:
    """δ(ε) = ∫ max(0, p(x) − e^ε q(x)) dx for p = N(μ, 1) and q = N(0, 1): what no e^ε explains."""
    start = epsilon / mu + mu / 2  # where p = e^ε q
    found, _ = integrate.quad(
        lambda x: stats.norm.pdf(x - mu) - math.exp(epsilon) * stats.norm.pdf(x), start, start + 12, epsabs=0
    )
    assert gaussian.delta(epsilon, mu) == pytest.approx(found, rel=1e-6)


@given(st.floats(1e-3, 1e3), st.floats(1e-12, 0.5))
def test_mu_and_epsilon_are_inverse_and_err_on_the_safe_side(epsilon: float, delta: float) -> None:
    mu = gaussian.mu(epsilon, delta)
    assert gaussian.delta(epsilon, mu) <= delta
    assert gaussian.delta(epsilon, mu * (1 + 1e-6)) >= delta * (1 - 1e-9)
    assert gaussian.epsilon(mu, delta) <= epsilon * (1 + 1e-6) + 1e-9


def test_extremes() -> None:
    assert gaussian.delta(1.0, 0.0) == 0 and gaussian.epsilon(0.0, 1e-5) == 0
    assert gaussian.delta(1.0, math.inf) == 1 and gaussian.epsilon(math.inf, 1e-5) == math.inf
    assert 0 < gaussian.delta(5000.0, 100.0) < 1  # e^5000 is no float
