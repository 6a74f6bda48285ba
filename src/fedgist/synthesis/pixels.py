"""Images on the wire: as numbers, or as bytes, affine over the range that a pixel of the data set can have."""

from collections.abc import Sequence

import torch
from torch import Tensor

LEVELS = 255


def pixel_range(low: Sequence[float], high: Sequence[float], rank: int) -> Tensor:
    """The lowest and the highest value of each channel, as [2, channels, 1, …] for inputs of that rank."""
    return torch.tensor([low, high], dtype=torch.float64).view(2, -1, *[1] * (rank - 1))


def quantise(x: Tensor, low: Sequence[float], high: Sequence[float]) -> Tensor:
    """The nearest of 256 levels between low (0) and high (255) of each channel; what lies outside is clamped."""
    bottom, scale = _affine(x, low, high)
    levels = (x - bottom) / torch.where(scale > 0, scale, torch.ones_like(scale))
    return levels.round().clamp(0, LEVELS).to(torch.uint8)


def dequantise(q: Tensor, low: Sequence[float], high: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
    """The pixels that the levels stand for."""
    levels = q.to(dtype)
    bottom, scale = _affine(levels, low, high)
    return bottom + levels * scale


def _affine(like: Tensor, low: Sequence[float], high: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Level 0 and the distance between levels, for each channel."""
    bottom, top = pixel_range(low, high, like.dim() - 1)
    return bottom.to(like), ((top - bottom) / LEVELS).to(like)
