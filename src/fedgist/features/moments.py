"""Sums over a client's samples from which a linear classifier is made: of features, and of their products."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedgist.core.errors import FedgistError
from fedgist.core.message import Params
from fedgist.core.task import Batches
from fedgist.core.work import Pool
from fedgist.dp.releases import Sum, Sums
from fedgist.features.feature_map import FeatureMap
from fedgist.features.linear_model import centred
from fedgist.learning.ridge import triangle

SHARES = (0.03, 0.01, 0.56, 0.4)
"""Of a privacy budget, for Σφ, Σy, Σzzᵀ and Σz(y − 1/c)ᵀ; chosen on held-out digits."""


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
    one: bool = False
    """A 1 follows z in second moments, so that sums of z and of labels are among them."""
    exact: bool = False
    """Sums in float64 of rows that are finite and of norm 1 at most: no record moves them by more than it may."""

    def releases(self, shares: tuple[float, ...]) -> tuple[Sums, Sums]:
        """What a record adds to `first` and to `second` where they are exact, with its shares of a privacy budget.

        φ and y of norm 1 at most; then ‖zzᵀ‖ = ‖z‖² ≤ 1, and ‖z(y − 1/c)ᵀ‖ = ‖z‖√(1 − 1/c). A mirror image halves both.
        """
        if len(shares) != 4:
            raise FedgistError(f"spend must be four shares, for Σφ, Σy, S and V, not {len(shares)}")
        features, labels, products, targets = shares
        apart = math.sqrt(1 - 1 / self.classes)
        return (
            Sums({"features": Sum(1.0, features), "labels": Sum(1.0, labels)}),
            Sums({"products": Sum(1.0, products), "targets": Sum(apart, targets)}),
        )

    def first(self, plan: Batches, pool: Pool, w: Params) -> tuple[Tensor, Tensor]:
        """Σ φ(x) and Σ y."""
        like = pool["x"]
        features, labels = self._zeros(like, self.features.size), self._zeros(like, self.classes)
        for x, y, weight in self._batches(plan, pool):
            rows = self._row(self.features(w, x))
            features = features + weight.to(rows.dtype) @ rows
            labels = labels + weight @ y
        return features, labels

    def second(self, plan: Batches, pool: Pool, w: Params, mean: Tensor) -> tuple[Tensor, Tensor]:
        """Σ z zᵀ as its upper triangle, and Σ z (y − 1/c)ᵀ."""
        size = self.features.size + self.one
        products, targets = self._zeros(pool["x"], size, size), self._zeros(pool["x"], size, self.classes)
        for x, y, weight in self._batches(plan, pool):
            z = F.pad(self._row(centred(self.features(w, x), mean, self.clip)), (0, self.one), value=1.0)
            weighted = (z * weight[:, None]).T
            products = products + weighted @ z
            targets = targets + weighted @ (y.to(z.dtype) - 1 / self.classes)
        return triangle(products), targets

    def hits(self, plan: Batches, pool: Pool, w: Params, mean: Tensor, weights: Tensor, intercept: Tensor) -> Tensor:
        """How many samples each of several W [candidates, features, classes] gets right, and how many there are."""
        correct = self._zeros(pool["x"], len(weights) + 1)
        for index, mask in zip(plan["index"], plan["mask"], strict=True):
            scores = centred(self.features(w, pool["x"][index]), mean, self.clip) @ weights + intercept
            right = (scores.argmax(2) == pool["y"][index]).to(mask.dtype)
            correct = correct + torch.cat([right @ mask, mask.sum()[None]])
        return correct.long()

    def _row(self, rows: Tensor) -> Tensor:
        if not self.exact:
            return rows
        rows = rows.double().nan_to_num(0.0, 0.0, 0.0)
        return rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min(1)

    def _batches(self, plan: Batches, pool: Pool) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Images, one-hot labels and weights."""
        for index, mask in zip(plan["index"], plan["mask"], strict=True):
            x, y = pool["x"][index], F.one_hot(pool["y"][index], self.classes).to(mask.dtype)
            for copy in (x, x.flip(-1)) if self.mirrored else (x,):
                yield copy, y, mask / (1 + self.mirrored)

    def _zeros(self, like: Tensor, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=like.device)
