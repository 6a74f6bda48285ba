"""Sums from which a ridge classifier follows, as a value: parts of a population are added to it and taken from it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedgist.core.errors import FedgistError
from fedgist.learning.ridge import Ridge


@dataclass(frozen=True, eq=False)
class Sums:
    """Σφ, Σy, S = Σzzᵀ and V = Σz(y − 1/c)ᵀ with z = (φ − μ)/C, in float64; n = Σᵢ(Σy)ᵢ, as each y is a unit vector."""

    features: Tensor
    labels: Tensor
    products: Tensor
    targets: Tensor
    mean: Tensor
    """μ, which z is apart from; of one part of a population it need not be the part's own."""
    scale: float
    """C."""

    @property
    def samples(self) -> float:
        return float(self.labels.sum())

    def plus(self, other: "Sums", sign: int) -> "Sums":
        """With the other population beside this one (sign 1) or taken out of it (−1); both are about the same μ."""
        if not torch.equal(self.mean, other.mean) or self.scale != other.scale:
            raise FedgistError("these sums are about another mean: make them with the model that they are added to")
        labels = self.labels + sign * other.labels
        if labels.min() < -0.5 or labels.sum() < 0.5:
            raise FedgistError(
                "there are more samples of a class in these sums than in the model's: it has none of them"
            )
        return Sums(
            self.features + sign * other.features,
            labels,
            self.products + sign * other.products,
            self.targets + sign * other.targets,
            self.mean,
            self.scale,
        )

    def centred(self) -> "Sums":
        """About the population's own mean μ'. With δ = (μ' − μ)/C and s = Σz = nδ, z' = z − δ, so that
        Σz'z'ᵀ = S − sδᵀ − δsᵀ + nδδᵀ = S − nδδᵀ, and Σz'(y − 1/c)ᵀ = V − δ Σ(y − 1/c)ᵀ."""
        n, mean = self.samples, self.features / self.samples
        shift = (mean - self.mean) / self.scale
        products = self.products - n * torch.outer(shift, shift)
        targets = self.targets - torch.outer(shift, self.labels - n / len(self.labels))
        return Sums(self.features, self.labels, products, targets, mean, self.scale)

    def ridge(self, dtype: torch.dtype) -> Ridge:
        """Of sums that were rounded to this."""
        return Ridge.of(self.products, self.targets, dtype)

    @property
    def spread(self) -> float:
        """Σ‖y − ȳ‖² = n (1 − ‖ȳ‖²)."""
        return self.samples * (1 - float((self.labels / self.samples).square().sum()))
