"""Scattering of signals: moduli of wavelets in time, and of wavelets of those, averaged over stretches.

Andén and Mallat 2014. As for images, every octave is the same small filter bank on a signal of half the length.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedgist.core.message import Params
from fedgist.core.rng import Rng
from fedgist.features.feature_map import unit

WAVELETS = 4
"""In an octave."""
RADIUS = 8
"""Half the length of a filter: more than 3σ of the widest."""


def morlet() -> Tensor:
    """Filters ψ_k [2·WAVELETS, 1, length], real parts first, of mean 0 and norm 1; their frequencies share an octave.

    ψ(t) = exp(−t²/2σ²) (e^{iξt} − κ) with ξ = 0.75π · 2^{−k/WAVELETS}, σ = π/ξ, and κ such that Σ ψ = 0.
    """
    t = torch.arange(-RADIUS, RADIUS + 1, dtype=torch.float64)
    bank = []
    for frequency in (0.75 * math.pi * 2 ** (-k / WAVELETS) for k in range(WAVELETS)):
        envelope = torch.exp(-(t * frequency / math.pi).square() / 2)
        wave = envelope * torch.exp(1j * frequency * t)
        wave = wave - envelope * (wave.sum() / envelope.sum())
        bank.append(wave / torch.linalg.vector_norm(wave))
    filters = torch.stack(bank)
    return torch.cat([filters.real, filters.imag])[:, None]


def moduli(x: Tensor, filters: Tensor) -> Tensor:
    """|x ∗ ψ_k| for every row and every k: [n, rows, length] to [n, rows·WAVELETS, length]."""
    rows = F.pad(x.flatten(0, 1)[:, None], (RADIUS, RADIUS), mode="replicate")
    real, imaginary = F.conv1d(rows, filters).chunk(2, dim=1)
    return torch.hypot(real, imaginary).reshape(x.shape[0], -1, x.shape[2])


@dataclass(frozen=True)
class SignalScattering:
    """Paths of first and second order of signals [channels, length], averaged over stretches, under a signed root."""

    shape: tuple[int, ...]
    grid: int
    """Stretches."""

    @property
    def octaves(self) -> int:
        """As many as leave two values to a stretch, so that what a stretch holds decides how low frequencies go."""
        return max(1, (self.shape[1] // (2 * self.grid)).bit_length())

    @property
    def size(self) -> int:
        paths = 1 + self.octaves * WAVELETS + WAVELETS**2 * math.comb(self.octaves, 2)
        return self.shape[0] * paths * self.grid

    def weights(self, rng: Rng) -> Params:
        return {"filters": morlet()}

    def __call__(self, w: Params, x: Tensor) -> Tensor:
        first: list[Tensor] = []
        second: list[Tensor] = []
        for octave in range(self.octaves):
            if octave > 0:
                x, first = F.avg_pool1d(x, 2), [F.avg_pool1d(rows, 2) for rows in first]
                second += [F.adaptive_avg_pool1d(moduli(rows, w["filters"]), self.grid) for rows in first]
            first.append(moduli(x, w["filters"]))
        averaged = [F.adaptive_avg_pool1d(rows, self.grid) for rows in (x, *first)]
        found = torch.cat([*averaged, *second], dim=1).flatten(1)
        return unit(found.sign() * found.abs().sqrt())
