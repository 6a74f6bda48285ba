"""Scattering: moduli of wavelets of moduli of wavelets, averaged over the cells of a grid. Bruna and Mallat 2013.

Deviations: every scale is the same small filter bank on images of half the size, where the paper dilates the filters;
colours are turned into luminance and two chrominances, of which the latter go to first order only.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedgist.core.errors import FedgistError
from fedgist.core.message import Params
from fedgist.core.rng import Rng
from fedgist.features.feature_map import unit
from fedgist.options import only_images

RADIUS = 3
"""Half the side of a filter: nearly 4σ along the wave, where its Gaussian is narrow, and 2 across it."""
OPPONENTS = ((1.0, 1.0, 1.0), (1.0, -1.0, 0.0), (1.0, 1.0, -2.0))
"""Luminance, red against green, and yellow against blue, before they are scaled to norm 1."""
PART = {"cpu": 16, "cuda": 1024}
"""Images at once: few enough for a CPU's caches, many enough to keep a GPU busy."""


def morlet(orientations: int, sigma: float = 0.8, frequency: float = 0.75 * math.pi, slant: float = 0.5) -> Tensor:
    """Filters ψ_θ [2·orientations, 1, side, side], all real parts before all imaginary ones, of mean 0 and norm 1.

    ψ(u, v) = g(u, v) (e^{iξu} − κ) with g(u, v) = exp(−(u² + s²v²) / 2σ²), the wave along u, and κ such that Σ ψ = 0.
    """
    line = torch.arange(-RADIUS, RADIUS + 1, dtype=torch.float64)
    y, x = line[:, None], line[None, :]
    bank = []
    for angle in (math.pi * k / orientations for k in range(orientations)):
        u, v = x * math.cos(angle) + y * math.sin(angle), y * math.cos(angle) - x * math.sin(angle)
        envelope = torch.exp(-(u.square() + (slant * v).square()) / (2 * sigma**2))
        wave = envelope * torch.exp(1j * frequency * u)
        wave = wave - envelope * (wave.sum() / envelope.sum())
        bank.append(wave / torch.linalg.vector_norm(wave))
    filters = torch.stack(bank)
    return torch.cat([filters.real, filters.imag])[:, None]


def moduli(x: Tensor, filters: Tensor) -> Tensor:
    """|x ∗ ψ_θ| for every plane and every θ: [n, planes, h, w] to [n, planes·orientations, h, w]."""
    planes = F.pad(x.flatten(0, 1)[:, None], (RADIUS,) * 4, mode="reflect")
    real, imaginary = F.conv2d(planes, filters).chunk(2, dim=1)
    if torch.compiler.is_exporting():  # ONNX knows no hypot
        return (real.square() + imaginary.square()).sqrt().reshape(x.shape[0], -1, *x.shape[2:])
    return torch.hypot(real, imaginary).reshape(x.shape[0], -1, *x.shape[2:])


def scatter(x: Tensor, filters: Tensor, scales: int, order: int) -> Tensor:
    """All paths of at most `order` moduli, each at a coarser scale than the one before: [n, paths, h, w]."""
    by_order = [x]
    for scale in range(scales):
        if scale > 0:
            by_order = [F.avg_pool2d(maps, 2) for maps in by_order]
        fresh = [moduli(maps, filters) for maps in by_order[:order]]
        longer = [torch.cat(both, dim=1) for both in zip(by_order[1:], fresh, strict=False)]
        by_order = [by_order[0], *longer, *fresh[len(longer) :]]
    return torch.cat(by_order, dim=1)


def beside(x: Tensor, values: Sequence[float]) -> Tensor:
    """These numbers as a tensor, made where x is: no CUDA graph can record that they are copied there."""
    return torch.stack([x.new_full((), value) for value in values])


@dataclass(frozen=True)
class Scattering:
    """Paths of first and second order, averaged over a grid, under a signed square root, at norm 1."""

    shape: tuple[int, ...]
    low: tuple[float, ...]
    """What a black pixel is, by channel."""
    high: tuple[float, ...]
    """What a full one is."""
    scales: int = 2
    orientations: int = 8
    grid: int = 4

    def __post_init__(self) -> None:
        only_images("features=scattering", self.shape)
        channels, *sides = self.shape
        if channels not in (1, 3):
            raise FedgistError(f"scattering wants grey or colour images, not {channels} channels: take features=model")
        if min(sides) >> (self.scales - 1) < max(RADIUS + 1, self.grid):
            least = max(RADIUS + 1, self.grid) << (self.scales - 1)
            raise FedgistError(
                f"scattering with scales={self.scales} and grid={self.grid} needs images of {least}×{least}, "
                f"not {sides[0]}×{sides[1]}: take fewer"
            )

    @property
    def size(self) -> int:
        first = self.scales * self.orientations
        second = self.orientations**2 * math.comb(self.scales, 2)
        chrominance = 2 * (1 + first) if self.shape[0] == 3 else 0
        return (1 + first + second + chrominance) * self.grid**2

    def weights(self, rng: Rng) -> Params:
        return {"filters": morlet(self.orientations)}

    def __call__(self, w: Params, x: Tensor) -> Tensor:
        if torch.jit.is_tracing() or torch.compiler.is_exporting():  # how many parts there are would be part of it
            return self._part(w["filters"], x)
        return torch.cat([self._part(w["filters"], part) for part in x.split(PART[x.device.type])])

    def _part(self, filters: Tensor, x: Tensor) -> Tensor:
        low, high = (beside(x, ends)[:, None, None] for ends in (self.low, self.high))
        x = (x - low) / (high - low).clamp_min(1e-12)
        if self.shape[0] == 3:
            opponents = torch.stack([beside(x, row) for row in OPPONENTS])
            x = torch.einsum("pc,nchw->nphw", F.normalize(opponents), x)
        paths = [scatter(x[:, :1], filters, self.scales, 2)]
        if self.shape[0] == 3:
            paths.append(scatter(x[:, 1:], filters, self.scales, 1))
        cells = F.adaptive_avg_pool2d(torch.cat(paths, dim=1), self.grid).flatten(1)
        return unit(cells.sign() * cells.abs().sqrt())
