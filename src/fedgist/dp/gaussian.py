"""The Gaussian mechanism, exactly. Balle and Wang 2018, Theorem 8; Dong, Roth and Su 2022 for its composition.

A sum of L2 sensitivity Δ with noise N(0, σ²) on every coordinate is μ-GDP with μ = Δ/σ: an adversary who has to tell
two neighbouring data sets apart does no better than one who tells N(0, 1) from N(μ, 1). Several such releases are
together μ-GDP with μ² = Σ μ_i², also when later ones depend on earlier ones.
"""

import math
from collections.abc import Callable

STEPS = 200
"""Halvings of an interval: more than float64 has bits."""


def delta(epsilon: float, mu: float) -> float:
    """δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ): the smallest δ for which μ-GDP is (ε, δ)-DP."""
    if mu == 0:
        return 0.0
    if mu == math.inf:
        return 1.0
    near, far = mu / 2 - epsilon / mu, mu / 2 + epsilon / mu
    # e^ε φ(far) = φ(near), so that nothing overflows: e^ε Φ(−far) = φ(near) · Φ(−far)/φ(far)
    density = math.exp(-near * near / 2) / math.sqrt(2 * math.pi)
    return max(0.0, _cdf(near) - density * _mills(far))


def epsilon(mu: float, delta_: float) -> float:
    """The smallest ε for which μ-GDP is (ε, δ)-DP; 0 where even that is too large."""
    if delta(0.0, mu) <= delta_:
        return 0.0
    high = 1.0
    while delta(high, mu) > delta_:
        high *= 2
        if high == math.inf:
            return high
    return _bisect(lambda guess: delta(guess, mu) <= delta_, 0.0, high)[1]


def mu(epsilon_: float, delta_: float) -> float:
    """The largest μ for which μ-GDP is (ε, δ)-DP: a release of sensitivity Δ needs σ = Δ/μ."""
    high = 1.0
    while delta(epsilon_, high) <= delta_:
        high *= 2
    return _bisect(lambda guess: delta(epsilon_, guess) > delta_, 0.0, high)[0]


def _bisect(beyond: Callable[[float], bool], low: float, high: float) -> tuple[float, float]:
    """The two ends of the step of a monotone condition, which is false at `low` and true at `high`."""
    for _ in range(STEPS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (low, middle) if beyond(middle) else (middle, high)
    return low, high


def _cdf(x: float) -> float:
    """Φ."""
    return math.erfc(-x / math.sqrt(2)) / 2


def _mills(x: float) -> float:
    """Φ(−x)/φ(x) for x ≥ 0; by its continued fraction (Laplace) where the two would underflow."""
    if x < 10:
        return _cdf(-x) * math.sqrt(2 * math.pi) * math.exp(x * x / 2)
    value = x
    for k in range(60, 0, -1):
        value = x + k / value
    return 1 / value
