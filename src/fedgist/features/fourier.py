"""Random Fourier features: products of them are nearly a Gaussian kernel of what they are made of. Rahimi 2007."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgist.core.message import Params
from fedgist.core.rng import Rng
from fedgist.features.feature_map import FeatureMap, below


@dataclass(frozen=True)
class Fourier:
    """φ(x) = √(2/d) (cos Ωψ(x), sin Ωψ(x)) with rows of Ω from N(0, I/s²): ⟨φ(x), φ(x')⟩ ≈ exp(−‖ψ(x) − ψ(x')‖²/2s²).

    A frequency has a cosine and a sine, so that the norm of φ is exactly 1.
    """

    of: FeatureMap
    size: int
    """d, an even number."""
    bandwidth: float
    """s, in units of ψ's norm, which is 1."""

    def weights(self, rng: Rng) -> Params:
        frequencies = rng("frequencies").normal(self.size // 2, self.of.size) / self.bandwidth
        return {"frequencies": frequencies, **{f"of.{k}": v for k, v in self.of.weights(rng("of")).items()}}

    def __call__(self, w: Params, x: Tensor) -> Tensor:
        angles = self.of(below(w, "of"), x) @ w["frequencies"].T
        return torch.cat([angles.cos(), angles.sin()], dim=1) * math.sqrt(2 / self.size)
