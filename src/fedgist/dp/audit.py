"""Does a release keep what it promises? Scores of an adversary in two worlds, which differ by one record, say no.

An audit gives lower bounds only: it can show that noise is too small, never that it is enough.
"""

import math
from statistics import NormalDist

import torch
from torch import Tensor

LEAST = 30
"""Independent directions in which canaries must move a release, so that its noise can be told from them."""


def least_mu(without: Tensor, with_record: Tensor, confidence: float = 0.9999) -> float:
    """A μ that the release has at least, from the scores of many independent releases in either world.

    For Gaussian scores (Nasr et al. 2023): μ is the distance of the two means in deviations. Its estimate from n scores
    in each world has the variance 2/n + μ²/4n (the means', and the pooled deviation's).
    """
    n = min(len(without), len(with_record))
    spread = math.sqrt((without.double().var().item() + with_record.double().var().item()) / 2)
    found = (with_record.double().mean().item() - without.double().mean().item()) / max(spread, 1e-300)
    return found - NormalDist().inv_cdf(confidence) * math.sqrt(2 / n + found**2 / (4 * n))


def least_mu_by_canaries(gram: Tensor, seen: Tensor, coins: Tensor, confidence: float = 0.999) -> float | None:
    """A μ that a release has at least, of which canaries are a part, each by a fair coin; None where they are too few.

    c_i is what canary i adds, and r what was seen, less half of all canaries' and all that else is in it, in units in
    which the noise is said to have deviation 1: r = Σ (b_i − ½) c_i β + s w, where β = 1 and s = 1 if all is as it is
    said to be. `gram` is C Cᵀ and `seen` is C r. With C Cᵀ = U Λ Uᵀ the numbers Λ^-½ Uᵀ C r have independent noise, of
    deviation s, whatever canaries have in common; so β and s are those of a regression, and the canary that moves most
    has μ = ‖c‖ β/s.
    """
    values, vectors = torch.linalg.eigh(gram)
    kept = values > 1e-9 * values[-1]
    if int(kept.sum()) < LEAST:
        return None
    root, axes = values[kept].sqrt(), vectors[:, kept]
    moved, independent = root * (axes.T @ (coins.to(gram) - 0.5)), axes.T @ seen / root
    length = moved.square().sum()
    beta = moved @ independent / length
    spread = (independent - beta * moved).square().sum().div(len(root) - 1).sqrt()
    ratio = (beta / spread).item()
    error = math.sqrt(1 / length.item() + ratio**2 / (2 * len(root)))
    return gram.diagonal().max().sqrt().item() * (ratio - NormalDist().inv_cdf(confidence) * error)
