"""The bound of a one-run audit: against randomised response, where it is exact, and Gaussian noise with faults."""

import math

import numpy as np
import pytest
from scipy import stats

from fedgist.dp import gaussian
from fedgist.dp.one_run import chance, least_epsilon


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_without_delta_it_is_the_tail_of_randomised_response(epsilon: float) -> None:
    p = math.exp(epsilon) / (1 + math.exp(epsilon))
    for right in (0, 30, 50):
        assert chance(right, 50, 500, epsilon, 0.0) == pytest.approx(stats.binom.sf(right - 1, 50, p), rel=1e-9)


def test_delta_counts_as_in_the_theorem() -> None:
    """f(v) + 2 m δ max_i (f(v − i) − f(v)) / i, written out with scipy."""
    right, guesses, canaries, epsilon, delta = 40, 50, 1000, 1.0, 1e-4
    f = stats.binom.sf(np.arange(-1, guesses), guesses, math.e / (1 + math.e))
    most = max((f[max(0, right - i)] - f[right]) / i for i in range(1, canaries + 1))
    assert chance(right, guesses, canaries, epsilon, delta) == pytest.approx(f[right] + 2 * canaries * delta * most)


def audited(sigma: float, seed: int, canaries: int = 10_000, guesses: int = 500, delta: float = 1e-7) -> float:
    """Canaries with directions of their own: each shows as itself in noise. The most and the least are guessed."""
    draw = np.random.default_rng(seed)
    there = draw.integers(0, 2, canaries)
    order = np.argsort(there + sigma * draw.normal(size=canaries))
    right = int(there[order[-guesses // 2 :]].sum() + (1 - there[order[: guesses // 2]]).sum())
    return least_epsilon(right, guesses, canaries, delta)


def test_it_rules_out_no_promise_that_is_kept_and_finds_half_the_noise() -> None:
    """ε = 1 at δ = 1e-7: a bound at 95 % may be wrong once in twenty. Half the noise is found where power suffices."""
    sigma = 1 / gaussian.mu(1.0, 1e-7)
    kept = [audited(sigma, seed) for seed in range(20)]
    assert sum(found > 1.0 for found in kept) <= 2 and max(kept) > 0.1
    assert all(audited(sigma / 4, seed) > 1.0 for seed in range(10))
    assert all(audited(sigma / 2, seed, canaries=300_000, guesses=300) > 1.0 for seed in range(5))
    assert not any(audited(sigma, seed, canaries=300_000, guesses=300) > 1.0 for seed in range(5))
