"""The discrete Gaussian: its law by chi-square, at small σ, where it is far from continuous, and at those in use."""

import math

import pytest
import torch
from scipy import stats

from fedgist.core.rng import Rng
from fedgist.dp.discrete_gaussian import LARGEST, discrete_gaussian
from fedgist.dp.randomness import Noise, exact, rounded, secret, simulated

SIGMA = LARGEST - 12345
"""As in use: no power of two."""


def probability(k: range, sigma: float) -> list[float]:
    """∝ exp(−k²/2σ²), summed far enough out."""
    total = sum(math.exp(-(j * j) / (2 * sigma**2)) for j in range(-60 * math.ceil(sigma), 60 * math.ceil(sigma)))
    return [math.exp(-(j * j) / (2 * sigma**2)) / total for j in k]


@pytest.mark.parametrize("sigma", [1, 3, 4])
def test_its_law(sigma: int) -> None:
    """20,000 numbers in cells of their own out to 3σ; refused at one in ten thousand, the seed is fixed."""
    count = 20_000
    drawn = discrete_gaussian(count, sigma, simulated(Rng(5)))
    inside = range(-3 * sigma, 3 * sigma + 1)
    expected = probability(inside, sigma)
    seen = [int((drawn == k).sum()) for k in inside]
    cells = [*seen, count - sum(seen)]
    assert stats.chisquare(cells, [count * p for p in (*expected, 1 - sum(expected))]).pvalue > 1e-4


@pytest.mark.parametrize(
    "noise", [exact(simulated(Rng(0))), exact(secret()), rounded(Rng(0))], ids=["simulated", "secret", "rounded"]
)
def test_on_the_grid_it_is_as_good_as_normal(noise: Noise) -> None:
    """Kolmogorov and Smirnov for the shape; Σ k²/σ² of n numbers is chi-square with n degrees of freedom."""
    n = 20_000
    drawn = torch.cat([noise(n // 2 - 1, SIGMA), noise(n // 2 + 1, SIGMA)]).double() / SIGMA
    assert len(set(drawn.tolist())) > 0.99 * n  # the second time others
    assert stats.kstest(drawn.numpy(), "norm").pvalue > 1e-6
    assert 1e-6 < stats.chi2.cdf(drawn.square().sum().item(), n) < 1 - 1e-6


def test_the_test_of_its_scale_sees_four_parts_in_a_hundred() -> None:
    n = 20_000
    drawn = 0.96 * discrete_gaussian(n, SIGMA, simulated(Rng(0))).double() / SIGMA
    assert stats.chi2.cdf(drawn.square().sum().item(), n) < 1e-6


def test_simulated_noise_repeats_and_secret_noise_does_not() -> None:
    assert torch.equal(*(discrete_gaussian(66_000, 1, simulated(Rng(1))) for _ in range(2)))
    assert not torch.equal(*(discrete_gaussian(9, SIGMA, secret()) for _ in range(2)))
    assert len(discrete_gaussian(0, 5, secret())) == 0
    for sigma in (0, LARGEST + 1):
        with pytest.raises(ValueError, match="σ must be"):
            discrete_gaussian(1, sigma, secret())


def test_secret_bits_are_chacha20(monkeypatch: pytest.MonkeyPatch) -> None:
    """RFC 8439's block function under a key and nonce of zeros, Appendix A.1, test vector 1."""
    monkeypatch.setattr("os.urandom", lambda count: bytes(count))
    block = secret()(8).numpy().tobytes().hex()
    assert block.startswith("76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7")
