"""Sums over a client's samples from which a linear classifier is made: of features, and of their products."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedgist.core.message import Params
from fedgist.core.task import Batches
from fedgist.core.work import Pool
from fedgist.features.feature_map import FeatureMap
from fedgist.features.linear_model import centred
from fedgist.learning.ridge import triangle


@dataclass(frozen=True)
class Moments:
    """Sums by batches of a plan, whose order changes nothing but rounding: each batch's is added in float64.

    With `mirrored`, a sample is itself and its mirror image, each with half the weight.
    """

    features: FeatureMap
    classes: int
    clip: float
    """C: what is longer is shortened to it; 0 leaves features as they are."""
    mirrored: bool = False

    def first(self, plan: Batches, pool: Pool, w: Params) -> tuple[Tensor, Tensor]:
        """Σ φ(x) and Σ y."""
        like = pool["x"]
        features, labels = self._zeros(like, self.features.size), self._zeros(like, self.classes)
        for x, y, weight in self._batches(plan, pool):
            features = features + weight @ self.features(w, x)
            labels = labels + weight @ y
        return features, labels

    def second(self, plan: Batches, pool: Pool, w: Params, mean: Tensor) -> tuple[Tensor, Tensor]:
        """Σ z zᵀ as its upper triangle, and Σ z (y − 1/c)ᵀ."""
        size = self.features.size
        products, targets = self._zeros(pool["x"], size, size), self._zeros(pool["x"], size, self.classes)
        for x, y, weight in self._batches(plan, pool):
            z = centred(self.features(w, x), mean, self.clip)
            weighted = (z * weight[:, None]).T
            products = products + weighted @ z
            targets = targets + weighted @ (y - 1 / self.classes)
        return triangle(products), targets

    def hits(self, plan: Batches, pool: Pool, w: Params, mean: Tensor, weights: Tensor, intercept: Tensor) -> Tensor:
        """How many samples each of several W [candidates, features, classes] gets right, and how many there are."""
        correct = self._zeros(pool["x"], len(weights) + 1)
        for index, mask in zip(plan["index"], plan["mask"], strict=True):
            scores = centred(self.features(w, pool["x"][index]), mean, self.clip) @ weights + intercept
            right = (scores.argmax(2) == pool["y"][index]).to(mask.dtype)
            correct = correct + torch.cat([right @ mask, mask.sum()[None]])
        return correct.long()

    def _batches(self, plan: Batches, pool: Pool) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Images, one-hot labels and weights."""
        for index, mask in zip(plan["index"], plan["mask"], strict=True):
            x, y = pool["x"][index], F.one_hot(pool["y"][index], self.classes).to(mask.dtype)
            for copy in (x, x.flip(-1)) if self.mirrored else (x,):
                yield copy, y, mask / (1 + self.mirrored)

    def _zeros(self, like: Tensor, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=like.device)
