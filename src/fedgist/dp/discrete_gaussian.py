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
PART = {"cpu": 1 << 16, "cuda": 1 << 22}
"""Numbers at once: few enough for a CPU's caches."""


def discrete_gaussian(count: int, sigma: int, bits: Bits) -> Tensor:
    """`count` integers of the discrete Gaussian."""
    if not 1 <= sigma <= LARGEST:
        raise ValueError(f"σ must be from 1 to {LARGEST}, not {sigma}")

    def attempt(size: int) -> tuple[Tensor, Tensor]:
        """Discrete Laplace numbers of scale σ, kept with probability exp(−(|k| − σ)²/2σ²)."""
        k = _laplace(size, sigma, bits)
        distance = (k.abs() - sigma).clamp_max(64 * sigma)  # nothing that far is kept in the life of the universe
        return k, _bernoulli_exp(distance.square(), 2 * sigma * sigma, bits)

    part = PART[bits(1).device.type]
    whole, rest = divmod(count, part)
    parts = [_until_kept(size, attempt) for size in [part] * whole + [rest] * (rest > 0)]
    return torch.cat(parts) if parts else bits(0)


def _laplace(count: int, scale: int, bits: Bits) -> Tensor:
    """Integers with probability ∝ exp(−|k|/s): k = ±(u + s·v), where 0 has but one sign."""

    def attempt(size: int) -> tuple[Tensor, Tensor]:
        low = _below(scale, size, bits)
        keep = _bernoulli_exp(low, scale, bits)
        found = low + scale * _geometric(size, bits)
        negative = bits(size) < 0
        return torch.where(negative, -found, found), keep & ~(negative & (found == 0))

    return _until_kept(count, attempt)


def _geometric(count: int, bits: Bits) -> Tensor:
    """How often Bernoulli(1/e) succeeds before it fails."""
    total = torch.zeros_like(bits(1)).repeat(count)
    going = torch.arange(count, device=total.device)
    while len(going):
        going = going[_bernoulli_exp(torch.ones_like(going), 1, bits)]
        total[going] += 1
    return total


def _bernoulli_exp(numerator: Tensor, denominator: int, bits: Bits) -> Tensor:
    """True with probability exp(−γ), γ = numerator/denominator ≥ 0: e^−1 for each whole, then the rest."""
    whole = numerator // denominator
    result = _bernoulli_exp_rest(numerator - whole * denominator, denominator, bits)
    left = torch.nonzero(result & (whole > 0)).flatten()
    while len(left):
        again = _bernoulli_exp_rest(torch.ones_like(left), 1, bits)
        result[left[~again]] = False
        whole[left] -= 1
        left = left[again & (whole[left] > 0)]
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
    """Whole numbers from 0 to below `end`, all as likely: as many bits as it has, drawn anew where too large."""
    mask = (1 << (end - 1).bit_length()) - 1

    def attempt(size: int) -> tuple[Tensor, Tensor]:
        number = bits(size) & mask
        return number, number < end

    return bits(count) & mask if mask == end - 1 else _until_kept(count, attempt)


def _until_kept(count: int, attempt: Callable[[int], tuple[Tensor, Tensor]]) -> Tensor:
    """Rejection sampling for many at once: those that are not kept are drawn anew."""
    found, keep = attempt(count)
    missing = torch.nonzero(~keep).flatten()
    while len(missing):
        again, keep = attempt(len(missing))
        found[missing[keep]] = again[keep]
        missing = missing[~keep]
    return found
