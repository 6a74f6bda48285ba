"""The discrete Gaussian: integers k with probability ∝ exp(−k²/2σ²). Canonne, Kamath and Steinke 2020, Algorithms 1–3.

Floating-point noise has holes that tell what it was added to (Mironov 2012); this has none: only integers are drawn,
compared and added, and every probability is met exactly. σ is a whole number here, so that all of it fits into 64 bits
and is done for many numbers at once; who needs another one scales the grid.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Bits = Callable[[int], Tensor]
"""So many random int64, each of 64 fair and independent bits; never the same twice."""

LARGEST = 1 << 24
"""σ: squares of 63 σ fit into 64 bits."""
MASK = (1 << 63) - 1
PART = {"cpu": 1 << 16, "cuda": 1 << 22}
"""Numbers at once: few enough for a CPU's caches."""


def discrete_gaussian(count: int, sigma: int, bits: Bits) -> Tensor:
    """`count` integers of the discrete Gaussian."""
    if not 1 <= sigma <= LARGEST:
        raise ValueError(f"σ must be from 1 to {LARGEST}, not {sigma}")
    part = PART[bits(1).device.type]
    found = [bits(0)]
    while (missing := count - sum(map(len, found))) > 0:
        k = _laplace(min(part, 2 * missing + 64), sigma, bits)
        # Kept with probability exp(−(|k| − σ)²/2σ²); what is beyond 65 σ, in no life of the universe.
        distance = (k.abs() - sigma).clamp_max(64 * sigma)
        found.append(k[_bernoulli_exp(distance.square(), 2 * sigma * sigma, bits)][:missing])
    return torch.cat(found)


def _laplace(count: int, scale: int, bits: Bits) -> Tensor:
    """About 0.6 · `count` integers with probability ∝ exp(−|k|/s): k = ±(u + s·v), where 0 has but one sign."""
    low = _below(scale, count, bits)
    low = low[_bernoulli_exp(low, scale, bits)]
    found = low + scale * _successes(len(low), bits)
    negative = bits(len(low)) < 0
    return torch.where(negative, -found, found)[~(negative & (found == 0))]


def _successes(count: int, bits: Bits) -> Tensor:
    """How often Bernoulli(1/e) succeeds before it fails; three trials at a time."""
    total = torch.zeros_like(bits(1)).repeat(count)
    going = torch.arange(count, device=total.device)
    while len(going):
        trials = _bernoulli_exp_rest(torch.ones_like(total[:1]).repeat(3 * len(going)), 1, bits).view(-1, 3)
        run = trials.long().cumprod(1).sum(1)
        total[going] += run
        going = going[run == 3]
    return total


def _bernoulli_exp(numerator: Tensor, denominator: int, bits: Bits) -> Tensor:
    """True with probability exp(−γ), γ = numerator/denominator ≥ 0: 1/e succeeds as often as γ has wholes; the rest."""
    whole = numerator // denominator
    result = _bernoulli_exp_rest(numerator - whole * denominator, denominator, bits)
    left = torch.nonzero(result & (whole > 0)).flatten()
    result[left] = _successes(len(left), bits) >= whole[left]
    return result


def _bernoulli_exp_rest(numerator: Tensor, denominator: int, bits: Bits) -> Tensor:
    """For γ ≤ 1: the first k at which Bernoulli(γ/k) fails is odd with probability exp(−γ)."""
    odd = torch.ones_like(numerator, dtype=torch.bool)
    going, k = torch.arange(len(numerator), device=numerator.device), 1
    while len(going):
        hit = _below(denominator, len(going), bits) < numerator[going]
        hit &= _below(k, len(going), bits) == 0
        going, k = going[hit], k + 1
        odd[going] = k % 2 == 1
    return odd


def _below(end: int, count: int, bits: Bits) -> Tensor:
    """Whole numbers from 0 to below `end`, all as likely: the rest of 63 bits, drawn anew beyond its last multiple."""
    if end == 1:
        return torch.zeros_like(bits(1)).expand(count)
    number = bits(count) & MASK
    while len(again := torch.nonzero(number >= MASK - MASK % end).flatten()):
        number[again] = bits(len(again)) & MASK
    return number % end
