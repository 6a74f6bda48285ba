"""Differentiable siamese augmentation: one random change, the same for real and synthetic images. Zhao and Bilen 2021.

Each call draws one of the named kinds from its seed; `each` does so for every image by itself, as training wants it.
Whatever is drawn, the same operations run, with neutral numbers for the kinds that are not: nothing branches on data,
so it vmaps and compiles, and equal seeds give equal changes.

Deviations from the paper:
1. One draw serves all classes of a step.
2. Scaling has one ratio for both axes, as rotation and flipping share its interpolation.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedgist.core.errors import unknown
from fedgist.core.rng import uniform

KINDS = ("color", "crop", "cutout", "flip", "scale", "rotate")
BRIGHTNESS, SATURATION, CONTRAST = 1.0, 2.0, 0.5
CROP, CUTOUT = 1 / 8, 1 / 2  # parts of the image's side
SCALE, DEGREES = 1.2, 15.0


@dataclass(frozen=True)
class Augmentation:
    """The kinds to draw from; none leaves images as they are. Digits should not be flipped."""

    kinds: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in KINDS:
                raise unknown("augmentation", kind, KINDS)

    def __call__(self, x: Tensor, seed: Tensor) -> Tensor:
        """Images [n, channels, height, width], all changed in the same way."""
        if not self.kinds:
            return x
        u = uniform(seed, (8,), x.dtype)
        chosen = (u[0] * len(self.kinds)).floor()

        def active(kind: str) -> Tensor:
            return chosen == (self.kinds.index(kind) if kind in self.kinds else -1)

        x = _color(x, u[1:4], active("color"))
        x = _move(x, u[1:3], *(active(kind) for kind in ("crop", "flip", "scale", "rotate")))
        return _cut_out(x, u[1:3], active("cutout"))

    def each(self, x: Tensor, seed: Tensor) -> Tensor:
        """The same images, each with a change of its own."""
        if not self.kinds:
            return x
        seeds = seed + torch.arange(len(x), device=x.device)
        return torch.func.vmap(lambda image, own: self(image[None], own)[0])(x, seeds)


UNCHANGED = Augmentation()


def _color(x: Tensor, u: Tensor, active: Tensor) -> Tensor:
    """Brightness, then saturation (distance from the grey image), then contrast (distance from the mean)."""
    brightness = torch.where(active, (u[0] - 0.5) * BRIGHTNESS, 0.0)
    saturation = torch.where(active, u[1] * SATURATION, 1.0)
    contrast = torch.where(active, u[2] + CONTRAST, 1.0)
    x = x + brightness
    if x.shape[1] > 1:
        x = torch.lerp(x.mean(1, keepdim=True), x, saturation)
    return torch.lerp(x.mean((1, 2, 3), keepdim=True), x, contrast)


def _move(x: Tensor, u: Tensor, crop: Tensor, flip: Tensor, scale: Tensor, rotate: Tensor) -> Tensor:
    """Shift by whole pixels, mirror, enlarge or reduce, turn: one affine map, read bilinearly; outside is 0."""
    height, width = x.shape[2:]
    one = torch.ones_like(u[0])
    mirror = torch.where(flip & (u[0] < 0.5), -one, one)
    ratio = torch.where(scale, SCALE ** (2 * u[0] - 1), one)
    angle = torch.where(rotate, (2 * u[0] - 1) * math.radians(DEGREES), 0 * one)
    down, right = (
        torch.where(crop, ((2 * v - 1) * CROP * side).round(), 0 * one) for v, side in ((u[0], height), (u[1], width))
    )
    # where each pixel is read: its place relative to the centre, turned, scaled, mirrored and shifted
    y, x0 = (torch.arange(side, device=x.device) - (side - 1) / 2 for side in (height, width))
    y, x0 = y[:, None].to(x.dtype), x0[None, :].to(x.dtype) * mirror
    cos, sin = angle.cos() * ratio, angle.sin() * ratio
    across, along = cos * x0 - sin * y + right, sin * x0 + cos * y + down
    # grid_sample counts a side as 2, so a pixel is 2 / side
    grid = torch.stack([across * 2 / width, along * 2 / height], -1)
    return F.grid_sample(x, grid.expand(len(x), height, width, 2), align_corners=False)


def _cut_out(x: Tensor, u: Tensor, active: Tensor) -> Tensor:
    """A square of half the side, its centre anywhere, becomes 0."""
    height, width = x.shape[2:]

    def inside(v: Tensor, side: int) -> Tensor:
        # side positions, so floor(v · side) is uniform over them
        distance = torch.arange(side, device=x.device) - (v * side).floor()
        half = side * CUTOUT / 2
        return (distance >= -half) & (distance < half)

    hole = inside(u[0], height)[:, None] & inside(u[1], width)[None, :]
    return x * ~(hole & active)
