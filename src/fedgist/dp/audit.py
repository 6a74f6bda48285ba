"""Does a release keep what it promises? What canaries moved in it, each in it by a fair coin, may say no.

An audit gives lower bounds only: it can show that noise is too small, never that it is enough.
"""

import math
from statistics import NormalDist

import torch
from torch import Tensor

CONFIDENCE = 0.999
"""So sure is the bound: an audit of a run that keeps its promise finds fault with it once in a thousand times."""
LEAST = 30
"""Independent directions in which canaries must move a release, so that its noise can be told from them."""


def least_mu_by_canaries(gram: Tensor, seen: Tensor, coins: Tensor) -> float | None:
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
    return gram.diagonal().max().sqrt().item() * (ratio - NormalDist().inv_cdf(CONFIDENCE) * error)
