"""Ridge regression from sums: the classifier, and how strong the ridge should be, from products of features alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgist.core.errors import FedgistError

OWN = [4.0**k for k in range(8, -4, -1)]
"""What a client chooses from, the strongest first, as multiples of a mean eigenvalue; weaker ones leave so little over
of few samples that it is but rounding."""
NOISE = 0.2
"""Of how far noise moved the eigenvalues of S; chosen on held-out digits, at ε = 1 and 8 alike."""


def triangle(symmetric: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix as a vector of the same norm: what is not diagonal times √2."""
    size = symmetric.shape[-1]
    rows, columns = torch.triu_indices(size, size, device=symmetric.device)
    found = symmetric[rows, columns]
    return torch.where(rows == columns, found, math.sqrt(2) * found)


def symmetric(triangle: Tensor) -> Tensor:
    """The matrix that `triangle` was made of."""
    size = math.isqrt(2 * len(triangle))
    rows, columns = torch.triu_indices(size, size, device=triangle.device)
    upper = triangle.new_zeros(size, size)
    upper[rows, columns] = torch.where(rows == columns, triangle / 2, math.sqrt(0.5) * triangle)
    return upper + upper.T


@dataclass(frozen=True, eq=False)
class Ridge:
    """W(λ) = (S₊ + λI)⁻¹ V for all λ at once: S = U diag(e) Uᵀ, where e below 0 (rounding, noise) counts as 0.

    S = Σ zzᵀ and V = Σ z(y − ȳ)ᵀ over n samples with Σ z = 0, so that ȳ is the intercept.
    """

    eigenvalues: Tensor
    vectors: Tensor
    rotated: Tensor
    """UᵀV."""
    noise: float = 0.0
    """How far below 0 the least eigenvalue of S was, which has none there: what noise did to it."""
    dtype: torch.dtype = torch.float32
    """What S and V were rounded to."""

    @staticmethod
    def of(products: Tensor, targets: Tensor, dtype: torch.dtype = torch.float32) -> "Ridge":
        """From S and V, in float64."""
        if not (products.isfinite().all() and targets.isfinite().all()):
            raise FedgistError(
                "the sums of the clients are not finite: look for NaN, infinity or huge numbers in their data and in "
                "what was learned, and take wire=float32 where it is float16, which ends at 65,504"
            )
        values, vectors = torch.linalg.eigh(products.double())
        return Ridge(values.clamp_min(0), vectors, vectors.T @ targets.double(), max(0.0, -values[0].item()), dtype)

    @property
    def scale(self) -> float:
        """The mean eigenvalue, or 1 where there is nothing."""
        return self.eigenvalues.mean().item() or 1.0

    @property
    def rounding(self) -> float:
        """How much S may have been moved by numbers that were rounded, as a bound on its eigenvalues' error.

        Entries err by at most ε/2 of themselves, independently: a symmetric matrix of deviation σ has eigenvalues up to
        2σ√d, and σ ≤ ε/2 · ‖S‖_F/d, which makes ε‖S‖_F/√d. A smaller λ would divide by what is only rounding.
        """
        norm = torch.linalg.vector_norm(self.eigenvalues).item()
        return torch.finfo(self.dtype).eps * norm / len(self.eigenvalues) ** 0.5

    @property
    def least(self) -> float:
        """The least λ that is worth a try: what rounding may have done to S, or a fifth of what noise did to it."""
        return max(self.rounding, NOISE * self.noise)

    def weights(self, ridge: float) -> Tensor:
        """W(λ)."""
        return self.vectors @ (self.rotated / (self.eigenvalues + ridge)[:, None])

    def leaving_out(self, ridge: float, samples: float, spread: float) -> float:
        """Generalised cross-validation (Golub, Heath and Wahba 1979): the squared error of samples that are left out.

        n · RSS / (n − f)² with f = 1 + Σ e / (e + λ) degrees of freedom and, as V = Σ zyᵀ and S = Σ zzᵀ,
        RSS = Σ‖y − ȳ‖² − 2 tr(WᵀV) + tr(WᵀSW). `spread` is Σ‖y − ȳ‖².

        Where there are no more samples than features, S has n − 1 eigenvalues at most, and all others are rounding. As
        W then fits every label but for the ridge, RSS and n − f are differences of nearly equal numbers for small λ;
        what the ridge leaves over, Σ r λ²/(e (e + λ)²) and Σ λ/(e + λ), is none. r are the squared rows of UᵀV.
        """
        e, r = self.eigenvalues, self.rotated.square().sum(1)
        fitted, free = 0.0, samples - 1 - len(e)
        if free <= 0:
            rank = min(max(0, round(samples) - 1), int((e > self.rounding).sum()))
            e, r = e[len(e) - rank :], r[len(e) - rank :]
            fitted, free = (r * ridge**2 / (e * (e + ridge).square())).sum().item(), samples - 1 - rank
        explained = (r * (e + 2 * ridge) / (e + ridge).square()).sum().item()
        freedom = free + (ridge / (e + ridge)).sum().item()
        return samples * max(fitted, spread - explained) / max(freedom, 1e-9) ** 2

    def best(self, samples: float, spread: float, among: Sequence[float]) -> float:
        """The λ whose error on samples that are left out would be least."""
        return min(among, key=lambda ridge: self.leaving_out(ridge, samples, spread))


def moved(head: Tensor, products: Tensor, targets: Tensor) -> Tensor:
    """A head H [features + 1, classes], its intercept last, after a client's own samples: H + (A + ρI)⁻¹ (T − AH).

    A = Σ uuᵀ and T = Σ uyᵀ with u = (z, 1) and y less 1/c, so that T − AH = Σ urᵀ with what H leaves over, r = y − uH,
    and what is added minimises Σ‖r − uD‖² + ρ‖D‖². Of ρ the error of samples that are left out decides, for which
    Σ‖r‖² = n(1 − 1/c) − 2 tr(HᵀT) + tr(HᵀAH). One sample says nothing of others: H stays.
    """
    samples, apart = products[-1, -1].item(), 1 - 1 / head.shape[1]
    if samples < 2:
        return head
    fit = Ridge.of(products, targets - products @ head)
    left = samples * apart + (head * (products @ head - 2 * targets)).sum().item()
    ridges = [fit.scale * factor for factor in OWN]  # the intercept, of which one is always free, is in u already
    return head + fit.weights(fit.best(samples + 1, left, ridges))


def as_logits(weight: Tensor, intercept: Tensor) -> tuple[Tensor, Tensor]:
    """The same classifier with scores for a softmax: W and b times the number c of classes.

    At scores u of 0 the cross-entropy is log c − (y − 1/c)·u + ‖u − ū‖²/2c to second order, which u = c(y − 1/c)
    minimises: least squares with other targets. So c(zW + b) is the first Newton step of logistic regression, and its
    softmax is zW + b itself to first order. It is known without an estimate, so no noise, and no overfit, spoils it.
    """
    classes = len(intercept)
    return classes * weight, classes * intercept


def balanced(weight: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
    """W and b of labels that are brought to mean 0 and deviation 1, class by class: so a rare class counts as much.

    These labels are (y − ȳ)/√(ȳ(1 − ȳ)), of which W is linear. Times √(c − 1)/c and with 1/c, for classes of one size
    it is W with ȳ again. A class that nobody has stays below another: those that are there, as Σ zW = 0, are not all
    below 1/c.
    """
    classes, deviation = len(prior), (prior * (1 - prior)).sqrt()
    scale = torch.where(deviation > 0, math.sqrt(classes - 1) / (classes * deviation), 0.0)
    return weight * scale, (prior > 0).to(prior) / classes


def ridge_of(text: str) -> float:
    """A λ that is given as a number."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 1e-30 <= number <= 1e30:  # beyond, W or λ itself is none that float32 can hold
        raise FedgistError(f"ridge must be sums, validation or a number above 0, from 1e-30 to 1e30, not {text!r}")
    return number
