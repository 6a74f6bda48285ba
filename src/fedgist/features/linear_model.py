"""A linear classifier on a feature map: a model like any other, whose weights are μ, W and an intercept."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedgist.core.message import Params
from fedgist.core.task import Output
from fedgist.features.feature_map import FeatureMap


@dataclass(frozen=True)
class LinearModel:
    """φ → centre → clip → W: z = clip_C(φ(x) − μ) / C, logits zW + b."""

    features: FeatureMap
    clip: float
    """C: what is longer is shortened to it."""

    def centred(self, w: Params, mean: Tensor, x: Tensor) -> Tensor:
        """z, of norm at most 1; `w` is what the map computes with."""
        apart = self.features(w, x) - mean
        return apart / torch.linalg.vector_norm(apart, dim=1, keepdim=True).clamp_min(self.clip)

    def __call__(self, w: Params, x: Tensor) -> Output:
        """`w` is what the map computes with and, under names of their own, `mean`, `weight` and `intercept`."""
        z = self.centred(w, w["gist.mean"], x)
        return Output(z, z @ w["gist.weight"] + w["gist.intercept"], {})
