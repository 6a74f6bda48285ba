"""An audit in one run: canaries that coins put in or leave out, and guesses which. Steinke, Nasr and Jagielski 2023.

Theorem 5.2: a mechanism that is (ε, δ)-differentially private for a record added or removed sees m records, each of
which is there by a fair coin. Whoever sees what comes out and guesses r of the coins gets v or more of them right with
a probability of at most

    f(v) + 2 m δ max over i from 1 to m of (f(v − i) − f(v)) / i,        f(v) = P[Binomial(r, e^ε/(1 + e^ε)) ≥ v].

With δ = 0 nothing beats randomised response, coin by coin. Too many right guesses therefore show that ε is larger.
"""

import math


def chance(right: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """How likely so many right guesses are at most, if the promise is kept."""
    tail = _tails(guesses, 1 / (1 + math.exp(-epsilon)))
    most = max(((tail[max(0, right - i)] - tail[right]) / i for i in range(1, right + 1)), default=0.0)
    return min(1.0, tail[right] + 2 * canaries * delta * most)


def least_epsilon(right: int, guesses: int, canaries: int, delta: float, confidence: float = 0.95) -> float:
    """The largest ε that so many right guesses rule out at this confidence; 0 where they rule out none."""
    low, high = 0.0, 50.0
    if chance(right, guesses, canaries, low, delta) > 1 - confidence:
        return 0.0
    for _ in range(60):
        middle = (low + high) / 2
        ruled_out = chance(right, guesses, canaries, middle, delta) <= 1 - confidence
        low, high = (middle, high) if ruled_out else (low, middle)
    return low


def _tails(n: int, p: float) -> list[float]:
    """P[Binomial(n, p) ≥ v] for v from 0 to n."""
    whole = math.lgamma(n + 1)
    terms = [
        math.exp(whole - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * math.log(p) + (n - k) * math.log1p(-p))
        if p < 1
        else float(k == n)
        for k in range(n + 1)
    ]
    found, total = [0.0] * (n + 1), 0.0
    for k in range(n, -1, -1):
        total += terms[k]
        found[k] = min(1.0, total)
    return found
