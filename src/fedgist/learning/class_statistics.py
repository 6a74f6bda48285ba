"""Moments of each class of a model's features: sums over samples, the Gaussian that they give, and draws from it."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedgist.core.errors import FedgistError
from fedgist.core.message import Params
from fedgist.core.rng import Rng
from fedgist.core.task import Batches, Model
from fedgist.core.work import Pool
from fedgist.learning.ridge import symmetric, triangle


@dataclass(frozen=True)
class ClassSums:
    """Sums by batches of a plan, each added in float64. A value, so that many clients' are one computation."""

    model: Model
    classes: int

    def of(self, plan: Batches, pool: Pool, w: Params) -> tuple[Tensor, Tensor, Tensor]:
        """For each class n, Σz and Σzzᵀ, the latter as upper triangles; z is what enters the last layer."""
        size, nothing = self.model.feature_size, torch.zeros((), dtype=torch.float64, device=pool["x"].device)
        counts, sums = nothing.expand(self.classes), nothing.expand(self.classes, size)
        products = nothing.expand(self.classes, size, size)
        for index, mask in zip(plan["index"], plan["mask"], strict=True):
            z = self.model(w, pool["x"][index]).features
            members = F.one_hot(pool["y"][index], self.classes).to(z.dtype) * mask[:, None]
            counts = counts + members.sum(0)
            sums = sums + members.T @ z
            products = products + torch.einsum("nc,nd,ne->cde", members, z, z)
        return counts, sums, torch.stack([triangle(product) for product in products])


@dataclass(frozen=True, eq=False)
class Gaussian:
    """N(μ, Σ), with Σ = (Σzzᵀ − nμμᵀ) / (n − 1) as its square root."""

    mean: Tensor
    root: Tensor

    @staticmethod
    def of(count: float, total: Tensor, products: Tensor) -> "Gaussian":
        """From one class's sums; of a single sample there is no spread."""
        if not products.isfinite().all():
            raise FedgistError("the features of the clients' samples are not finite: a smaller lr helps most often")
        mean = total.double() / count
        spread = symmetric(products.double()) - count * torch.outer(mean, mean)
        values, vectors = torch.linalg.eigh(spread / max(1.0, count - 1))
        return Gaussian(mean, vectors * values.clamp_min(0).sqrt())

    def draw(self, rng: Rng, count: int) -> Tensor:
        noise = rng.normal(count, len(self.mean)).to(self.mean)
        return self.mean + noise @ self.root.T


@dataclass(frozen=True)
class HeadLoss:
    """The cross-entropy of a model's last layer on features that are given."""

    model: Model

    def __call__(self, w: Params, features: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        losses = F.cross_entropy(self.model.head(w, features), y, reduction="none")
        return (losses * mask).sum() / mask.sum().clamp_min(1)
